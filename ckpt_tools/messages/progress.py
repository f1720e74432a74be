"""Progress callbacks, and what is logged: repeated requests to a store, decisions and outcomes.

Imports nothing that costs time at start-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpt_tools.process.credentials import mask_secrets

if TYPE_CHECKING:
    import logging

ProgressCallback = Callable[[int, int], None]
"""Called with the number of bytes done and in all."""


def ignore_progress(done: int, total: int) -> None:
    """Report no progress."""


class ProgressMeter:
    """Sums the bytes of each step for ``on_progress``; never reports more than ``total``."""

    def __init__(self, on_progress: ProgressCallback, total: int) -> None:
        self.on_progress, self.total, self.done = on_progress, total, 0

    def add_bytes(self, num_bytes: int) -> None:
        self.done += num_bytes
        self.on_progress(min(self.done, self.total), self.total)


def get_logger(area: str) -> logging.Logger:
    """The logger ``ckpt_tools.AREA``. One handler ignores everything: without any, Python prints warnings to stderr."""
    import logging

    root = logging.getLogger("ckpt_tools")
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    return root.getChild(area)


def log_warning(area: str, sentence: str) -> None:
    """Log ``sentence``, without credentials, as a warning of ``area``: something went another way than asked for."""
    get_logger(area).warning("%s", mask_secrets(sentence))


def log_info(area: str, sentence: str) -> None:
    """Log ``sentence``, without credentials, as a decision or an outcome of ``area``."""
    get_logger(area).info("%s", mask_secrets(sentence))
