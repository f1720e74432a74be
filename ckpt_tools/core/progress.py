"""Who hears how far a long work is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Hears of bytes done so far and in all."""


@dataclass(slots=True)
class Meter:
    """Adds up bytes for a progress that wants them in all; never says more than there are."""

    on_progress: Progress
    total: int
    done: int = 0

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        self.on_progress(min(self.done, self.total), self.total)
