"""Errors, notices and the origin of values, which a command writes to stderr as text or as JSON."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ckpt_tools.cli.wrapping import columns, echo, say
from ckpt_tools.core.wording import printable
from ckpt_tools.credentials import without_secrets
from ckpt_tools.help_text import filled

if TYPE_CHECKING:
    import logging

FORMS = ("text", "json")

LINE_SECONDS = 2.0
"""Many threads may be retrying at once, each every few tenths of a second: one line this often is enough."""

LOGGER = "ckpt_tools"
NOTES = f"{LOGGER}.notes"
"""The logger of notes, which a command prints with its result."""


@dataclass(slots=True)
class _State:
    """Form of the lines on stderr. It is known before words are parsed, because parsing may fail."""

    form: str = FORMS[0]
    verbose: bool = False


_state = _State()


def begin(words: Sequence[str]) -> None:
    """Before words are parsed: look for ``--log-format`` and ``--verbose`` in them and in the environment."""
    stated = os.environ.get("CKPT_TOOLS_LOG_FORMAT", FORMS[0])
    for word, after in zip(words, [*words, ""][1:], strict=True):
        if word == "--log-format" or word.startswith("--log-format="):
            stated = after if word == "--log-format" else word.partition("=")[2]
    _state.form = stated if stated in FORMS else FORMS[0]
    _state.verbose = "--verbose" in words or "-v" in words


def choose(*, form: str | None = None, verbose: bool = False) -> None:
    """Set what the parsed options say."""
    _state.form = form or _state.form
    _state.verbose = verbose or _state.verbose


def is_json() -> bool:
    return _state.form == "json"


def is_verbose() -> bool:
    return _state.verbose


def line(sentence: str, level: str, **more: object) -> str:
    """One event as a line of JSON."""
    import json
    from datetime import UTC, datetime

    when = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": when, "level": level, "message": without_secrets(sentence), **more})


def notice(sentence: str, level: str, logger: str = LOGGER) -> None:
    """Print a line on stderr; text wraps at the words."""
    if is_json():
        lines = [line(sentence, level, logger=logger)]
    else:
        width, text = columns(sys.stderr), without_secrets(sentence)
        lines = filled(text, width) if width else [text]
    # Not by click: it writes past the stream with which rich keeps its bar below what is printed.
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def explain(sentence: str, error: BaseException, code: int) -> None:
    """Print the sentence about ``error``; with ``--verbose`` the traceback too."""
    traceback = _traceback() if is_verbose() else ""
    if is_json():
        more = {"traceback": traceback} if traceback else {}
        message = sentence.removeprefix("Error: ")
        kind = "UsageError" if isinstance(error, click.UsageError) else type(error).__name__
        echo(line(message, "error", **{"class": kind, "exit_code": code}, **more), err=True)
        return
    if traceback:
        echo(traceback, err=True)
    say(printable(sentence), err=True)


def _traceback() -> str:
    import traceback

    return without_secrets(traceback.format_exc())


def explain_usage(error: click.ClickException) -> None:
    """Print an error of click: as text with the usage of the command."""
    if is_json():
        explain(error.format_message(), error, error.exit_code)
        return
    shown = io.StringIO()
    error.show(file=shown)
    say(shown.getvalue().rstrip("\n"), err=True)


@contextmanager
def heard(*, quiet: bool) -> Iterator[None]:
    """While inside, what the library logs is written to stderr: warnings, and with ``--verbose`` decisions too."""
    if quiet:
        yield
        return
    import logging

    logger, handler = logging.getLogger(LOGGER), _handler()
    before = logger.level
    logger.addHandler(handler)
    if is_verbose():
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def _handler() -> logging.Handler:
    import logging

    lock = threading.Lock()
    last: dict[Any, float] = {}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == NOTES:
                return
            with lock:
                now = time.monotonic()
                if record.levelno == logging.WARNING and now - last.get(record.name, float("-inf")) < LINE_SECONDS:
                    return
                last[record.name] = now
                notice(record.getMessage(), record.levelname.lower(), record.name)

    return Handler(logging.INFO if is_verbose() else logging.WARNING)
