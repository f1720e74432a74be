"""Results on stdout, progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli.wrapping import echo, say
from ckpt_tools.core.wording import count, listed, printable, size
from ckpt_tools.credentials import without_secrets

if TYPE_CHECKING:
    from ckpt_tools.core.notes import Note

QUIET_LINE_SECONDS = 5.0
"""If stderr is not a terminal, progress is one line at this interval, which is short enough to read in a log."""

MAX_NOTES = 20
"""How many names a line lists for one outcome and reason; ``--json`` has all."""

Progress = Callable[[int, int], None]


def print_json(found: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Letters of every language as they are; what a terminal would obey, and what cannot be encoded, as escapes."""
    import json

    takes_all = (sys.stdout.encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf32")
    text = json.dumps(_without_secrets(found), indent=2, ensure_ascii=not takes_all)
    if not text.replace("\n", "").isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    echo(text)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {_without_secrets(key): _without_secrets(each) for key, each in value.items()}
    return [_without_secrets(each) for each in value] if isinstance(value, list | tuple) else value


def show_notes(notes: Iterable[Note], limit: int | None = None) -> None:
    """Print the ledger, one line for each outcome and reason; of more than ``limit`` lines, how many more there are."""
    lines: dict[tuple[str, str], list[str]] = {}
    for note in notes:
        lines.setdefault((note.outcome.value, note.why), []).append(note.what)
    for (outcome, why), what in islice(lines.items(), limit):
        say(printable(f"{outcome}: {listed(what, MAX_NOTES)} ({why})"))
    if limit is not None and len(lines) > limit:
        say(f"and {count(len(lines) - limit, 'more note')}; see --json")


@contextmanager
def progress(verb: str, *, quiet: bool) -> Iterator[Progress]:
    """A callback that takes bytes done and total bytes: a bar on a terminal, lines in a pipe, nothing if quiet."""
    if quiet:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        from ckpt_tools import progress_bar

        with progress_bar(verb) as update:
            yield update
    else:
        yield _lines(verb)


def _lines(verb: str) -> Progress:
    last = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET_LINE_SECONDS:
            last = time.monotonic()
            click.echo(f"{verb}: {size(done)} of {size(total)} ({100 * done // max(total, 1)} %)", err=True)

    return update
