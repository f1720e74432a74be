"""The end of a run that is told to stop: one sentence and the exit code of the signal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ckpt_tools.signals import exit_code_of, stopping_on_signals

from .checkpoints import saved_checkpoints
from .config import RESUME_LATEST, TrainConfig


@contextmanager
def interruptible(config: TrainConfig) -> Iterator[None]:
    """SIGINT, SIGTERM or SIGHUP within the block ends what the block started, and then this process.

    Without the interpreter's teardown, in which Ray would look for the cluster that has just been ended.
    """
    try:
        with stopping_on_signals():
            yield
    except KeyboardInterrupt as error:
        code = exit_code_of(error)
        click.echo(f"interrupted by {signal.Signals(code - 128).name}: {_how_to_go_on(config)}", err=True)
        sys.stdout.flush()
        os._exit(code)


def _how_to_go_on(config: TrainConfig) -> str:
    """The store is not asked: it may be the reason for which somebody stops the run."""
    if config.storage is not None:
        return f"if a checkpoint was saved, --resume {RESUME_LATEST} goes on from it"
    saved = saved_checkpoints(config.out)
    if not saved:
        return "no checkpoint was saved yet; start the run again"
    return f"{saved[-1].name} is saved; go on with --resume {RESUME_LATEST}"
