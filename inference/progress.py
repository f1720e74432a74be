"""Progress on stderr, in images: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

QUIET_LINE_SECONDS = 5.0
"""Where stderr is not a terminal, a line this often: enough to see that it lives, few enough for a log."""

Progress = Callable[[int], None]


@contextmanager
def show_progress(num_images: int, *, quiet: bool) -> Iterator[Progress]:
    """A callback that takes the number of images done."""
    if quiet:
        yield lambda done: None
    elif sys.stderr.isatty():
        with _bar(num_images) as update:
            yield update
    else:
        yield _lines(num_images)


@contextmanager
def _bar(num_images: int) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task("predicting", total=num_images)
        yield lambda done: drawn.update(task, completed=done)


def _lines(num_images: int) -> Progress:
    last = time.monotonic()

    def update(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET_LINE_SECONDS:
            last = time.monotonic()
            click.echo(f"predicting: {done:,} of {num_images:,} images ({100 * done // num_images} %)", err=True)

    return update
