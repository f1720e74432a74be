"""Checkpoints in a folder that all ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.run_folder import CHECKPOINTS, make_partial, partial_folder
from .metrics import Journal
from .saving import Values
from .screen import Status, rank_screen


class FolderOutlet:
    """A :class:`.saving.Outlet` into ``OUT/checkpoints`` and ``OUT/metrics.jsonl``.

    All ranks write below a temporary name. The folder gets its own when the last one is done.
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
        """Its name has announced it."""

    def report(self, values: Values) -> None:
        """``record`` keeps them."""

    def record(self, figures: Mapping[str, Any]) -> None:
        self._journal.record(figures)

    def say(self, line: str) -> None:
        self._screen.say(line)

    def show(self, status: Status) -> None:
        self._screen.show(status)
