"""Whether the libraries that a run needs are installed, found out without importing any of them."""

from __future__ import annotations

from importlib.util import find_spec

from ckpt_tools.errors import UsageError

from .model_names import HUGGING_FACE
from .train_config import TrainConfig

INSTALL = "pip install 'ckpt-tools[train]'"
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
"""Names to say, if they are not the module's own."""


def needed_modules(config: TrainConfig) -> list[str]:
    """The frameworks that this run imports, in whichever process."""
    by_launcher = ["ray", "pyarrow"] if config.launcher == "ray" else []
    by_engine = ["deepspeed"] if config.sharding.framework == "deepspeed" else []
    by_dataset = ["sklearn"] if config.dataset == "digits" else []
    by_model = ["transformers"] if config.model.startswith(HUGGING_FACE) else []
    by_record = ["tensorboardX"] if config.tensorboard else []
    return ["torch", "torchvision", *by_launcher, *by_engine, *by_dataset, *by_model, *by_record]


def check_installed(config: TrainConfig) -> None:
    """Raises ``UsageError`` with the command that installs what is missing."""
    missing = [DISTRIBUTIONS.get(name, name) for name in needed_modules(config) if not _is_installed(name)]
    if missing:
        raise UsageError(f"this run needs {', '.join(missing)}, not installed here; install with: {INSTALL}")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
