"""Progress callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Called with the number of bytes done and in all."""


def silent(done: int, total: int) -> None:
    """Report no progress."""


@dataclass(slots=True)
class Meter:
    """Sums the bytes of each step for ``on_progress``; never reports more than ``total``."""

    on_progress: Progress
    total: int
    done: int = 0

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        self.on_progress(min(self.done, self.total), self.total)
