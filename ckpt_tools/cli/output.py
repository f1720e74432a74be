"""Results on stdout: text that wraps at words to the width of a terminal, tables, JSON and Markdown.

What goes into a pipe keeps one line a sentence.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from ckpt_tools.messages.help_text import wrap_words
from ckpt_tools.messages.wording import escape_unprintable, format_count, join_names
from ckpt_tools.process.credentials import mask_secrets

if TYPE_CHECKING:
    from ckpt_tools.core.notes import Note
    from ckpt_tools.messages.showing import Jsonable

MAX_NOTES = 20
"""How many names a line lists for one outcome and reason; ``--json`` has all."""

MIN_COLUMNS = 20

MIN_LAST_COLUMNS = 24
"""A sentence in fewer columns is a word a line, so it goes below its row."""

MAX_TABLE_ROWS = 200
"""Rows of a table in Markdown. GitHub cuts the summary of a step at 1 MiB."""

MAX_CELL_CHARS = 500

_MARKUP_CHARACTER = re.compile(r"[^\w .,:;/()=%+-]|(?<![^\W_])_|_(?![^\W_])|:(?! )|(?<=www)\.", re.I)
"""What may have a meaning in Markdown or HTML: everything but words, and the punctuation of sentences, names and
numbers. An underscore has one at the ends of a word alone, a colon only within a word."""


def get_terminal_width(stream: TextIO) -> int | None:
    """The width of the terminal that ``stream`` writes to; None if that is not a terminal."""
    if not stream.isatty():
        return None
    stated_width = os.environ.get("COLUMNS", "")
    try:
        width = int(stated_width) if stated_width.isdigit() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return max(width, MIN_COLUMNS) if width else None


def echo(text: str, *, err: bool = False) -> None:
    """Print ``text``, with escapes for what the terminal's encoding lacks. click would write UTF-8 to one of ASCII."""
    encoding = (sys.stderr if err else sys.stdout).encoding or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding), err=err)


def print_wrapped(text: str, *, err: bool = False) -> None:
    """Print ``text``; on a terminal, wrapped at words."""
    width = get_terminal_width(sys.stderr if err else sys.stdout)
    text = mask_secrets(text)
    lines = text.split("\n")
    if width is not None:
        lines = [part for line in lines for part in wrap_words(line, width) or [""]]
    echo("\n".join(lines), err=err)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right_aligned: Collection[int] = ()) -> None:
    """Print rows under ``header``. The last column holds long names or sentences and wraps at words on a terminal.

    The columns numbered in ``right_aligned`` hold numbers. A terminal that is too narrow for the columns gets a
    paragraph a row. A pipe gets tabs between columns and no spaces around them, for ``cut`` and ``awk``.
    """
    width = get_terminal_width(sys.stdout)
    lines = [tuple(header), *(tuple(map(mask_secrets, row)) for row in rows)]
    if width is None:
        for line in lines:
            echo("\t".join(line).rstrip("\t"))
        return
    widths = [max(len(line[number]) for line in lines) for number in range(len(header) - 1)]
    last_width = width - sum(widths) - 2 * len(widths)
    if last_width < len(header[-1]):
        for line in lines[1:]:
            echo(_format_paragraph(header, line, width))
        return
    for line in lines:
        cells = (f"{cell:{'>' if n in right_aligned else '<'}{widths[n]}}" for n, cell in enumerate(line[:-1]))
        head = "  ".join([*cells, ""])
        echo(
            _wrap_with_hanging_indent(head, line[-1], width).rstrip()
            if _is_short_enough(line[-1], last_width)
            else f"{head.rstrip()}\n{_indent_text(line[-1], width)}"
        )


def _is_short_enough(text: str, width: int) -> bool:
    """Whether it can stand in a last column so wide. A name alone is not broken anyway."""
    words = text.split()
    return len(text) <= width or len(words) < 2 or (width >= MIN_LAST_COLUMNS and max(map(len, words)) <= width)


def _format_paragraph(header: Sequence[str], row: Sequence[str], width: int) -> str:
    """The name of a row, and below it its other cells, each with the name of its column."""
    cells = [f"{name} {cell}".strip() for name, cell in zip(header[1:-1], row[1:-1], strict=True) if cell]
    indent = 4 + len(row[0]) - len(row[0].lstrip())
    last = f"{header[-1]}: {row[-1]}"
    return "\n".join([row[0], *(_indent_text(text, width, indent) for text in (", ".join(cells), last))])


