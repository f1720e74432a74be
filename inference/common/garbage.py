"""What a process that predicts or serves does about Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NUM_OBJECTS = 50_000
"""How many more objects there are before Python looks at them."""


def settle() -> None:
    """Collect what is garbage now, and look at nothing of what is left again until the next call.

    The libraries are a million objects. Python would look at all of them now and then, which holds up every request for
    a tenth of a second.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def libraries_left_alone() -> Iterator[None]:
    """Within the block, or the function, look at nothing of what is there now, and rarely at what is new, which has no
    circles. If somebody has already arranged it so, it stays."""
    if gc.get_freeze_count():
        yield
        return
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(NUM_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
