"""Checkpoints in a folder that all ranks share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .checkpoints import CHECKPOINTS, make_partial, partial_folder
from .saving import Values

METRICS_NAME = "metrics.jsonl"


class FolderOutlet:
    """A :class:`.saving.Outlet` into ``OUT/checkpoints`` and ``OUT/metrics.jsonl``.

    All ranks write below a temporary name. The folder gets its own when the last one is done.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._folder = out / CHECKPOINTS

    def begin(self, name: str) -> Path:
        if torch.distributed.get_rank() == 0:
            make_partial(self._folder, name)
        torch.distributed.barrier()
        return partial_folder(self._folder, name)

    def finish(self, name: str) -> None:
        partial_folder(self._folder, name).rename(self._folder / name)

    def announce(self, name: str, values: Values) -> None:
        """Its name has announced it."""

    def report(self, values: Values) -> None:
        """``record`` keeps them."""

    def record(self, figures: Mapping[str, Any]) -> None:
        """Whole lines: a kill may cut off the last one, and readers skip it."""
        with (self._out / METRICS_NAME).open("a") as file:
            file.write(json.dumps(figures) + "\n")

    def say(self, line: str) -> None:
        print(line, flush=True)
