"""Results on stdout, progress on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli import reporting
from ckpt_tools.cli.wrapping import echo, print_wrapped
from ckpt_tools.messages.wording import escape_unprintable, format_count, format_size, join_names
from ckpt_tools.process.credentials import mask_secrets

if TYPE_CHECKING:
    from ckpt_tools.core.notes import Note

PROGRESS_MODES = ("auto", "json", "plain", "none")
PROGRESS_MODE_KEY = "ckpt_tools.progress"

PLAIN_INTERVAL_SECONDS = 5.0
"""If stderr is not a terminal, progress is one line at this interval, which is short enough to read in a log."""

JSON_INTERVAL_SECONDS = 1.0

MAX_NOTES = 20
"""How many names a line lists for one outcome and reason; ``--json`` has all."""

Progress = Callable[[int, int], None]


def print_json(value: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Letters of every language as they are; what a terminal would obey, and what cannot be encoded, as escapes."""
    import json

    is_unicode_output = (sys.stdout.encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf32")
    text = json.dumps(_mask_json_secrets(value), indent=2, ensure_ascii=not is_unicode_output)
    if not text.replace("\n", "").isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    echo(text)


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


def store_progress_mode(context: click.Context, option: click.Parameter, mode: str | None) -> None:
    """Keep what ``--progress`` says for ``show_progress``."""
    context.meta[PROGRESS_MODE_KEY] = mode


def _choose_progress_mode(quiet: bool) -> str:
    """``--quiet`` means none. What is typed comes before what is from settings. Raises ``click.UsageError``."""
    context = click.get_current_context(silent=True)
    mode = None if context is None else context.meta.get(PROGRESS_MODE_KEY)
    if context is None or mode in (None, "none") or not quiet:
        return "none" if quiet else mode or "auto"
    typed = {name: is_typed(context, name) for name in ("progress", "quiet")}
    if all(typed.values()):
        raise click.UsageError(f"--quiet and --progress {mode} contradict each other", context)
    return str(mode) if typed["progress"] else "none"


def is_typed(context: click.Context, name: str) -> bool:
    """Whether the parameter stands on the command line, and is not from settings or a default."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


@contextmanager
def show_progress(verb: str, *, quiet: bool) -> Iterator[Progress]:
    """A callback that takes bytes done and total bytes, and shows them as ``--progress`` says."""
    mode = _choose_progress_mode(quiet)
    if mode == "auto":
        mode = "json" if reporting.is_json() else "bar" if sys.stderr.isatty() else "plain"
    if mode == "bar":
        from ckpt_tools import progress_bar

        with progress_bar(verb) as update:
            yield update
    elif mode == "none":
        yield lambda done, total: None
    else:
        lines = _ProgressLines(verb, mode == "json")
        yield lines.update
        lines.finish()


class _ProgressLines:
    """Progress as a line at an interval: ``converting: 1.00 GB of 2.00 GB (50 %), 300.00 MB/s, 4 s left``, or the same
    as JSON, then also at the begin and at the end."""

    def __init__(self, phase: str, is_json: bool) -> None:
        self.phase, self.is_json = phase, is_json
        self.interval = JSON_INTERVAL_SECONDS if is_json else PLAIN_INTERVAL_SECONDS
        self.started = self.last = time.monotonic()
        self.first: int | None = None
        self.done = self.total = 0
        self.lock = threading.Lock()

    def update(self, done: int, total: int) -> None:
        with self.lock:
            now, is_first = time.monotonic(), self.first is None
            if is_first:
                self.started, self.first = now, done  # a run that continues another begins with what that one wrote
            self.done, self.total = done, total
            if now - self.last >= self.interval or (is_first and self.is_json):
                self.last = now
                self._print_event("start" if is_first and self.is_json else "progress")

    def finish(self) -> None:
        if self.is_json and self.first is not None:
            self._print_event("done")

    def _print_event(self, event: str) -> None:
        seconds = time.monotonic() - self.started
        moved_bytes = self.done - (self.first or 0)
        rate = moved_bytes / seconds if moved_bytes and seconds > 0 else None
        remaining_bytes = self.total - self.done
        seconds_left = 0.0 if not remaining_bytes else remaining_bytes / rate if rate else None
        if self.is_json:
            figures = {"bytes_done": self.done, "bytes_total": self.total, "bytes_per_second": rate}
            sys.stderr.write(_format_event(event, self.phase, {**figures, "seconds_left": seconds_left}))
            sys.stderr.flush()
            return
        rate_text = (
            f", {format_size(rate)}/s, {seconds_left:,.0f} s left"
            if rate is not None and seconds_left is not None
            else ""
        )
        share_text = (
            f"{format_size(self.done)} of {format_size(self.total)} ({100 * self.done // max(self.total, 1)} %)"
        )
        reporting.print_notice(f"{self.phase}: {share_text}{rate_text}", "info")


def _format_event(event: str, phase: str, figures: dict[str, float | None]) -> str:
    import json

    rounded = {name: None if value is None else round(value, 1) for name, value in figures.items()}
    return json.dumps({"event": event, "phase": phase, **rounded}) + "\n"
