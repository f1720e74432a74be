"""Text that wraps at words to the width of a terminal. What goes into a pipe keeps one line a sentence."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TextIO

import click

from ckpt_tools.credentials import without_secrets
from ckpt_tools.help_text import filled

MIN_COLUMNS = 20

MIN_LAST_COLUMNS = 24
"""A sentence in fewer columns is a word a line, so it goes below its row."""


def columns(stream: TextIO) -> int | None:
    """The width of the terminal that ``stream`` writes to; None if that is not a terminal."""
    if not stream.isatty():
        return None
    stated = os.environ.get("COLUMNS", "")
    try:
        found = int(stated) if stated.isdigit() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return max(found, MIN_COLUMNS) if found else None


def echo(text: str, *, err: bool = False) -> None:
    """Print ``text``, with escapes for what the terminal's encoding lacks. click would write UTF-8 to one of ASCII."""
    encoding = (sys.stderr if err else sys.stdout).encoding or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding), err=err)


def say(text: str, *, err: bool = False) -> None:
    """Print ``text``; on a terminal, wrapped at words."""
    width = columns(sys.stderr if err else sys.stdout)
    text = without_secrets(text)
    lines = text.split("\n")
    if width is not None:
        lines = [part for line in lines for part in filled(line, width) or [""]]
    echo("\n".join(lines), err=err)


def say_columns(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[int] = ()) -> None:
    """Print rows under ``header``. The last column holds long names or sentences and wraps at words on a terminal.

    The columns numbered in ``right`` hold numbers. A terminal that is too narrow for the columns gets a paragraph a
    row. A pipe gets tabs between columns and no spaces around them, for ``cut`` and ``awk``.
    """
    width = columns(sys.stdout)
    lines = [tuple(header), *(tuple(map(without_secrets, row)) for row in rows)]
    if width is None:
        for line in lines:
            echo("\t".join(line).rstrip("\t"))
        return
    widths = [max(len(line[number]) for line in lines) for number in range(len(header) - 1)]
    room = width - sum(widths) - 2 * len(widths)
    if room < len(header[-1]):
        for line in lines[1:]:
            echo(_paragraph(header, line, width))
        return
    for line in lines:
        cells = (f"{cell:{'>' if n in right else '<'}{widths[n]}}" for n, cell in enumerate(line[:-1]))
        head = "  ".join([*cells, ""])
        echo(
            _hanging(head, line[-1], width).rstrip()
            if _fits(line[-1], room)
            else f"{head.rstrip()}\n{_below(line[-1], width)}"
        )


def _fits(text: str, room: int) -> bool:
    """Whether it can stand in a last column so wide. A name alone is not broken anyway."""
    words = text.split()
    return len(text) <= room or len(words) < 2 or (room >= MIN_LAST_COLUMNS and max(map(len, words)) <= room)


def _paragraph(header: Sequence[str], row: Sequence[str], width: int) -> str:
    """The name of a row, and below it its other cells, each with the name of its column."""
    cells = [f"{name} {cell}".strip() for name, cell in zip(header[1:-1], row[1:-1], strict=True) if cell]
    indent = 4 + len(row[0]) - len(row[0].lstrip())
    last = f"{header[-1]}: {row[-1]}"
    return "\n".join([row[0], *(_below(text, width, indent) for text in (", ".join(cells), last))])


def _below(text: str, width: int, indent: int = 4) -> str:
    return _hanging(" " * indent, text, width, indent=indent)


def say_pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and what belongs to each, in two columns; the second wraps at words on a terminal. A pipe gets a tab
    between them."""
    pairs, width = list(rows), columns(sys.stdout)
    room = max(len(name) for name, _ in pairs)
    for name, text in pairs:
        head = f"{name}\t" if width is None else f"{name:{room}}  "
        echo(_hanging(head, without_secrets(text), width))


def say_item(name: str, text: str) -> None:
    """Print ``name: text``; on a terminal, further lines are indented."""
    echo(_hanging("", without_secrets(f"{name}: {text}"), columns(sys.stdout), indent=4))


def _hanging(head: str, text: str, width: int | None, indent: int | None = None) -> str:
    """``head`` and ``text`` in lines of ``width``; lines after the first begin below ``text``, or at ``indent``."""
    if width is None:
        return f"{head}{text}"
    spaces = " " * (len(head) if indent is None else indent)
    options: Any = {"break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.wrap(text, width, initial_indent=head, subsequent_indent=spaces, **options))
