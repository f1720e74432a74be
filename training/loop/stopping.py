"""Stopping a run: SIGTERM and SIGUSR1, as schedulers send them, save first; SIGINT and SIGHUP end the run at once.

The command passes a request to its ranks through a file (torchrun) or an actor (Ray); ranks handle the signals too. All
ranks agree to stop after the next step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from ckpt_tools.errors import CkptError
from ckpt_tools.process.signals import get_exit_code, list_handled_signals, raise_on_signals

from ..checkpoints.locking import LostStorageError
from ..checkpoints.run_folder import list_saved_checkpoints
from ..config.options import RESUME_LATEST
from ..config.train_config import TrainConfig
from .screen import line_start

SAVING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command can continue later


class RunStoppedError(CkptError):
    """The run has stopped as requested, between two steps."""

    exit_code = EXIT_CODE

    @classmethod
    def after_checkpoint(cls, checkpoint: str | None) -> RunStoppedError:
        if checkpoint is None:
            return cls("stopped as requested, before the first step: no checkpoint was saved yet; start the run again")
        return cls(f"stopped as requested: {checkpoint} is saved; continue with --resume {RESUME_LATEST}")


class StopRequest:
    """Request to save and stop: a signal to this rank, or the file ``path`` of its launcher."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._is_signalled = False

    def __call__(self) -> bool:
        return self._is_signalled or (self._path is not None and self._path.exists())

    def handle_signals(self) -> None:
        """Handle SIGTERM and SIGUSR1. A second SIGTERM changes nothing, because scheduler and agent may each send one.
        SIGINT ends the rank at once: its launcher uses it for that."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in SAVING_SIGNALS:
            signal.signal(number, self._note_signal)

    def _note_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._is_signalled = True


@contextmanager
def pass_on_signals(ask: Callable[[], None]) -> Iterator[None]:
    """Within the block, the first SIGTERM or SIGUSR1 calls ``ask``; a second SIGTERM has its earlier effect. Does
    nothing unless ``ckpt_tools.process.signals`` handles SIGTERM: a program that calls the launchers keeps its own
    handlers."""
    if threading.current_thread() is not threading.main_thread() or signal.SIGTERM not in list_handled_signals():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SAVING_SIGNALS}
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not received:
            ask()
            named = f"{line_start()}{signal.Signals(number).name}"
            line = f"{named}: saving at the next step; a second SIGTERM ends the run at once\n"
            with suppress(OSError):  # not by ``sys.stdout``, whose buffer the interrupted code may be using
                os.write(1, line.encode())
        elif number == signal.SIGTERM:
            before[number](number, frame)
        received.append(number)

    for number in SAVING_SIGNALS:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number in SAVING_SIGNALS:
            signal.signal(number, before[number])


def ignore_saving_signals() -> None:
    """Called in torchrun's agent, which would otherwise end its ranks before they have saved."""
    for number in SAVING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def end_on_signals(advice: Callable[[], str]) -> Iterator[None]:
    """SIGINT, SIGTERM or SIGHUP within the block ends its processes, and then this one, with one sentence that has
    ``advice``. Losing the storage to another run ends them too."""
    try:
        with raise_on_signals():
            yield
    except KeyboardInterrupt as error:
        code = get_exit_code(error)
        _exit_with(f"interrupted by {signal.Signals(code - 128).name}: {advice()}", code)
    except RunStoppedError as error:
        _exit_with(str(error), error.exit_code)
    except LostStorageError as error:
        _exit_with(f"Error: {error}", error.exit_code)


def _exit_with(sentence: str, code: int) -> NoReturn:
    """Exit without the interpreter's teardown, which would wait for a thread that waits for the ended cluster."""
    with suppress(OSError):  # the terminal may be closed
        click.echo(sentence, err=True)
        sys.stdout.flush()
    os._exit(code)


def advice_after_stop(config: TrainConfig) -> str:
    """Advice on continuing a stopped run. The store is not read: it may be the reason for stopping."""
    if config.storage is not None:
        return f"if a checkpoint was saved, continue with --resume {RESUME_LATEST}"
    saved = list_saved_checkpoints(config.out)
    if not saved:
        return "no checkpoint was saved yet; start the run again"
    return f"{saved[-1].name} is saved; continue with --resume {RESUME_LATEST}"
