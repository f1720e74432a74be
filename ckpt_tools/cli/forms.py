"""The forms in which a command with findings prints its result: ``--format``, and its short form ``--json``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from ckpt_tools.cli.wrapping import echo
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.wording import escape_unprintable

DecoratedCommand = TypeVar("DecoratedCommand", bound=Callable[..., Any])

MAX_TABLE_ROWS = 200
"""Rows of a table in Markdown. GitHub cuts the summary of a step at 1 MiB."""

MAX_CELL_CHARS = 500

_MARKUP_CHARACTER = re.compile(r"[^\w .,:;/()=%+-]|(?<![^\W_])_|_(?![^\W_])|:(?! )|(?<=www)\.", re.I)
"""What may have a meaning in Markdown or HTML: everything but words, and the punctuation of sentences, names and
numbers. An underscore has one at the ends of a word alone, a colon only within a word."""


def form_option(*names: str) -> Callable[[DecoratedCommand], DecoratedCommand]:
    """Give the command ``form``, one of ``names``. The first is the default."""

    def decorate(command: DecoratedCommand) -> DecoratedCommand:
        @wraps(command)
        def run(*, form: str | None, as_json: bool, **keywords: Any) -> Any:
            if as_json and form not in (None, "json"):
                raise UsageError.of("as_json", f"--json and --format {form} contradict each other; give one of them")
            return command(form="json" if as_json else form or names[0], **keywords)

        json_option = click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
        format_option = click.option(
            "--format", "form", type=click.Choice(names), help=f"How to print the result. Default: {names[0]}."
        )
        return cast("DecoratedCommand", format_option(json_option(run)))

    return decorate


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
