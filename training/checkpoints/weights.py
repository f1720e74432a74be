"""Initial weights (``--init-from``) and final export (``--export``); neither gathers the model on a rank."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import nn

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError

from ..config.options import is_url
from ..config.train_config import TrainConfig
from .errors import reading
from .temporary import converted


def load_first_weights(config: TrainConfig, model: nn.Module, elsewhere: Collection[str] = ()) -> None:
    """Load the weights of ``--init-from`` into this rank's part of ``model``; collective.

    Tensors in ``elsewhere`` are on other ranks only.

    Raises:
        UsageError: names or shapes are not the model's. CkptError: the checkpoint cannot be read.
    """
    if config.init_from is None:
        return
    with reading(config.init_from), _renamed(config) as checkpoint:
        ckpt_tools.load_into(model, None, checkpoint, elsewhere=elsewhere)


def _renamed(config: TrainConfig) -> AbstractContextManager[Path | str]:
    """The weights, with ``--rename`` a converted copy."""
    assert config.init_from is not None
    if not config.rename:
        return nullcontext(config.init_from)
    return converted(config.init_from, to="safetensors", state="model", rename=config.rename)


def check_export(config: TrainConfig) -> None:
    """Raises DestinationExistsError if the path of ``--export`` exists; called before the run."""
    if config.export is not None and not is_url(config.export) and os.path.lexists(config.export):
        raise DestinationExistsError(f"--export {config.export} exists already; move it away or choose another name")


def export(config: TrainConfig, checkpoint: str) -> None:
    """Write the weights of ``checkpoint`` to the path of ``--export``. Raises CkptError; the checkpoint stays."""
    if config.export is not None:
        ckpt_tools.consolidate(checkpoint, config.export)
