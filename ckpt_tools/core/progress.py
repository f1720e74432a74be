"""Progress callbacks: bytes done, and sentences such as that a store is asked again.

Listeners to sentences are of the process, because stores are asked by threads that do not know for which call. Imports
nothing that costs time at start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt_tools.credentials import without_secrets

Progress = Callable[[int, int], None]
"""Called with the number of bytes done and in all."""


def silent(done: int, total: int) -> None:
    """Report no progress."""


class Meter:
    """Sums the bytes of each step for ``on_progress``; never reports more than ``total``."""

    def __init__(self, on_progress: Progress, total: int) -> None:
        self.on_progress, self.total, self.done = on_progress, total, 0

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        self.on_progress(min(self.done, self.total), self.total)


Listener = Callable[[str], None]

_listeners: list[Listener] = []


@contextmanager
def hearing(listener: Listener) -> Iterator[None]:
    """While inside, ``listener`` is called with every sentence, from any thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(sentence: str) -> None:
    """Pass ``sentence`` to all listeners, without credentials."""
    for listener in tuple(_listeners):
        listener(without_secrets(sentence))
