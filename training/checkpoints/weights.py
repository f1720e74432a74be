"""The ends of a run that other programs know: weights to start from, and one model at the end.

Neither gathers the model on a rank. Each rank reads its own part of the first weights. The export is a conversion of
the last checkpoint, from range to range.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError

from ..config.options import is_url
from ..config.train_config import TrainConfig
from .errors import reading
from .temporary import shared_temporary_folder


def load_first_weights(config: TrainConfig, model: nn.Module, elsewhere: Collection[str] = ()) -> None:
    """The weights that ``--init-from`` names, into this rank's part of ``model``; collective. ``elsewhere`` are the
    names that only other ranks have.

    Raises:
        UsageError: names or shapes are not the model's. CkptError: the checkpoint cannot be read.
    """
    if config.init_from is None:
        return
    with reading(config.init_from), _renamed(config) as checkpoint:
        ckpt_tools.load_into(model, None, checkpoint, elsewhere=elsewhere)


@contextmanager
def _renamed(config: TrainConfig) -> Iterator[Path | str]:
    """With ``--rename``, a copy of the weights under their new names, made by the first rank of each machine."""
    assert config.init_from is not None
    if not config.rename:
        yield config.init_from
        return
    folder, leads = shared_temporary_folder(), int(os.environ["LOCAL_RANK"]) == 0
    try:
        if leads:
            ckpt_tools.convert(config.init_from, folder, to="safetensors", state="model", rename=config.rename)
        torch.distributed.barrier()
        yield folder
        torch.distributed.barrier()
    finally:
        if leads:
            shutil.rmtree(folder, ignore_errors=True)


def check_export(config: TrainConfig) -> None:
    """Raises DestinationExistsError, before the run, if ``--export`` names something that is there."""
    if config.export is not None and not is_url(config.export) and os.path.lexists(config.export):
        raise DestinationExistsError(f"--export {config.export} is there already; move it away or choose another name")


def export(config: TrainConfig, checkpoint: str) -> None:
    """Write the weights of ``checkpoint`` as one model. Raises CkptError; the checkpoint stays."""
    if config.export is not None:
        ckpt_tools.consolidate(checkpoint, config.export)
