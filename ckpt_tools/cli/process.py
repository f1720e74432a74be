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

from ckpt_tools.process.signals import exit_on_signals, ignore_signals_at_exit

THREADS_VARIABLE = "OPENBLAS_NUM_THREADS"
GC_THRESHOLD = 50_000

_is_variable_set_here = THREADS_VARIABLE not in os.environ
os.environ.setdefault(THREADS_VARIABLE, "1")

_INITIAL_GC_THRESHOLDS = gc.get_threshold()


def tune_for_short_life() -> None:
    """Let the collector run rarely."""
    ignore_signals_at_exit()
    gc.set_threshold(GC_THRESHOLD, *_INITIAL_GC_THRESHOLDS[1:])


def prepare_exit(code: int) -> None:
    """End with ``code``, also if a signal asks to. Skip the collection at the end of the process, which takes 25 ms;
    not with torch, whose bindings report objects that are left on stderr."""
    exit_on_signals(code)
    if "torch" not in sys.modules:
        gc.freeze()


def restore_settings() -> None:
    """Restore Python's and the user's settings, for a command that computes or runs for long."""
    gc.set_threshold(*_INITIAL_GC_THRESHOLDS)
    if _is_variable_set_here:
        os.environ.pop(THREADS_VARIABLE, None)
