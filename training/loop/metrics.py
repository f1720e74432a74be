"""Metrics of a run: ``metrics.jsonl``, and TensorBoard event files with ``--tensorboard``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"

FOLDERS = {
    "accuracy": "epoch",
    "peak_rss": "memory",
    "cuda_peak": "memory",
    "stall_seconds": "checkpoint",
    "waited_seconds": "checkpoint",
    "resume_seconds": "checkpoint",
}
"""TensorBoard group of each metric; others have the group of their line."""


class Journal:
    """Writer of the metrics in ``out``, used by one process."""

    def __init__(self, out: Path, *, tensorboard: bool) -> None:
        self._out = out
        self._tensorboard = tensorboard
        self._events: Any = None

    def record(self, figures: Mapping[str, Any]) -> None:
        """Append a line. A kill may cut it off; readers skip such a line."""
        with (self._out / METRICS_NAME).open("a") as file:
            file.write(json.dumps(figures) + "\n")
        if self._tensorboard:
            self._record_events(figures)

    def _record_events(self, figures: Mapping[str, Any]) -> None:
        """Flushes each event, because a rank exits without closing files."""
        step = figures["step"]
        if self._events is None:
            from tensorboardX import SummaryWriter

            # TensorBoard drops later steps of an earlier run.
            self._events = SummaryWriter(str(self._out / TENSORBOARD_NAME), purge_step=step)
        for name, value in scalars(figures):
            self._events.add_scalar(name, value, step)
        self._events.flush()


def recorded(out: Path) -> Iterator[dict[str, Any]]:
    """Complete lines of ``metrics.jsonl``."""
    for line in (out / METRICS_NAME).read_text().splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def scalars(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of a line, under names that begin with their TensorBoard group."""
    folder = "epoch" if "epoch" in figures else "checkpoint" if "checkpoint" in figures else "train"
    for key, value in figures.items():
        name = f"{FOLDERS.get(key, folder)}/{key}"
        if isinstance(value, list):
            yield from ((f"{name}_rank_{rank}", each) for rank, each in enumerate(value))
        elif isinstance(value, int | float) and key not in ("step", "epoch"):
            yield name, value
