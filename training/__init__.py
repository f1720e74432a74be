"""Distributed training of your own models and of small ones, with checkpoints that ``ckpt_tools`` opens.

``python -m training --help`` lists the options; ``launch(TrainConfig(...))`` is the same from Python.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.train_config import TrainConfig
    from .launchers import launch

__all__ = ["TrainConfig", "launch"]

_MODULES = {"TrainConfig": ".config.train_config", "launch": ".launchers"}


def __getattr__(name: str) -> Any:
    """Imported on first use: ``launch`` imports torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
