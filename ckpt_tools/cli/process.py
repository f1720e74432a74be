"""Settings of a process that is one short command: numpy's threads, and Python's garbage collector.

- Linear algebra gets one thread, because the converter uses none. OpenBLAS reads the variable when numpy is imported,
  so this module comes before, and would start a busy-waiting thread per core.
- The collector runs after 50,000 new objects, as many as importing and reading a small checkpoint makes. Python's 700
  mean 60 runs at start-up, over modules that stay.
"""

from __future__ import annotations

import gc
import os
import sys

from ckpt_tools.signals import ending, unheeded_at_exit

VARIABLE = "OPENBLAS_NUM_THREADS"
NUM_OBJECTS = 50_000

_is_ours = VARIABLE not in os.environ
os.environ.setdefault(VARIABLE, "1")

_BEFORE = gc.get_threshold()


def rest() -> None:
    """Let the collector run rarely."""
    unheeded_at_exit()
    gc.set_threshold(NUM_OBJECTS, *_BEFORE[1:])


def end(code: int) -> None:
    """End with ``code``, also if a signal asks to. Skip the collection at the end of the process, which takes 25 ms;
    not with torch, whose bindings report objects that are left on stderr."""
    ending(code)
    if "torch" not in sys.modules:
        gc.freeze()


def give_back() -> None:
    """Restore Python's and the user's settings, for a command that computes or runs for long."""
    gc.set_threshold(*_BEFORE)
    if _is_ours:
        os.environ.pop(VARIABLE, None)
