"""Modules of the training package, imported on first use: ``from .training_package import data``.

The package is ``training`` in a checkout, and ``ckpt_tools_training`` in an installed wheel, because a name as general
as ``training`` could be the user's own package.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training import launchers
    from training.checkpoints import settings as run_settings
    from training.checkpoints import storage
    from training.config import command_line as commands
    from training.config import model_names, references
    from training.config import train_config as config
    from training.data import datasets as data
    from training.loop import evaluation, result
    from training.loop import stopping as interruption
    from training.models import config_json as model_config
    from training.models import language_model, zoo

__all__ = [
    "commands",
    "config",
    "data",
    "evaluation",
    "interruption",
    "language_model",
    "launchers",
    "model_config",
    "model_names",
    "references",
    "result",
    "run_settings",
    "storage",
    "zoo",
]

_PACKAGE = __name__.partition(".")[0].replace("inference", "training")
_MODULES = {
    "commands": "config.command_line",
    "config": "config.train_config",
    "data": "data.datasets",
    "evaluation": "loop.evaluation",
    "interruption": "loop.stopping",
    "language_model": "models.language_model",
    "launchers": "launchers",
    "model_config": "models.config_json",
    "model_names": "config.model_names",
    "references": "config.references",
    "result": "loop.result",
    "run_settings": "checkpoints.settings",
    "storage": "checkpoints.storage",
    "zoo": "models.zoo",
}


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{_PACKAGE}.{_MODULES[name]}")
