"""A line on stderr while a store does not answer, so that nobody takes patience for a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ckpt_tools import notices

LINE_SECONDS = 2.0
"""Many threads may be retrying at once, each every few tenths of a second: one line this often is enough."""


@contextmanager
def telling_of_retries(*, quiet: bool) -> Iterator[None]:
    """While inside, stderr says so when a store is asked again, unless ``quiet``."""
    if quiet:
        yield
        return
    with notices.hearing(_lines()):
        yield


def _lines() -> notices.Listener:
    lock = threading.Lock()
    last = float("-inf")

    def say(sentence: str) -> None:
        nonlocal last
        with lock:
            if time.monotonic() - last < LINE_SECONDS:
                return
            last = time.monotonic()
            # rich keeps its bar below whatever is printed to stderr while it is drawn.
            click.echo(sentence, err=True)

    return say
