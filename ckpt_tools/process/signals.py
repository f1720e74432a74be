"""Clean ends of commands on signals, with one sentence and a documented exit code.

``SIGTERM``, ``SIGHUP`` and ``SIGINT`` (Ctrl-C) become an exception in the main thread. So ``with`` and ``finally``
blocks end what the command started, whichever signal it was.

    signal ─▶ _handle_signal ─┬─ a module is being imported: send it again in 0.1 s
              notes the first ├─ a block of defer_signals is under way: its end raises
                              └─ else: raise Stopped, once
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TypeVar

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

POLL_SECONDS = 0.5
"""How long a wait lasts that a signal may have missed."""

IMPORT_SECONDS = 60.0
"""How long a signal waits at most for the end of an import: one of torch takes 3 seconds, and 20 on a busy machine."""

RESEND_SECONDS = 0.1

Item = TypeVar("Item")


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end. What cleans up after ``KeyboardInterrupt`` is right here too."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class _SignalState:
    """``num_outer_imports`` are the modules that were being imported when the block began."""

    first_signal: int | None = None
    arrival_seconds: float = 0.0
    is_raised: bool = False
    num_deferrals: int = 0
    num_outer_imports: int = 0


_signal_state = _SignalState()


def get_exit_code(error: KeyboardInterrupt) -> int:
    """128 and the signal's number, as shells report it: 130 for SIGINT (Ctrl-C), 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)


def get_first_signal() -> int | None:
    """The signal that asked the process to end, within ``raise_on_signals``; None if there was none."""
    return _signal_state.first_signal


@contextmanager
def raise_on_signals(*, is_last: bool = False) -> Iterator[None]:
    """Within the block, the first signal of ``STOP_SIGNALS`` raises :class:`Stopped`; later ones do not disturb the
    cleaning up. If it ``is_last``, the process has done its work then, and signals do nothing until it says its code to
    :func:`exit_on_signals`.

    A signal that was ignored when the process began stays ignored: ``nohup`` asks for that. Main thread only.
    """
    previous_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    (
        _signal_state.first_signal,
        _signal_state.is_raised,
        _signal_state.num_deferrals,
        _signal_state.num_outer_imports,
    ) = None, False, 0, _count_imports(sys._getframe())
    for number, handler in previous_handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _handle_signal)
    try:
        yield
    finally:
        _signal_state.num_deferrals += is_last  # the handlers stay, and raise nothing any more
        for number, handler in previous_handlers.items():
            if handler is not None and not is_last:
                signal.signal(number, handler)
        _signal_state.first_signal = None


def exit_on_signals(code: int) -> None:
    """From now on a signal ends the process with ``code`` at once: it waits for threads alone."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(code))


def ignore_signals_at_exit() -> None:
    """Signals do nothing after the functions of ``atexit`` that are registered later: Python gives its handlers up."""

    def block_and_ignore() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    atexit.register(block_and_ignore)


@contextmanager
def use_default_interrupt() -> Iterator[None]:
    """Within the block Ctrl-C ends the process at once and without a traceback, as SIGTERM and SIGHUP do: while it
    imports, before it has anything to clean up."""
    is_python_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_python_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def list_handled_signals() -> list[int]:
    """The signals that end this process by an exception now."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is _handle_signal]


@contextmanager
def defer_signals() -> Iterator[None]:
    """A signal that arrives within the block waits for its end: what must not be torn apart, such as cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _signal_state.num_deferrals += 1
    try:
        yield
    finally:
        _signal_state.num_deferrals -= 1
        _raise_pending_signal()


@contextmanager
def allow_signals() -> Iterator[None]:
    """Within ``defer_signals``, a block that a signal does end, at once if it has arrived already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    num_deferrals, _signal_state.num_deferrals = _signal_state.num_deferrals, 0
    try:
        _raise_pending_signal()
        yield
    finally:
        _signal_state.num_deferrals = num_deferrals


def get_from_queue(queue: SimpleQueue[Item], seconds: float = math.inf) -> Item:
    """``queue.get()`` that a signal ends. Raises ``queue.Empty`` after so many seconds.

    Python does not look for a signal between the last instruction and the wait of ``get``, which a busy machine makes
    long: a signal in between would be heeded only once something is put into the queue. So the wait is begun anew.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return queue.get(timeout=max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
        except Empty:
            if time.monotonic() >= deadline:
                raise


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Within the block the signals do nothing: while the last sentence of a command that ends is said."""
    previous_handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


_is_starting_processes = threading.Event()


@contextmanager
def block_signals_while_starting() -> Iterator[None]:
    """Signals that ask to stop wait until the block ends, and then meet the handlers from before it.

    For a library that starts processes and installs handlers of its own, in Python or below it, as Ray does: it would
    exit at SIGTERM, and an exception in the middle of starting would leave orphaned processes. Its children
    take signals again, and each has a session of its own: a signal to the command's process group is the command's
    alone, which needs them until it has ended.

    The mask of this thread does not keep a signal from another thread of the process. The library's own handler then
    exits in this one, and that exit is told as the signal that it was. ``guard`` ends what was half started.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    _isolate_children()
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    _is_starting_processes.set()
    try:
        yield
    except SystemExit as error:
        if previous_handlers[signal.SIGTERM] is not _handle_signal:
            raise
        _signal_state.first_signal, _signal_state.is_raised = _signal_state.first_signal or signal.SIGTERM, True
        raise Stopped(_signal_state.first_signal) from error
    finally:
        _is_starting_processes.clear()
        for number, handler in previous_handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        with defer_signals():
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


@cache
def _isolate_children() -> None:
    def isolate_child() -> None:
        if _is_starting_processes.is_set():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            os.setsid()

    os.register_at_fork(after_in_child=isolate_child)


def _handle_signal(number: int, frame: FrameType | None) -> None:
    def send_again() -> None:
        if number in list_handled_signals():
            os.kill(os.getpid(), number)

    if _signal_state.first_signal is None:
        _signal_state.first_signal, _signal_state.arrival_seconds = number, time.monotonic()
    if (
        _count_imports(frame) > _signal_state.num_outer_imports
        and time.monotonic() - _signal_state.arrival_seconds < IMPORT_SECONDS
    ):
        resend_timer = threading.Timer(RESEND_SECONDS, send_again)
        resend_timer.daemon = True
        resend_timer.start()
    else:
        _raise_pending_signal()


def _count_imports(frame: FrameType | None) -> int:
    """Number of calls of the import system around this frame: 0 if no module is being imported. An exception in the
    middle of an import may be lost: torch imports numpy from C++, which clears it, and leaves numpy in pieces."""
    # What imports the whole command, as `python -m` does, is counted when the block begins (num_outer_imports).
    num_imports = 0
    while frame is not None:
        num_imports += frame.f_code.co_filename == "<frozen importlib._bootstrap>"
        frame = frame.f_back
    return num_imports


def _raise_pending_signal() -> None:
    """Raise what arrived, once, unless it has to wait."""
    if _signal_state.first_signal is not None and not _signal_state.is_raised and not _signal_state.num_deferrals:
        _signal_state.is_raised = True
        raise Stopped(_signal_state.first_signal)
