"""Outlets: destinations of checkpoints and metrics (``metrics.jsonl``, and TensorBoard with ``--tensorboard``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ckpt_tools.errors import UsageError

from ..checkpoints.run_folder import CHECKPOINTS, make_partial, partial_folder
from ..checkpoints.storage import report_failed_writes
from ..config.references import Reference, call_function, text_of
from ..config.train_config import TrainConfig
from .screen import ProgressDisplay

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"


class Callbacks(ExitStack):
    """The functions of ``--callback``, called with each line by the first rank. Its block is the time of the run."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self._config = config

    def __call__(self, figures: Mapping[str, Any]) -> None:
        for callback in self._functions:
            call_function(callback, "callback", dict(figures))

    @cached_property
    def _functions(self) -> list[Callable[..., object]]:
        return [self._open_callback(each) for each in self._config.callback]

    def _open_callback(self, reference: Reference) -> Callable[..., object]:
        """Call the user's function with the run's configuration; it returns a function of a line, or a context manager
        that gives one."""
        opened = call_function(reference, "callback", self._config)
        function = self.enter_context(opened) if isinstance(opened, AbstractContextManager) else opened
        if not callable(function):
            raise UsageError(
                f"--callback {text_of(reference)} gives {type(function).__name__}, and a function of a line is needed"
            )
        return function


class MetricsWriter:
    """Writer of the metrics in ``out``, used by one process."""

    def __init__(self, config: TrainConfig) -> None:
        self._out, self._tensorboard = config.out, config.tensorboard
        self._events: Any = None

    def write_line(self, figures: Mapping[str, Any]) -> None:
        """Append a line. A kill may cut it off; readers skip such a line. Raises StoreError."""
        path = self._out / METRICS_NAME
        with report_failed_writes(path), path.open("a") as file:
            file.write(json.dumps(figures) + "\n")
        if self._tensorboard:
            with report_failed_writes(self._out / TENSORBOARD_NAME):
                self._record_events(figures)

    def _record_events(self, figures: Mapping[str, Any]) -> None:
        """Flushes each event, because a rank exits without closing files."""
        step = figures["step"]
        if self._events is None:
            from tensorboardX import SummaryWriter

            # TensorBoard drops later steps of an earlier run.
            self._events = SummaryWriter(str(self._out / TENSORBOARD_NAME), purge_step=step)
        for name, value in flatten_scalars(figures):
            self._events.add_scalar(name, value, step)
        self._events.flush()


def read_metrics(out: Path) -> Iterator[dict[str, Any]]:
    for line in (out / METRICS_NAME).read_text().splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def flatten_scalars(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of a line, under names that begin with the kind of the line, which TensorBoard shows as groups."""
    kind = "epoch" if "epoch" in figures else "checkpoint" if "checkpoint" in figures else "train"
    for name, value in figures.items():
        if isinstance(value, list):
            yield from ((f"{kind}/{name}_rank_{rank}", each) for rank, each in enumerate(value))
        elif isinstance(value, int | float) and name not in ("step", "epoch"):
            yield f"{kind}/{name}", value


Values = Mapping[str, float]  # measured values by name


class Outlet:
    """Destination of a run's checkpoints and metrics: ``OUT/checkpoints``, which all ranks share, and
    ``OUT/metrics.jsonl``, unless the launcher has another one. Every rank calls the methods of checkpoints and
    ``report_values`` in the same order; only the first rank calls the others."""

    uploads = False
    """Whether ``finish_checkpoint`` uploads files, which happens while training continues."""

    def __init__(self, config: TrainConfig) -> None:
        self.callbacks, self._writer, self._display = Callbacks(config), MetricsWriter(config), ProgressDisplay()
        self._folder = config.out / CHECKPOINTS

    def begin_checkpoint(self, name: str) -> Path:
        """An empty folder for this rank's shards of a checkpoint, under a name that marks it as unfinished."""
        if torch.distributed.get_rank() == 0:
            make_partial(self._folder, name)
        torch.distributed.barrier()
        return partial_folder(self._folder, name)

    def finish_checkpoint(self, name: str) -> None:
        """Called when this rank has written, on the first rank when all have; in another thread. The checkpoint gets
        its final name."""
        if torch.distributed.get_rank() == 0:
            partial_folder(self._folder, name).rename(self._folder / name)

    def announce_checkpoint(self, name: str, values: Values) -> None:
        """Called with the latest values when the checkpoint is complete, which its name says already."""

    def report_values(self, values: Values) -> None:
        """Called after an epoch without a checkpoint; ``record_metrics`` gets the values too."""

    def record_metrics(self, figures: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``, and call the callbacks with it."""
        self._writer.write_line(figures)
        self.callbacks(figures)

    def print_line(self, line: str) -> None:
        """Print a line for the user."""
        self._display.print_line(line)

    def show_status(self, status: str) -> None:
        """Show a status, which replaces the one before."""
        self._display.show_status(status)
