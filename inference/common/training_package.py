"""The modules of the training package that lies beside this one.

In a checkout that package is ``training``. An installed wheel calls it ``ckpt_tools_training``: it must not put
so general a name into somebody's environment, where ``from training import ...`` could find the user's own package. So
inference imports training through here: ``from .training_package import data``. A module is imported when it is
first asked for.
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
