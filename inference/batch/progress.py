"""Progress on stderr: inputs done, rate, remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import click

LINE_SECONDS = 5.0  # interval of progress lines if stderr is not a terminal
ProgressCallback = Callable[[int, float], None]
"""Called with the number of inputs done and their share of the input. The total number is not always known."""


@contextmanager
def show_progress(num_done: int, *, quiet: bool) -> Iterator[ProgressCallback]:
    """Progress callback; ``num_done`` inputs were done by an earlier run."""
    if quiet:
        yield lambda done, fraction: None
    elif sys.stderr.isatty():
        with _show_bar(RateEstimator(num_done)) as update:
            yield update
    else:
        yield _print_lines(RateEstimator(num_done))


@dataclass(slots=True)
class RateEstimator:
    """Rate and remaining time of this run."""

    num_before: int
    fraction_before: float | None = None
    started_at: float = field(default_factory=time.monotonic)

    def describe(self, done: int, fraction: float) -> str:
        seconds = max(time.monotonic() - self.started_at, 1e-9)
        if self.fraction_before is None:
            # What an earlier run did took no time of this one.
            self.fraction_before = fraction * self.num_before / done if done else 0.0
        rate, progress = (done - self.num_before) / seconds, fraction - self.fraction_before
        time_left = f", {timedelta(seconds=round(seconds * (1 - fraction) / progress))} left" if progress > 0 else ""
        return f"{done:,} done, {rate:,.1f}/s{time_left}"


@contextmanager
def _show_bar(rate: RateEstimator) -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("predicting"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task("", total=1.0)
        yield lambda done, part: drawn.update(task, completed=part, description=rate.describe(done, part))


def _print_lines(rate: RateEstimator) -> ProgressCallback:
    last = time.monotonic()

    def print_due_line(done: int, fraction: float) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            click.echo(f"predicting: {rate.describe(done, fraction)} ({100 * fraction:.0f} %)", err=True)

    return print_due_line
