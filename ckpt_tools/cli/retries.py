"""A line on stderr while a store does not answer, so that waiting does not look like a hang."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt_tools.cli.wrapping import columns, filled
from ckpt_tools.core import progress as notices

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
            width = columns(sys.stderr)
            # Not by click: it writes past the stream with which rich keeps its bar below what is printed.
            lines = filled(sentence, width) if width else [sentence]
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()

    return say
