"""Error reports of the commands: one sentence on stderr and a documented exit code, never a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ckpt_tools.credentials import without_secrets
from ckpt_tools.errors import CkptError, StoreError, UsageError
from ckpt_tools.signals import exit_code_of, stopping_on_signals

OUR_PACKAGES = frozenset(
    {"ckpt_tools", *(f"{prefix}{name}" for prefix in ("", "ckpt_tools_") for name in ("training", "inference"))}
)


@contextmanager
def report_errors() -> Iterator[None]:
    """Within the block, an error or a stop signal ends the process with one sentence and its exit code."""
    try:
        with stopping_on_signals():
            yield
    except CkptError as error:
        _exit(f"error: {error}", error, error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in OUR_PACKAGES:
            raise
        how = f"this command needs the package {package}; install it with: pip install 'ckpt-tools[serve]'"
        _exit(f"error: {how}", error, UsageError.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _exit(f"error: {where}{error.strerror or error}", error, StoreError.exit_code)
    except KeyboardInterrupt as error:
        code = exit_code_of(error)
        _exit(f"stopped by {signal.Signals(code - 128).name}", error, code)


def printable(text: str) -> str:
    """``text`` without credentials, and with control characters as escapes, because file names come from outside."""
    text = without_secrets(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: BaseException) -> str:
    """The text of a library's error as one line, or its type."""
    return " ".join(str(error).split()) or type(error).__name__


def _exit(sentence: str, error: BaseException, code: int) -> None:
    """Print the sentence and the notes of the error as one line, and exit."""
    click.echo(printable("; ".join([sentence, *getattr(error, "__notes__", ())])), err=True)
    sys.exit(code)
