"""Initial weights (``--init-from``), final export (``--export``), and converted copies for the ranks of a machine."""

from __future__ import annotations

import os
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
from ckpt_tools.errors import DestinationExistsError

from ..config.options import is_url
from ..config.train_config import TrainConfig
from ..models.lora import base_of
from .leading import leader_first
from .settings import reading


def load_first_weights(config: TrainConfig, model: nn.Module, elsewhere: Collection[str] = ()) -> None:
    """Load the weights of ``--init-from`` into this rank's part of ``model``; collective.

    Tensors in ``elsewhere`` are on other ranks only.

    Raises:
        UsageError: names or shapes are not the model's. CkptError: the checkpoint cannot be read.
    """
    if config.init_from is None:
        return
    with reading(config.init_from):
        ckpt_tools.load_into(
            base_of(config, model),
            None,
            config.init_from,
            elsewhere=elsewhere,
            rename=config.rename,
            recipe=config.recipe,
            inverse=config.inverse,
        )


def check_recipe(config: TrainConfig) -> None:
    """Raises CkptError if the recipe of ``--recipe`` cannot be read; called before the run."""
    if config.recipe is not None:
        ckpt_tools.show_recipe(config.recipe)


def check_export(config: TrainConfig) -> None:
    """Raises DestinationExistsError if the path of ``--export`` exists; called before the run."""
    if config.export is not None and not is_url(config.export) and os.path.lexists(config.export):
        raise DestinationExistsError(f"--export {config.export} exists already; move it away or choose another name")


def export(config: TrainConfig, checkpoint: str) -> None:
    """Write the weights of ``checkpoint``, or its adapter, to ``--export``. Raises CkptError; the checkpoint stays."""
    if config.export is None:
        return
    if config.lora:
        ckpt_tools.convert(checkpoint, config.export, to="peft")
    else:
        ckpt_tools.consolidate(checkpoint, config.export)


@contextmanager
def converted(checkpoint: Path | str, **options: Any) -> Iterator[Path]:
    """A copy of ``checkpoint`` for the block, converted by the first rank of each machine; collective. The folder has
    the same name on every rank. ``options`` are those of :func:`ckpt_tools.convert`. Raises CkptError."""
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
