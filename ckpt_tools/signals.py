"""Clean ends of commands on signals, with one sentence and a documented exit code.

``SIGTERM``, ``SIGHUP`` and ``SIGINT`` (Ctrl-C) become an exception in the main thread. So ``with`` and ``finally``
blocks end what the command started, whichever signal it was.
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

STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

LOOK_SECONDS = 0.5
"""How long a wait lasts that a signal may have missed."""

IMPORT_SECONDS = 60.0
"""How long a signal waits at most for the end of an import: one of torch takes 3 seconds, and 20 on a busy machine."""

AGAIN_SECONDS = 0.1

Item = TypeVar("Item")


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end. What cleans up after ``KeyboardInterrupt`` is right here too."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class _State:
    """``first`` is the signal that arrived first, ``at`` when; ``is_told`` that it was raised; ``held`` that it has to
    wait; ``imports`` how many modules were being imported when the block began."""

    first: int | None = None
    at: float = 0.0
    is_told: bool = False
    held: int = 0
    imports: int = 0


_state = _State()


def exit_code_of(error: KeyboardInterrupt) -> int:
    """128 and the signal's number, as shells report it: 130 for SIGINT (Ctrl-C), 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)


def first_signal() -> int | None:
    """The signal that asked the process to end, within ``stopping_on_signals``; None if there was none."""
    return _state.first


@contextmanager
def stopping_on_signals(*, is_last: bool = False) -> Iterator[None]:
    """Within the block, the first signal of ``STOPPING`` raises :class:`Stopped`; later ones do not disturb the
    cleaning up. If it ``is_last``, the process has done its work then, and signals do nothing until it says its code to
    :func:`ending`.

    A signal that was ignored when the process began stays ignored: ``nohup`` asks for that. Main thread only.
    """
    before = {number: signal.getsignal(number) for number in STOPPING}
    _state.first, _state.is_told, _state.held, _state.imports = None, False, 0, _num_imports(sys._getframe())
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        yield
    finally:
        _state.held += is_last
        for number, handler in before.items():
            if handler is not None and not is_last:
                signal.signal(number, handler)
        _state.first = None


def ending(code: int) -> None:
    """From now on a signal ends the process with ``code`` at once: it waits for threads alone."""
    for number in STOPPING:
        signal.signal(number, lambda *_: os._exit(code))


def unheeded_at_exit() -> None:
    """Signals do nothing after the functions of ``atexit`` that are registered later: Python gives its handlers up."""

    def ignore() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)


@contextmanager
def killed_by_interrupts() -> Iterator[None]:
    """Within the block Ctrl-C ends the process at once and without a traceback, as SIGTERM and SIGHUP do: while it
    imports, before it has anything to clean up."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def heeded() -> list[int]:
    """The signals that end this process by an exception now."""
    return [number for number in STOPPING if signal.getsignal(number) is _stop]


@contextmanager
def held_back() -> Iterator[None]:
    """A signal that arrives within the block waits for its end: what must not be torn apart, such as cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
        _tell()


@contextmanager
def let_through() -> Iterator[None]:
    """Within ``held_back``, a block that a signal does end, at once if it has arrived already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held, _state.held = _state.held, 0
    try:
        _tell()
        yield
    finally:
        _state.held = held


def taken_from(queue: SimpleQueue[Item], seconds: float = math.inf) -> Item:
    """``queue.get()`` that a signal ends. Raises ``queue.Empty`` after so many seconds.

    Python does not look for a signal between the last instruction and the wait of ``get``, which a busy machine makes
    long: a signal in between would be heeded only once something is put into the queue. So the wait is begun anew.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return queue.get(timeout=max(0.0, min(LOOK_SECONDS, deadline - time.monotonic())))
        except Empty:
            if time.monotonic() >= deadline:
                raise


@contextmanager
def unheeded() -> Iterator[None]:
    """Within the block the signals do nothing: while the last sentence of a command that ends is said."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_is_starting = threading.Event()


@contextmanager
def starting_processes() -> Iterator[None]:
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
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    _set_children_apart()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    _is_starting.set()
    try:
        yield
    except SystemExit as error:
        if handlers[signal.SIGTERM] is not _stop:
            raise
        _state.first, _state.is_told = _state.first or signal.SIGTERM, True
        raise Stopped(_state.first) from error
    finally:
        _is_starting.clear()
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        with held_back():
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@cache
def _set_children_apart() -> None:
    def set_apart() -> None:
        if _is_starting.is_set():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            os.setsid()

    os.register_at_fork(after_in_child=set_apart)


def _stop(number: int, frame: FrameType | None) -> None:
    if _state.first is None:
        _state.first, _state.at = number, time.monotonic()
    if _num_imports(frame) > _state.imports and time.monotonic() - _state.at < IMPORT_SECONDS:
        again = threading.Timer(AGAIN_SECONDS, _send_again, (number,))
        again.daemon = True
        again.start()
    else:
        _tell()


def _send_again(number: int) -> None:
    if number in heeded():
        os.kill(os.getpid(), number)


def _num_imports(frame: FrameType | None) -> int:
    """Number of calls of the import system around this frame: 0 if no module is being imported. An exception in the
    middle of an import may be lost: torch imports numpy from C++, which clears it, and leaves numpy in pieces."""
    number = 0
    while frame is not None:
        number += frame.f_code.co_filename == "<frozen importlib._bootstrap>"
        frame = frame.f_back
    return number


def _tell() -> None:
    """Raise what arrived, once, unless it has to wait."""
    if _state.first is not None and not _state.is_told and not _state.held:
        _state.is_told = True
        raise Stopped(_state.first)
