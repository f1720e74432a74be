"""Interface between the loop and an engine; every rank calls each method at the same time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_flatten, tree_unflatten

import ckpt_tools
from ckpt_tools.errors import FormatError

from ..checkpoints.settings import RunProgress as RunProgress
from ..config.options import Precision

DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Metrics = Callable[[Callable[..., Any], Any], Mapping[str, Tensor]]
"""Metrics of a batch, from what computes the model, and the batch: a value of each sample [n], or their mean, 0-d."""

Save = Callable[[Path], None]  # function that writes this rank's shards into a folder


class Engine(Protocol):
    """A sharded model with its optimizer and scheduler, on this rank."""

    data_rank: int
    """Number of this rank's share of the samples; ranks of a tensor or pipeline group have the same."""

    loss: Callable[[Callable[..., Any], Any], Tensor]
    """Loss of a batch, from what computes the model and the batch."""

    def step(self, batch: Any) -> Tensor:
        """One optimizer step on this rank's samples, in ``gradient_accumulation`` micro-batches; the mean loss, 0-d,
        detached. ``batch`` is a tree of tensors [n, ...] on the engine's device, with the same n on every rank."""

    def evaluate(self, metrics: Metrics, batch: Any) -> Mapping[str, Tensor]:
        """``metrics`` of the model in evaluation mode and the batch; collective."""

    def prepare_save(self, progress: RunProgress, group: ProcessGroup | None = None) -> Save:
        """Function that writes this rank's shards into a folder, which exists and may differ between ranks. With
        ``group``, for the messages of a save in the background, it writes a copy in CPU memory, until the next call;
        only FSDP2 and DDP can."""

    def resume(self, checkpoint: Path | str) -> RunProgress:
        """Restore model, optimizer and scheduler from a checkpoint of any format and world size, which every rank can
        read. Learning rate, schedule and weight decay stay those of the run. Raises ``CkptError``."""

    def close(self) -> None:
        """Release the framework's resources."""


def split_batch(batch: Any, parts: int) -> list[Any]:
    """The batch cut into parts of equal size."""
    if parts == 1:
        return [batch]
    leaves, tree = tree_flatten(batch)
    return [tree_unflatten(list(each), tree) for each in zip(*(leaf.chunk(parts) for leaf in leaves), strict=True)]


def average_losses(losses: list[Tensor]) -> Tensor:
    """Mean over the micro-batches of a step, 0-d; a single loss is returned as it is."""
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def read_progress(entries: Mapping[str, Any], checkpoint: Path | str) -> RunProgress:
    """Progress of the run that wrote these entries of a checkpoint. Raises ``FormatError``."""
    progress = RunProgress.from_entries(entries)
    if progress is None:
        raise FormatError(f"{checkpoint} does not say after which epoch and step it was saved")
    return progress


def read_scheduler_state(entries: Mapping[str, Any], checkpoint: Path | str) -> dict[str, Any]:
    """State of the learning rate scheduler among these entries. Raises ``FormatError``."""
    state = entries.get("lr_scheduler")
    if not isinstance(state, dict):
        raise FormatError(f"{checkpoint} holds no state of a learning rate scheduler")
    return state


def get_own_group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Peak learning rate, weight decay and ``fused`` of each group of a new optimizer."""
    names = ("initial_lr", "weight_decay", "fused")
    groups = ({"initial_lr": group["lr"], **group} for group in optimizer.param_groups)
    return [{name: group[name] for name in names if name in group} for group in groups]


def apply_settings(own: list[dict[str, Any]], scheduler: LambdaLR) -> None:
    """Apply the run's own learning rates, schedule and weight decay from the next step on, in place of the loaded ones.
    If these are the same, this computes exactly the saved numbers, as ``LambdaLR`` computes them."""
    groups = scheduler.optimizer.param_groups
    scheduler.base_lrs = [values["initial_lr"] for values in own]
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    for group, factor, values in zip(groups, factors, own, strict=True):
        group |= {**values, "lr": values["initial_lr"] * factor}
        for parameter in group["params"] if group.get("fused") else ():
            if "step" in (state := scheduler.optimizer.state.get(parameter, {})):
                state["step"] = state["step"].to(parameter.device)  # where the kernel reads it
    scheduler._last_lr = [group["lr"] for group in groups]


def is_loaded_by_deepspeed(
    checkpoint: Path | str, stage: int, dtype: torch.dtype, stages: int = 1, names: Collection[str] | None = None
) -> bool:
    """Whether DeepSpeed's ``load_checkpoint`` reads it without conversion, in a pipeline of ``stages``. ``names`` are
    those of the model, which a pipeline needs. Raises CkptError if it cannot be read."""
    if not isinstance(checkpoint, Path):
        return False
    summary, world_size = ckpt_tools.inspect(checkpoint), torch.distributed.get_world_size()
    weights = [tensor for tensor in summary.tensors if (tensor.slot, tensor.kind) == ("weight", "parameter")]
    # Only pipelines write files of layers.
    has_layers = any(checkpoint.glob("*/layer_*-model_states.pt"))
    has_stages = sum(1 for _ in checkpoint.glob("*/mp_rank_*_model_states.pt")) if has_layers else 1
    is_of_run = (summary.format, summary.world_size, has_stages) == (f"zero{stage}", world_size, stages)
    has_dtype = {tensor.dtype for tensor in weights} == {str(dtype).removeprefix("torch.")}
    has_names = names is None or {tensor.name for tensor in weights} <= {*names}
    return is_of_run and has_dtype and has_names and (checkpoint / "latest").is_file()
