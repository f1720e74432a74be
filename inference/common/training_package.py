"""Modules of the training package, imported on first use: ``from .training_package import data``.

The package is ``training`` in a checkout, and ``ckpt_tools_training`` in an installed wheel, because a name as general
as ``training`` could be the user's own package.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training import (
        commands,
        config,
        data,
        evaluation,
        interruption,
        language_model,
        launchers,
        locking,
        model_config,
        model_names,
        models,
        result,
        zoo,
    )

__all__ = [
    "commands",
    "config",
    "data",
    "evaluation",
    "interruption",
    "language_model",
    "launchers",
    "locking",
    "model_config",
    "model_names",
    "models",
    "result",
    "zoo",
]

_PACKAGE = __name__.partition(".")[0].replace("inference", "training")


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{_PACKAGE}.{name}")
