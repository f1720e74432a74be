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

from ckpt_tools.process.signals import (
    Stopped,
    get_exit_code,
    get_first_signal,
    ignore_signals,
    list_handled_signals,
    raise_on_signals,
)

CLEANUP_SECONDS = 8.0
"""The time limit for cleaning up. ``docker stop`` kills after 10 seconds, Kubernetes and Slurm after 30."""

POLL_SECONDS = 0.5
"""How often to check for blocked signals: they are blocked while Ray starts."""

WRITING_COMMANDS = {
    "convert",
    "convert-run",
    "reshard",
    "consolidate",
    "merge-lora",
    "average",
    "make-loadable",
    "delta",
}
"""Commands with a destination."""

OPTIONS_WITH_VALUE = {"--settings", "--log-format"}
"""Options before the command that take the next word."""

SELF_STOPPING_COMMANDS = {"train", "predict", "serve", "verify-forward"}
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
def end_command_on_signals(words: Sequence[str], *, is_process: bool) -> Iterator[None]:
    """Within the block a signal raises ``Stopped``. It replaces any other error that the signal caused.

    With ``is_process`` this is all that the process does: it ends within ``CLEANUP_SECONDS`` of the signal, even if the
    main thread waits in a call that no signal ends, such as one that looks up a host's name.
    """
    with raise_on_signals(is_last=is_process):
        if is_process and _find_command_name(words) not in SELF_STOPPING_COMMANDS:
            _start_watchdog(words)
        try:
            yield
        except BaseException as error:
            number = get_first_signal()
            if number is not None and not isinstance(error, Stopped):
                raise Stopped(number) from error
            raise


def exit_after_signal(
    error: BaseException, words: Sequence[str], print_sentence: Callable[[str, int], None], *, is_process: bool
) -> NoReturn:
    """Print the sentence and exit with the documented code; a process exits at once, without waiting for threads."""
    code = get_exit_code(error) if isinstance(error, KeyboardInterrupt) else 128 + signal.SIGINT
    with ignore_signals():
        # A terminal that was closed takes no words.
        with suppress(OSError):
            print_sentence(_format_stop_sentence(code - 128, words), code)
        if is_process:
            _clear_frames(error)
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)
    sys.exit(code)


def _clear_frames(error: BaseException | None) -> None:
    """End what frames of the traceback still hold: a ``with`` block may have been torn apart as it was entered."""
    import traceback

    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _format_stop_sentence(number: int, words: Sequence[str], *, is_cleaned: bool = True) -> str:
    stop_reason = "Interrupted" if number == signal.SIGINT else f"Stopped by {signal.Signals(number).name}"
    if _find_command_name(words) not in WRITING_COMMANDS:
        return f"{stop_reason}."
    if "--resume" in words:
        return f"{stop_reason}; the files written so far are kept for --resume."
    if not is_cleaned:
        return (
            f"{stop_reason} before everything was cleaned up; the next run or ckpt-tools clean DST removes the "
            f"leftovers."
        )
    return f"{stop_reason}; the destination is either unchanged or complete."


def _find_command_name(words: Sequence[str]) -> str | None:
    remaining_words = iter(words)
    for word in remaining_words:
        if word in OPTIONS_WITH_VALUE:
            next(remaining_words, None)
        elif not word.startswith("-"):
            return word
    return None


def _start_watchdog(words: Sequence[str]) -> None:
    """Start the thread that ends the process ``CLEANUP_SECONDS`` after the first signal, if it still runs then."""
    # Python runs handlers between the bytecodes of the main thread, which may hang in a system call. The pipe is
    # written by the handler in C, at once.
    wakeup_reader, wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    numbers = list_handled_signals()
    thread = threading.Thread(
        target=_exit_after_deadline, args=(wakeup_reader, numbers, tuple(words)), name="ckpt-tools-end", daemon=True
    )
    # The thread takes no signal itself, or one that the main thread blocks would be delivered here.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    thread.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _exit_after_deadline(wakeup_reader: int, numbers: Sequence[int], words: Sequence[str]) -> None:
    number = _wait_for_first_signal(wakeup_reader, numbers)
    time.sleep(CLEANUP_SECONDS)
    with suppress(OSError):
        os.write(2, f"{_format_stop_sentence(number, words, is_cleaned=False)}\n".encode())
    os._exit(128 + number)


def _wait_for_first_signal(wakeup_reader: int, numbers: Sequence[int]) -> int:
    """The first of the signals that arrives; Python writes each into the pipe, but for those that are blocked."""
    while True:
        ready = select.select([wakeup_reader], [], [], POLL_SECONDS)[0]
        pending_numbers = [*(os.read(wakeup_reader, 64) if ready else b""), *signal.sigpending()]
        arrived = [number for number in pending_numbers if number in numbers]
        if arrived:
            return int(arrived[0])
