"""How a command of this project ends when it is told to stop: cleanly, with one sentence and a documented exit code.

``SIGINT``, ``SIGTERM`` and ``SIGHUP`` become one exception in the main thread, a ``KeyboardInterrupt``. So ``with`` and
``finally`` blocks end what the command started, whichever signal it was.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end. What cleans up after ``KeyboardInterrupt`` is right here too."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_code_of(error: KeyboardInterrupt) -> int:
    """128 and the signal's number, as shells report it: 130 for SIGINT (Ctrl-C), 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Within the block, the first of the signals raises :class:`Stopped`; later ones do not disturb the cleaning up.

    A signal that was ignored when the process began stays ignored: ``nohup`` asks for that. Main thread only.
    """
    before = {number: signal.getsignal(number) for number in STOPPING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _stop(number: int, _frame: FrameType | None) -> None:
    for other in STOPPING:
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)
