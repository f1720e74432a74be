"""Settings of Python's garbage collector while models are loaded, predict or serve."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 50_000  # between two collections


def collect_and_freeze() -> None:
    """Collect now, and exempt everything that is left from later collections. The libraries are a million objects; a
    full collection over them would delay every request by a tenth of a second."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Within the block (or decorated function), exempt existing objects and collect rarely, because new objects have no
    cycles. Changes nothing if objects are exempt already."""
    if gc.get_freeze_count():
        yield
        return
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
