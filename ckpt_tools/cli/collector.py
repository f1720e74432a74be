"""The collector of circles among objects, which a command that ends within seconds needs less often.

Python looks whenever there are 700 more objects: 60 times as a command starts, at modules that stay for good.
"""

from __future__ import annotations

import gc

NUM_OBJECTS = 50_000
"""How many more objects there are before it looks: as many as importing and reading a small checkpoint makes."""

_BEFORE = gc.get_threshold()


def rest() -> None:
    """Look rarely, in a process that is this command alone."""
    gc.set_threshold(NUM_OBJECTS, *_BEFORE[1:])


def give_back() -> None:
    """Look as often as Python does by itself, for a command that runs for long."""
    gc.set_threshold(*_BEFORE)
