"""Errors, notices, the origin of values and progress, which a command writes to stderr as text or as JSON."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli.output import echo, get_terminal_width, print_wrapped
from ckpt_tools.messages.help_text import wrap_words
from ckpt_tools.messages.wording import escape_unprintable, format_size
from ckpt_tools.process.credentials import mask_secrets

if TYPE_CHECKING:
    import logging

LOG_FORMATS = ("text", "json")

WARNING_INTERVAL_SECONDS = 2.0
"""Many threads may be retrying at once, each every few tenths of a second: one line this often is enough."""

LOGGER_NAME = "ckpt_tools"
NOTES_LOGGER_NAME = f"{LOGGER_NAME}.notes"
"""The logger of notes, which a command prints with its result."""


PROGRESS_MODES = ("auto", "json", "plain", "none")
PROGRESS_MODE_KEY = "ckpt_tools.progress"

PLAIN_INTERVAL_SECONDS = 5.0
"""If stderr is not a terminal, progress is one line at this interval, which is short enough to read in a log."""

JSON_INTERVAL_SECONDS = 1.0

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class _LogOptions:
    """Form of the lines on stderr. It is known before words are parsed, because parsing may fail."""

    log_format: str = LOG_FORMATS[0]
    is_verbose: bool = False


_log_options = _LogOptions()


def read_log_options(words: Sequence[str]) -> None:
    """Before words are parsed: look for ``--log-format`` and ``--verbose`` in them and in the environment."""
    log_format = os.environ.get("CKPT_TOOLS_LOG_FORMAT", LOG_FORMATS[0])
    for word, next_word in zip(words, [*words, ""][1:], strict=True):
        if word == "--log-format" or word.startswith("--log-format="):
            log_format = next_word if word == "--log-format" else word.partition("=")[2]
    _log_options.log_format = log_format if log_format in LOG_FORMATS else LOG_FORMATS[0]
    _log_options.is_verbose = "--verbose" in words or "-v" in words


def set_log_options(*, form: str | None = None, verbose: bool = False) -> None:
    """Set what the parsed options say."""
    _log_options.log_format = form or _log_options.log_format
    _log_options.is_verbose = verbose or _log_options.is_verbose


def is_json() -> bool:
    return _log_options.log_format == "json"


def is_verbose() -> bool:
    return _log_options.is_verbose


def format_json_line(sentence: str, level: str, **fields: object) -> str:
    """One event as a line of JSON."""
    import json
    from datetime import UTC, datetime

    timestamp = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": timestamp, "level": level, "message": mask_secrets(sentence), **fields})


def print_notice(sentence: str, level: str, logger: str = LOGGER_NAME) -> None:
    """Print a line on stderr; text wraps at the words."""
    if is_json():
        lines = [format_json_line(sentence, level, logger=logger)]
    else:
        width, text = get_terminal_width(sys.stderr), mask_secrets(sentence)
        lines = wrap_words(text, width) if width else [text]
    # Not by click: it writes past the stream with which rich keeps its bar below what is printed.
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def print_error(sentence: str, error: BaseException, code: int) -> None:
    """Print the sentence about ``error``; with ``--verbose`` the traceback too."""
    traceback = ""
    if is_verbose():
        from traceback import format_exc

        traceback = mask_secrets(format_exc())
    if is_json():
        traceback_field = {"traceback": traceback} if traceback else {}
        message = sentence.removeprefix("Error: ")
        class_name = "UsageError" if isinstance(error, click.UsageError) else type(error).__name__
        echo(
            format_json_line(message, "error", **{"class": class_name, "exit_code": code}, **traceback_field), err=True
        )
        return
    if traceback:
        echo(traceback, err=True)
    print_wrapped(escape_unprintable(sentence), err=True)


def print_usage_error(error: click.ClickException) -> None:
    """Print an error of click: as text with the usage of the command."""
    if is_json():
        print_error(error.format_message(), error, error.exit_code)
        return
    message = io.StringIO()
    error.show(file=message)
    print_wrapped(message.getvalue().rstrip("\n"), err=True)


@contextmanager
def log_to_stderr(*, quiet: bool) -> Iterator[None]:
    """While inside, what the library logs is written to stderr: warnings, and with ``--verbose`` decisions too."""
    if quiet:
        yield
        return
    import logging

    logger, handler = logging.getLogger(LOGGER_NAME), _make_handler()
    previous_level = logger.level
    logger.addHandler(handler)
    if is_verbose():
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(previous_level)
        logger.removeHandler(handler)


def _make_handler() -> logging.Handler:
    import logging

    lock = threading.Lock()
    last_seconds: dict[Any, float] = {}

    class NoticeHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == NOTES_LOGGER_NAME:
                return
            with lock:
                now = time.monotonic()
                if (
                    record.levelno == logging.WARNING
                    and now - last_seconds.get(record.name, float("-inf")) < WARNING_INTERVAL_SECONDS
                ):
                    return
                last_seconds[record.name] = now
                print_notice(record.getMessage(), record.levelname.lower(), record.name)

    return NoticeHandler(logging.INFO if is_verbose() else logging.WARNING)


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
        mode = "json" if is_json() else "bar" if sys.stderr.isatty() else "plain"
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
            import json

            figures = {
                "bytes_done": self.done,
                "bytes_total": self.total,
                "bytes_per_second": None if rate is None else round(rate, 1),
                "seconds_left": None if seconds_left is None else round(seconds_left, 1),
            }
            sys.stderr.write(json.dumps({"event": event, "phase": self.phase, **figures}) + "\n")
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
        print_notice(f"{self.phase}: {share_text}{rate_text}", "info")
