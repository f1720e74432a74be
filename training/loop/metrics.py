"""The record of a run's figures: ``metrics.jsonl``, and event files for TensorBoard if they are asked for."""

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
"""Where TensorBoard shows a figure whose line does not say it."""


class Journal:
    """Written by one process, in ``out``."""

    def __init__(self, out: Path, *, tensorboard: bool) -> None:
        self._out = out
        self._tensorboard = tensorboard
        self._events: Any = None

    def record(self, figures: Mapping[str, Any]) -> None:
        """Whole lines: a kill may cut off the last one, and readers skip it."""
        with (self._out / METRICS_NAME).open("a") as file:
            file.write(json.dumps(figures) + "\n")
        if self._tensorboard:
            self._record_events(figures)

    def _record_events(self, figures: Mapping[str, Any]) -> None:
        """Flushed at once: a rank ends without closing anything."""
        step = figures["step"]
        if self._events is None:
            from tensorboardX import SummaryWriter

            # TensorBoard then forgets what a run before this one wrote of later steps.
            self._events = SummaryWriter(str(self._out / TENSORBOARD_NAME), purge_step=step)
        for name, value in scalars(figures):
            self._events.add_scalar(name, value, step)
        self._events.flush()


def recorded(out: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's record, as far as they are whole."""
    for line in (out / METRICS_NAME).read_text().splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def scalars(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line under names that TensorBoard groups by their first part."""
    folder = "epoch" if "epoch" in figures else "checkpoint" if "checkpoint" in figures else "train"
    for key, value in figures.items():
        name = f"{FOLDERS.get(key, folder)}/{key}"
        if isinstance(value, list):
            yield from ((f"{name}_rank_{rank}", each) for rank, each in enumerate(value))
        elif isinstance(value, int | float) and key not in ("step", "epoch"):
            yield name, value
