"""Checks that the libraries of a run are installed, without importing them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from ckpt_tools.errors import UsageError

from .model_names import HUGGING_FACE
from .train_config import TrainConfig

INSTALL = "pip install 'ckpt-tools[train]'"
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
"""Names to install, where they differ from the module."""


def needed_modules(config: TrainConfig) -> list[str]:
    """Libraries that any process of this run imports."""
    by_launcher = ["ray", "pyarrow"] if config.launcher == "ray" else []
    by_engine = ["deepspeed"] if config.sharding.framework == "deepspeed" else []
    by_dataset = ["sklearn"] if config.dataset == "digits" else []
    by_model = ["transformers"] if config.model.startswith(HUGGING_FACE) else []
    by_record = ["tensorboardX"] if config.tensorboard else []
    return ["torch", "torchvision", *by_launcher, *by_engine, *by_dataset, *by_model, *by_record]


def check_installed(config: TrainConfig) -> None:
    """Raises ``UsageError`` with the command that installs what is missing."""
    check_modules(needed_modules(config))


def check_modules(names: Iterable[str]) -> None:
    """Raises ``UsageError`` as :func:`check_installed`."""
    missing = [DISTRIBUTIONS.get(name, name) for name in names if not _is_installed(name)]
    if missing:
        raise UsageError(f"this run needs {', '.join(missing)}, not installed here; install with: {INSTALL}")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
