"""A run that is asked to stop saves first: SIGTERM and SIGUSR1, as schedulers send them before they take the machine.

The command passes the request on to its ranks: under torchrun through a file, under Ray through an actor. A rank that
gets the signal itself heeds it too. The ranks agree at the next step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ckpt_tools.errors import CkptError
from ckpt_tools.signals import heeded

SAVING = (signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the same command can go on later."""


class RunStoppedError(CkptError):
    """The run was asked to stop, and did so between two steps."""

    exit_code = EXIT_CODE

    @classmethod
    def at(cls, checkpoint: str | None) -> RunStoppedError:
        if checkpoint is None:
            return cls("stopped as asked, before the first step: no checkpoint was saved yet; start the run again")
        return cls(f"stopped as asked: {checkpoint} is saved; go on with --resume latest")


class Request:
    """Whether a rank was asked to save and stop: by a signal, or by its launcher with the file ``path``."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._is_signalled = False

    def __call__(self) -> bool:
        return self._is_signalled or (self._path is not None and self._path.exists())

    def heed_signals(self) -> None:
        """SIGINT ends a rank at once: its launcher ends it so. A scheduler may send SIGTERM to every process and the
        agent another one, so a second SIGTERM means the same as the first."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in SAVING:
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._is_signalled = True


@contextmanager
def passed_on(ask: Callable[[], None]) -> Iterator[None]:
    """Within the block, the first SIGTERM or SIGUSR1 calls ``ask``. A second SIGTERM does what SIGTERM did before.

    Only where SIGTERM would end what runs here with a sentence (``ckpt_tools.signals``): a program that calls the
    launchers keeps its own signals.
    """
    if threading.current_thread() is not threading.main_thread() or signal.SIGTERM not in heeded():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SAVING}
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not asked:
            ask()
            _say(f"{signal.Signals(number).name}: saving at the next step; a second SIGTERM ends the run at once\n")
        elif number == signal.SIGTERM:
            before[number](number, frame)
        asked.append(number)

    for number in SAVING:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number in SAVING:
            signal.signal(number, before[number])


def _say(line: str) -> None:
    """Not through the buffer of ``sys.stdout``, which the interrupted code may be writing to."""
    try:
        os.write(1, line.encode())
    except OSError:
        return


def ignore_saving_signals() -> None:
    """For torchrun's agent, which would end its ranks before they have saved."""
    for number in SAVING:
        signal.signal(number, signal.SIG_IGN)
