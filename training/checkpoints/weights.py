"""Initial weights (``--init-from``), final export (``--export``), and converted copies for the ranks of a machine."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError, UsageError

from ..config.options import is_url
from ..config.train_config import TrainConfig
from ..models.zoo import unwrap_base_model
from .collectives import leader_first
from .settings import hint_at_convert
from .storage import report_failed_writes

_ENDING = re.compile(r"\.[A-Za-z]\w*$")
"""Ending of a file's name, but not of a version such as 2.5."""


def load_first_weights(
    config: TrainConfig, model: nn.Module, elsewhere: Collection[str] = (), *, dry_run: bool = False
) -> None:
    """Load the weights of ``--init-from`` into this rank's part of ``model``; collective. Tensors in ``elsewhere`` are
    on other ranks only. Raises UsageError if names or shapes are not the model's, CkptError if it cannot be read."""
    if config.init_from is None:
        return
    with hint_at_convert(config.init_from):
        ckpt_tools.load_into(
            unwrap_base_model(config, model),
            None,
            config.init_from,
            elsewhere=elsewhere,
            dry_run=dry_run,
            rename=config.rename,
            recipe=config.recipe,
            inverse=config.inverse,
        )


def check_fits(config: TrainConfig, model: nn.Module, checkpoint: Path | str | None) -> None:
    """Check that the checkpoint to resume and that of ``--init-from`` have the tensors of ``model``, which may be
    on the meta device. Raises as :func:`load_first_weights`."""
    load_first_weights(config, model, dry_run=True)
    if checkpoint is not None:
        with hint_at_convert(checkpoint):
            ckpt_tools.load_into(model, None, checkpoint, dry_run=True)


def check_export(config: TrainConfig) -> None:
    """Raises CkptError if a model cannot be written to the path of ``--export``; called before the run. Whether a store
    allows to write is not tried."""
    if config.export is None:
        return
    place = config.export.removeprefix("file://")
    to: ckpt_tools.WrittenFormat | None = None if _ENDING.search(place) else "safetensors"
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "weights.pt")
        torch.save({"weight": torch.zeros(1)}, weights)
        try:
            if not is_url(place) and os.path.lexists(place):
                raise DestinationExistsError(place)
            ckpt_tools.plan(weights, place, state="model", to=to)
        except DestinationExistsError:
            message = f"--export {place} exists already; move it away or choose another name"
            raise DestinationExistsError(message) from None
        except UsageError as error:
            if "choose a format" not in error.message:
                raise
            message = "name a file that ends in .safetensors or .pt, or a folder without an ending"
            raise UsageError(f"--export {place} ends as no model file does: {message}") from None
    if not is_url(place):
        nearest = next(folder for folder in Path(place).absolute().parents if os.path.lexists(folder))
        with report_failed_writes(Path(place)), tempfile.TemporaryFile(dir=nearest):
            pass


def export_weights(config: TrainConfig, checkpoint: str) -> None:
    """Write the weights of ``checkpoint``, or its adapter, to ``--export``. Raises CkptError; the checkpoint stays."""
    if config.export is None:
        return
    if config.lora:
        ckpt_tools.convert(checkpoint, config.export, to="peft")
    else:
        ckpt_tools.consolidate(checkpoint, config.export)


@contextmanager
def converted_copy(checkpoint: Path | str, **options: Any) -> Iterator[Path]:
    """A copy of ``checkpoint`` for the block, converted with ``options`` by the first rank of each machine; collective.
    The folder has the same name on every rank. Raises CkptError."""
    name = [f"training-{uuid.uuid4().hex}"]
    torch.distributed.broadcast_object_list(name)
    folder, leads = Path(tempfile.gettempdir(), name[0]), False
    try:
        with leader_first() as leads:
            if leads:
                ckpt_tools.convert(checkpoint, folder, **options)
        yield folder
        torch.distributed.barrier()
    finally:
        if leads:
            shutil.rmtree(folder, ignore_errors=True)
