"""No process outlives its run: what a run starts is marked, and ends with the run, whichever way that ends.

A run that started processes of several kinds (torchrun's agent and ranks, Ray's services and workers, compilers) cannot
name them all when it ends, and cannot end them when it is killed. So each of them inherits a mark in its environment,
and :mod:`.guard_process`, a small process of its own, kills all that carry it as soon as the run is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from ckpt_tools.process.signals import defer_signals

MARK_VARIABLE = "CKPT_TOOLS_RUN_MARK"

KEEP_ENVIRONMENT = "SPT_NOENV"
"""A variable of setproctitle, which Ray uses: without it, a process that changes its title overwrites the environment
that ``/proc`` shows of it, and the mark with it."""

MarkingFactory = Callable[[], AbstractContextManager[None]]


@contextmanager
def guard_processes(keep_open: Sequence[int] = ()) -> Iterator[MarkingFactory]:
    """Gives ``marking``: what is started within ``with marking():`` ends with the outer block, and with this process if
    that comes first.

    The guard holds ``keep_open``, descriptors of files, until nothing of the run is left. So a lock among them does not
    become free while a rank still writes. Beyond Linux there is no guard, and signals alone end what is started.
    """
    if not sys.platform.startswith("linux"):
        yield nullcontext
        return
    mark = os.urandom(16).hex()
    guard_process = _start_guard_process(f"{MARK_VARIABLE}={mark}", keep_open)
    try:
        yield partial(_set_environment, {MARK_VARIABLE: mark, KEEP_ENVIRONMENT: "1"})
    finally:
        with defer_signals():
            guard_process.communicate()


def _start_guard_process(mark: str, keep_open: Sequence[int]) -> subprocess.Popen[bytes]:
    """In a session of its own, which signals of a terminal or to the run's group do not reach; it carries no mark."""
    unmarked_environment = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard_process.py")), mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=unmarked_environment,
        pass_fds=keep_open,
        start_new_session=True,
    )


@contextmanager
def _set_environment(values: dict[str, str]) -> Iterator[None]:
    """Processes that are started within the block inherit the values."""
    previous_values = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous_values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
