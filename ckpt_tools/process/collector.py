"""Python's garbage collector, paused while objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector(*, is_needed: bool = True) -> Iterator[None]:
    """Pause the collector, which walks all objects again for every quarter more of them: of 700,000 tensors it takes
    half the time of reading, and finds nothing. Memory that is not in circles is freed as ever."""
    was_enabled = is_needed and gc.isenabled()
    if was_enabled:
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
