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

from ckpt_tools.cli.wrapping import echo, get_terminal_width, print_wrapped
from ckpt_tools.messages.help_text import wrap_words
from ckpt_tools.messages.wording import escape_unprintable
from ckpt_tools.process.credentials import mask_secrets

if TYPE_CHECKING:
    import logging

LOG_FORMATS = ("text", "json")

WARNING_INTERVAL_SECONDS = 2.0
"""Many threads may be retrying at once, each every few tenths of a second: one line this often is enough."""

LOGGER_NAME = "ckpt_tools"
NOTES_LOGGER_NAME = f"{LOGGER_NAME}.notes"
"""The logger of notes, which a command prints with its result."""


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
