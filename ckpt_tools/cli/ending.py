"""Ends the command on a signal, after at most a few seconds of cleaning up."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import click

from ckpt_tools.signals import Stopped, exit_code_of, first_signal, heeded, stopping_on_signals, unheeded

END_SECONDS = 8.0
"""The time limit for cleaning up. ``docker stop`` kills after 10 seconds, Kubernetes and Slurm after 30."""

LOOK_SECONDS = 0.5
"""How often to check for blocked signals: they are blocked while Ray starts."""

WRITING = {"convert", "reshard", "consolidate"}
"""Commands with a destination."""

WITH_VALUE = {"--settings", "--log-format"}
"""Options before the command that take the next word."""

ENDING_THEMSELVES = {"train", "predict", "serve"}
"""Commands of other packages, which heed signals themselves: a service gives the requests in flight 10 seconds."""


class StoppableGroup(click.Group):
    """Raises ``Abort`` itself: click would print an empty line first, on a terminal that may be closed. To click, an
    ``EOFError`` is an interrupt too; here it is an unexpected error, such as a module whose ``.pyc`` ends too early."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise click.Abort from error
        except EOFError as error:
            raise RuntimeError(f"data ends too early: {error}") from error


@contextmanager
def ended_by_signals(words: Sequence[str], *, is_process: bool) -> Iterator[None]:
    """Within the block a signal raises ``Stopped``. It replaces any other error that the signal caused.

    With ``is_process`` this is all that the process does: it ends within ``END_SECONDS`` of the signal, even if the
    main thread waits in a call that no signal ends, such as one that looks up a host's name.
    """
    with stopping_on_signals(is_last=is_process):
        if is_process and _command(words) not in ENDING_THEMSELVES:
            _end_in_time(words)
        try:
            yield
        except BaseException as error:
            number = first_signal()
            if number is not None and not isinstance(error, Stopped):
                raise Stopped(number) from error
            raise


def end(error: BaseException, words: Sequence[str], say: Callable[[str, int], None], *, is_process: bool) -> NoReturn:
    """Print the sentence and exit with the documented code; a process exits at once, without waiting for threads."""
    code = exit_code_of(error) if isinstance(error, KeyboardInterrupt) else 128 + signal.SIGINT
    with unheeded():
        # A terminal that was closed takes no words.
        with suppress(OSError):
            say(_sentence(code - 128, words), code)
        if is_process:
            _release(error)
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)
    sys.exit(code)


def _release(error: BaseException | None) -> None:
    """End what frames of the traceback still hold: a ``with`` block may have been torn apart as it was entered."""
    import traceback

    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _sentence(number: int, words: Sequence[str], *, is_cleaned: bool = True) -> str:
    how = "Interrupted" if number == signal.SIGINT else f"Stopped by {signal.Signals(number).name}"
    if _command(words) not in WRITING:
        return f"{how}."
    if "--resume" in words:
        return f"{how}; the files written so far are kept for --resume."
    if not is_cleaned:
        return f"{how} before everything was cleaned up; the next run or ckpt-tools clean DST removes the leftovers."
    return f"{how}; the destination is either unchanged or complete."


def _command(words: Sequence[str]) -> str | None:
    given = iter(words)
    for word in given:
        if word in WITH_VALUE:
            next(given, None)
        elif not word.startswith("-"):
            return word
    return None


def _end_in_time(words: Sequence[str]) -> None:
    """Start the thread that ends the process ``END_SECONDS`` after the first signal, if it still runs then."""
    told, telling = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(telling, warn_on_full_buffer=False)
    numbers = heeded()
    thread = threading.Thread(target=_watch, args=(told, numbers, tuple(words)), name="ckpt-tools-end", daemon=True)
    # The thread takes no signal itself, or one that the main thread blocks would be delivered here.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    thread.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(told: int, numbers: Sequence[int], words: Sequence[str]) -> None:
    number = _first(told, numbers)
    time.sleep(END_SECONDS)
    with suppress(OSError):
        os.write(2, f"{_sentence(number, words, is_cleaned=False)}\n".encode())
    os._exit(128 + number)


def _first(told: int, numbers: Sequence[int]) -> int:
    """The first of the signals that arrives; Python writes each into the pipe, but for those that are blocked."""
    while True:
        ready = select.select([told], [], [], LOOK_SECONDS)[0]
        found = [*(os.read(told, 64) if ready else b""), *signal.sigpending()]
        arrived = [number for number in found if number in numbers]
        if arrived:
            return int(arrived[0])
