"""Resuming from a checkpoint of any format, of any engine and world size."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import ckpt_tools
from ckpt_tools.errors import FormatError

from ..checkpoints.temporary import shared_temporary_folder
from ..config.train_config import TrainConfig
from .base import Progress

_FORMATS: Mapping[int, ckpt_tools.WrittenFormat] = {1: "zero1", 2: "zero2", 3: "zero3"}


def progress_of(entries: Mapping[str, Any], checkpoint: Path | str) -> Progress:
    """How far the run had come that wrote these entries beside model and optimizer. Raises ``FormatError``."""
    progress = Progress.of(entries)
    if progress is None:
        raise FormatError(f"{checkpoint} does not say after which epoch and step it was saved")
    return progress


def scheduler_of(entries: Mapping[str, Any], checkpoint: Path | str) -> dict[str, Any]:
    """The learning rate schedule's state among these entries. Raises ``FormatError``."""
    state = entries.get("lr_scheduler")
    if not isinstance(state, dict):
        raise FormatError(f"{checkpoint} holds no state of a learning rate scheduler")
    return state


def apply_settings(config: TrainConfig, scheduler: LambdaLR) -> None:
    """Let the run's own learning rate, schedule and weight decay hold from the next step on.

    The loaded state of optimizer and scheduler brings those of the checkpoint's run along. If they are the same, this
    computes the very numbers that were saved, as ``LambdaLR`` itself computes them.
    """
    groups = scheduler.optimizer.param_groups
    scheduler.base_lrs = [config.learning_rate] * len(groups)
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    for group, factor in zip(groups, factors, strict=True):
        group["initial_lr"] = config.learning_rate
        group["lr"] = config.learning_rate * factor
        group["weight_decay"] = config.weight_decay
    scheduler._last_lr = [group["lr"] for group in groups]


@contextmanager
def as_zero(checkpoint: Path | str, stage: int, dtype: torch.dtype) -> Iterator[Path]:
    """``checkpoint`` as a folder that ``load_checkpoint`` takes at this stage, precision and world size; collective.

    If it is of another format, stage, precision or world size, or at a URL, from which DeepSpeed reads nothing, the
    first rank of each machine converts it into a temporary folder, which takes as much room as the checkpoint until it
    is loaded.

    Raises:
        CkptError: it cannot be read or has no form in this stage.
    """
    if fits_zero(checkpoint, stage, dtype):
        yield Path(checkpoint)
        return
    world_size = torch.distributed.get_world_size()
    folder, leads = shared_temporary_folder(), int(os.environ["LOCAL_RANK"]) == 0
    try:
        if leads:
            ckpt_tools.convert(checkpoint, folder, to=_FORMATS[stage], world_size=world_size, dtype=dtype)
        torch.distributed.barrier()
        yield folder
        torch.distributed.barrier()
    finally:
        if leads:
            shutil.rmtree(folder, ignore_errors=True)


def fits_zero(
    checkpoint: Path | str, stage: int, dtype: torch.dtype, stages: int = 1, names: Collection[str] | None = None
) -> bool:
    """Whether DeepSpeed's ``load_checkpoint`` takes it as it is, in a pipeline of so many ``stages`` or in none. Only a
    pipeline asks for the ``names`` of the model. Raises CkptError if it cannot be read."""
    if not isinstance(checkpoint, Path):
        return False
    found, world_size = ckpt_tools.inspect(checkpoint), torch.distributed.get_world_size()
    weights = [tensor for tensor in found.tensors if (tensor.slot, tensor.kind) == ("weight", "parameter")]
    is_of_run = (found.format, found.world_size, _stages_of(checkpoint)) == (f"zero{stage}", world_size, stages)
    has_dtype = {tensor.dtype for tensor in weights} == {str(dtype).removeprefix("torch.")}
    has_names = names is None or {tensor.name for tensor in weights} <= {*names}
    return is_of_run and has_dtype and has_names and (checkpoint / "latest").is_file()


def _stages_of(checkpoint: Path) -> int:
    """The stages of the pipeline that DeepSpeed saved: one if it was none. Only pipelines have files of layers."""
    if not any(checkpoint.glob("*/layer_*-model_states.pt")):
        return 1
    return sum(1 for _ in checkpoint.glob("*/mp_rank_*_model_states.pt"))
