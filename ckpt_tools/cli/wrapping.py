"""Text that wraps at words to the width of a terminal. What goes into a pipe keeps one line a sentence."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TextIO

import click

MIN_COLUMNS = 20


def columns(stream: TextIO) -> int | None:
    """The width of the terminal that ``stream`` writes to; None where that is no terminal."""
    if not stream.isatty():
        return None
    stated = os.environ.get("COLUMNS", "")
    try:
        found = int(stated) if stated.isdigit() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return max(found, MIN_COLUMNS) if found else None


def filled(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width``, but for words that are longer."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def say(text: str, *, err: bool = False) -> None:
    """Print ``text``, wrapped where a terminal shows it."""
    width = columns(sys.stderr if err else sys.stdout)
    lines = text.split("\n")
    if width is not None:
        lines = [part for line in lines for part in filled(line, width) or [""]]
    click.echo("\n".join(lines), err=err)
