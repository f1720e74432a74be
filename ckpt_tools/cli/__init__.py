"""The command line: parse, one API call, render. ``main`` is the console script's entry point."""

import os

from ckpt_tools.signals import killed_by_interrupts

# Else numpy's linear algebra, of which nothing here makes use, starts a thread a core that waits by turning in circles.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

with killed_by_interrupts():
    from ckpt_tools.cli.main import main

__all__ = ["main"]
