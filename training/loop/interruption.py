"""The end of a run that is told to stop: one sentence and the exit code of the signal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import click

from ckpt_tools.signals import exit_code_of, stopping_on_signals

from ..checkpoints.locking import LostStorageError
from ..checkpoints.run_folder import saved_checkpoints
from ..config.options import RESUME_LATEST
from ..config.train_config import TrainConfig
from .stopping import RunStoppedError


@contextmanager
def interruptible(advice: Callable[[], str]) -> Iterator[None]:
    """SIGINT, SIGTERM or SIGHUP within the block ends what the block started, and then this process, with one sentence
    that ends with ``advice``. The loss of the storage to another run does so too.
    """
    try:
        with stopping_on_signals():
            yield
    except KeyboardInterrupt as error:
        code = exit_code_of(error)
        _leave(f"interrupted by {signal.Signals(code - 128).name}: {advice()}", code)
    except RunStoppedError as error:
        _leave(str(error), error.exit_code)
    except LostStorageError as error:
        _leave(f"error: {error}", error.exit_code)


def _leave(sentence: str, code: int) -> NoReturn:
    """Without the interpreter's teardown, in which Ray would look for the cluster that has just been ended, and wait
    for a thread that waits for it."""
    # A terminal that was closed takes no words.
    with suppress(OSError):
        click.echo(sentence, err=True)
        sys.stdout.flush()
    os._exit(code)


def how_to_go_on(config: TrainConfig) -> str:
    """After a run was stopped. The store is not asked: it may be the reason for stopping the run."""
    if config.storage is not None:
        return f"if a checkpoint was saved, --resume {RESUME_LATEST} goes on from it"
    saved = saved_checkpoints(config.out)
    if not saved:
        return "no checkpoint was saved yet; start the run again"
    return f"{saved[-1].name} is saved; go on with --resume {RESUME_LATEST}"