def _indent_text(text: str, width: int, indent: int = 4) -> str:
    return _wrap_with_hanging_indent(" " * indent, text, width, indent=indent)


def print_pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Print names and what belongs to each, in two columns; the second wraps at words on a terminal. A pipe gets a tab
    between them."""
    pairs, width = list(rows), get_terminal_width(sys.stdout)
    name_width = max(len(name) for name, _ in pairs)
    for name, text in pairs:
        head = f"{name}\t" if width is None else f"{name:{name_width}}  "
        echo(_wrap_with_hanging_indent(head, mask_secrets(text), width))


def print_item(name: str, text: str) -> None:
    """Print ``name: text``; on a terminal, further lines are indented."""
    echo(_wrap_with_hanging_indent("", mask_secrets(f"{name}: {text}"), get_terminal_width(sys.stdout), indent=4))


def _wrap_with_hanging_indent(head: str, text: str, width: int | None, indent: int | None = None) -> str:
    """``head`` and ``text`` in lines of ``width``; lines after the first begin below ``text``, or at ``indent``."""
    if width is None:
        return f"{head}{text}"
    spaces = " " * (len(head) if indent is None else indent)
    options: Any = {"break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.wrap(text, width, initial_indent=head, subsequent_indent=spaces, **options))


def print_json(value: dict[str, Any] | list[dict[str, Any]], *, indent: int | None = 2) -> None:
    """Print JSON; without ``indent``, on one line. Letters of every language stay as they are; what a terminal would
    obey, and what cannot be encoded, become escapes."""
    import json

    is_unicode_output = (sys.stdout.encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf32")
    text = json.dumps(_mask_json_secrets(value), indent=indent, ensure_ascii=not is_unicode_output)
    if not text.replace("\n", "").isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    echo(text)


def print_result(result: Jsonable, as_json: bool, print_text: Callable[[Any], None]) -> None:
    """Print the result of a command as JSON, or as ``print_text`` does."""
    if as_json:
        print_json(result.to_json())
    else:
        print_text(result)


def _mask_json_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, dict):
        return {_mask_json_secrets(key): _mask_json_secrets(each) for key, each in value.items()}
    return [_mask_json_secrets(each) for each in value] if isinstance(value, list | tuple) else value


def show_notes(notes: Iterable[Note], limit: int | None = None) -> None:
    """Print the ledger, one line for each outcome and reason; of more than ``limit`` lines, how many more there are."""
    lines: dict[tuple[str, str], list[str]] = {}
    for note in notes:
        lines.setdefault((note.outcome.value, note.why), []).append(note.what)
    for (outcome, why), what in islice(lines.items(), limit):
        print_wrapped(escape_unprintable(f"{outcome}: {join_names(what, MAX_NOTES)} ({why})"))
    if limit is not None and len(lines) > limit:
        print_wrapped(f"and {format_count(len(lines) - limit, 'more note')}; see --json")


def print_markdown(title: str, sentences: Iterable[str], header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a result as Markdown: a heading, a sentence in each paragraph, and a table of at most ``MAX_TABLE_ROWS``
    rows."""
    parts = [f"### {escape_markdown(title)}", *(escape_markdown(each) for each in sentences)]
    if rows:
        lines = [
            header,
            ["---"] * len(header),
            *([escape_markdown(cell) for cell in row] for row in islice(rows, MAX_TABLE_ROWS)),
        ]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    if len(rows) > MAX_TABLE_ROWS:
        parts.append(f"and {len(rows) - MAX_TABLE_ROWS:,} more")
    echo("\n\n".join(parts) + "\n")


def escape_markdown(text: str) -> str:
    """``text`` as one line of Markdown that shows these characters: a character reference is never markup."""
    line = escape_unprintable(text)
    line = line if len(line) <= MAX_CELL_CHARS else f"{line[:MAX_CELL_CHARS]}..."
    return _MARKUP_CHARACTER.sub(lambda found: f"&#{ord(found[0])};", line)


def find_source_folder(src: str) -> str:
    """The folder of the files of ``src``, relative to the working directory, which code hosts take to be that of the
    repository; empty where it is elsewhere."""
    if "://" in src or src.startswith(("file:", "~")) or Path(src).is_absolute():
        return ""
    folder = Path(src) if Path(src).is_dir() else Path(src).parent
    return "" if ".." in folder.parts else folder.as_posix().removeprefix(".").removeprefix("/")
