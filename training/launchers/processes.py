"""No process outlives its run: what a run starts is marked, and ends with it, whichever way it ends.

A run that started processes of several kinds (torchrun's agent and ranks, Ray's services and workers, compilers) cannot
name them all when it ends, and does not get to when it is killed. So each of them inherits a mark in its environment,
and :mod:`.guard`, a small process of its own, kills all that carry it as soon as the run is gone.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MARK_VARIABLE = "TRAINING_RUN_MARK"
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLITE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


@contextmanager
def guarded(keep_open: Sequence[int] = ()) -> Iterator[None]:
    """What is started within the block ends with it, and with this process if that comes first.

    The guard holds ``keep_open``, descriptors of files, until nothing of the run is left: a lock among them does not
    become free while a rank still writes. Beyond Linux there is no guard; what is started there ends on signals alone.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    mark = secrets.token_hex(16)
    guard = _start_guard(f"{MARK_VARIABLE}={mark}", keep_open)
    before = os.environ.get(MARK_VARIABLE)
    os.environ[MARK_VARIABLE] = mark
    try:
        yield
    finally:
        _restore(before)
        guard.communicate()


def _start_guard(mark: str, keep_open: Sequence[int]) -> subprocess.Popen[bytes]:
    """In a session of its own, which signals of a terminal or to the run's group do not reach; it carries no mark."""
    unmarked = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=unmarked,
        pass_fds=keep_open,
        start_new_session=True,
    )


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop(MARK_VARIABLE, None)
    else:
        os.environ[MARK_VARIABLE] = before


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. If this process is told to stop meanwhile, it is told too, and has a few seconds to obey."""
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(POLITE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends; on Linux."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # It ended before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def own_signals() -> Iterator[None]:
    """Signals that ask to stop wait until the block ends, and then meet the handlers from before it.

    For a library that starts processes and installs handlers of its own, in Python or below it. Children are started
    without the block, so that they can be told to stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in HELD_BACK}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    _held_back.set()
    try:
        yield
    finally:
        _held_back.clear()
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


_held_back = threading.Event()


def _take_in_child() -> None:
    if _held_back.is_set():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)


os.register_at_fork(after_in_child=_take_in_child)
