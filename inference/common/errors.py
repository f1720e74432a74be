"""Error reports of the commands: one sentence on stderr and a documented exit code, never a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ckpt_tools.errors import CkptError, FormatError, StoreError, UsageError
from ckpt_tools.process.credentials import mask_secrets
from ckpt_tools.process.signals import get_exit_code, raise_on_signals

OUR_PACKAGES = frozenset(
    {"ckpt_tools", *(f"{prefix}{name}" for prefix in ("", "ckpt_tools_") for name in ("training", "inference"))}
)


@contextmanager
def report_errors() -> Iterator[None]:
    """Within the block, an error or a stop signal ends the process with one sentence and its exit code."""
    try:
        with raise_on_signals():
            yield
    except CkptError as error:
        _exit_with(f"Error: {error}", error, error.exit_code)
    except ModuleNotFoundError as error:
        missing = _describe_missing_package(error)
        if missing is None:
            raise
        _exit_with(f"Error: {missing}", error, UsageError.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _exit_with(f"Error: {where}{error.strerror or error}", error, StoreError.exit_code)
    except KeyboardInterrupt as error:
        code = get_exit_code(error)
        _exit_with(f"stopped by {signal.Signals(code - 128).name}", error, code)


@contextmanager
def translate_file_errors(what: str) -> Iterator[None]:
    """An error in the block that is not a ``CkptError`` becomes FormatError, ``what`` and the reason: libraries raise
    whatever a value in a file makes them stumble over. If a package is missing, UsageError."""
    try:
        yield
    except CkptError:
        raise
    except ImportError as error:
        raise UsageError(f"{what}: {describe_error(error)}") from error
    except Exception as error:
        raise FormatError(f"{what}: {describe_error(error)}") from error


def make_printable(text: str) -> str:
    """``text`` without credentials, and with control characters as escapes, because file names come from outside."""
    text = mask_secrets(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def to_ckpt_error(error: Exception, url: str) -> CkptError:
    """An error that no code foresaw, while the model at ``url`` was loaded, as one with a sentence."""
    missing = _describe_missing_package(error)
    if missing is not None:
        return UsageError(missing)
    if isinstance(error, OSError):
        return StoreError(f"{url} cannot be loaded: {describe_error(error)}")
    return CkptError(f"{url} cannot be loaded: {describe_any_error(error)}")


def describe_any_error(error: Exception) -> str:
    """The text of an error in one line; of one that no code foresaw with its type, which a traceback ends with."""
    if isinstance(error, CkptError):
        return str(error)
    *lines_before, last_line = str(error).strip().splitlines() or [""]
    return last_line.strip() if lines_before else f"{type(error).__name__}: {last_line.strip()}".removesuffix(": ")


def _describe_missing_package(error: Exception) -> str | None:
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not package or package in OUR_PACKAGES:
        return None
    return f"this command needs the package {package}; install it with: pip install 'ckpt-tools[serve]'"


def describe_error(error: BaseException) -> str:
    """The text of a library's error as one line, or its type."""
    return " ".join(str(error).split()) or type(error).__name__


def _exit_with(sentence: str, error: BaseException, code: int) -> None:
    """Print the sentence and the notes of the error as one line, and exit."""
    click.echo(make_printable("; ".join([sentence, *getattr(error, "__notes__", ())])), err=True)
    sys.exit(code)
