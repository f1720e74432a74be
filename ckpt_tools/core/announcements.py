"""Sentences for whoever watches a call while it goes on: that a store does not answer and is asked again.

Listeners are of the process, since stores are asked by threads that know nothing of the call they work for. Imports
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """Say it to those who listen."""
    for listener in tuple(_listeners):
        listener(sentence)
