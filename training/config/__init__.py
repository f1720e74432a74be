"""Options of a run, their checks, and what follows from them before any framework is imported."""

from .train_config import TrainConfig

__all__ = ["PACKAGE", "TrainConfig"]

PACKAGE = f"{__package__}".rpartition(".")[0]
"""``training`` in a checkout, ``ckpt_tools_training`` in an installed wheel."""
