"""Outlets: destinations of checkpoints and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ..checkpoints.run_folder import CHECKPOINTS, make_partial, partial_folder
from .metrics import Journal
from .screen import Status, rank_screen

Values = Mapping[str, float]
"""Measured values by name."""


class Outlet(Protocol):
    """Destination of a run's checkpoints and metrics, chosen by the launcher. Every rank calls ``begin``, ``finish``,
    ``announce`` and ``report`` in the same order; only the first rank calls the others."""

    @property
    def uploads(self) -> bool:
        """Whether ``finish`` uploads files, which happens while training continues."""
        ...

    def begin(self, name: str) -> Path:
        """An empty folder for this rank's shards of a checkpoint, under a name that marks it as unfinished."""
        ...

    def finish(self, name: str) -> None:
        """Called when this rank has written, on the first rank when all have; possibly in another thread."""
        ...

    def announce(self, name: str, values: Values) -> None:
        """Called with the latest values when the checkpoint is complete."""
        ...

    def report(self, values: Values) -> None:
        """Called after an epoch without a checkpoint."""
        ...

    def record(self, figures: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``."""
        ...

    def say(self, line: str) -> None:
        """Print a line for the user."""
        ...

    def show(self, status: Status) -> None:
        """Show a status, which replaces the one before."""
        ...


class FolderOutlet:
    """:class:`Outlet` into ``OUT/checkpoints``, which all ranks share, and ``OUT/metrics.jsonl``.

    A checkpoint's folder gets its final name when all ranks have written.
    """

    def __init__(self, out: Path, *, tensorboard: bool = False) -> None:
        self._journal = Journal(out, tensorboard=tensorboard)
        self._screen = rank_screen()
        self._folder = out / CHECKPOINTS

    uploads = False

    def begin(self, name: str) -> Path:
        if torch.distributed.get_rank() == 0:
            make_partial(self._folder, name)
        torch.distributed.barrier()
        return partial_folder(self._folder, name)

    def finish(self, name: str) -> None:
        if torch.distributed.get_rank() == 0:
            partial_folder(self._folder, name).rename(self._folder / name)

    def announce(self, name: str, values: Values) -> None:
        """Nothing: the final name marks a complete checkpoint."""

    def report(self, values: Values) -> None:
        """Nothing: ``record`` gets the values too."""

    def record(self, figures: Mapping[str, Any]) -> None:
        self._journal.record(figures)

    def say(self, line: str) -> None:
        self._screen.say(line)

    def show(self, status: Status) -> None:
        self._screen.show(status)
