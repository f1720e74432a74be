"""Every error a user can meet, under one root.

::

    CkptError                    1  any other failure
    ├── LossError                1  with ``--strict``, something would have been left behind
    ├── UsageError               2  options that do not fit together
    ├── SourceNotFoundError      3  nothing at the source
    ├── FormatError              4  a checkpoint we cannot read
    │   ├── MalformedError          its bytes break a rule of its format
    │   ├── IncompleteError         a file, rank or region it needs is missing
    │   └── UnsupportedError        well formed, but a feature we do not handle
    ├── StoreError               5  the disk or the network failed; a retry may help
    ├── DifferenceError          6  verification or diff found differences
    ├── UnsafeError              7  refused: a code-running pickle or a path out of the checkpoint
    ├── DestinationExistsError   8  the destination exists and may not be overwritten
    └── MemoryBudgetError        9  the work does not fit in ``--memory``

    Stopped (of ``signals``)   143  SIGTERM ended it; 130 SIGINT (Ctrl-C), 129 SIGHUP

The number is the exit code of the command line. A message is one sentence that names the file or tensor and what
the user can do; ``path`` and ``key`` carry the same for programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Self

from ckpt_tools.process.credentials import mask_secrets

MAX_MESSAGE_CHARS = 1000
"""A checkpoint chooses some of the words of a message, and may choose a megabyte of them."""

MAX_NAME_CHARS = 300
"""Of a path or key in front of a message; a file name has at most 255."""


class CkptError(Exception):
    """The root of every error raised on purpose."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, path: str | None = None, key: str | None = None) -> None:
        message = _shorten_text(mask_secrets(message[: 20 * MAX_MESSAGE_CHARS]), MAX_MESSAGE_CHARS)
        super().__init__(message)
        self.message, self.path, self.key = message, path, key

    def __setattr__(self, name: str, value: object) -> None:
        """No attribute shows a credential, whenever it is set."""
        super().__setattr__(name, mask_secrets(value) if isinstance(value, str) else value)

    def __str__(self) -> str:
        parts = [_shorten_text(part, MAX_NAME_CHARS) for part in (self.path, self.key) if part]
        location = ": ".join(part for part in parts if not _does_mention(self.message, part))
        return f"{location}: {self.message}" if location else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), path=self.path, key=self.key), (self.message,)


@contextmanager
def name_file_in_errors(path: str) -> Iterator[None]:
    """An error within that names no file names ``path``."""
    try:
        yield
    except CkptError as error:
        error.path = error.path or path
        raise


def _shorten_text(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def _does_mention(message: str, part: str) -> bool:
    """Whether ``part`` stands in ``message`` as a word of its own, and not only inside another name."""
    return re.search(rf"(?<![\w./-]){re.escape(part)}(?![\w/-])", message) is not None


class LossError(CkptError):
    """With ``--strict``: the target cannot hold everything that the source does."""


class UsageError(CkptError):
    """Options or arguments that do not fit together; ``inapplicable`` names a parameter that does not apply at all."""

    exit_code = 2
    inapplicable: str | None = None

    @classmethod
    def of(cls, name: str, message: str) -> Self:
        """The error that the parameter ``name`` does not apply."""
        error = cls(message)
        error.inapplicable = name
        return error


class SourceNotFoundError(CkptError):
    """There is nothing at the source."""

    exit_code = 3


class FormatError(CkptError):
    """The source is not a checkpoint that can be read."""

    exit_code = 4


class MalformedError(FormatError):
    """The bytes break a rule of their format."""


class IncompleteError(FormatError):
    """A file, a rank or a region that the checkpoint needs is missing."""


class UnsupportedError(FormatError):
    """Well formed, but it uses a feature that is not handled."""


class SeveralCheckpointsError(UnsupportedError):
    """A folder holds several checkpoints, and nothing says which one is meant."""

    @classmethod
    def of(cls, folders: str) -> SeveralCheckpointsError:
        """The error that names the folders of the checkpoints, joined for a message."""
        return cls(f"there are several checkpoints here ({folders}); name the folder of one")


class StoreError(CkptError):
    """The disk or the network failed; a retry may help."""

    exit_code = 5


class DifferenceError(CkptError):
    """Two checkpoints that should hold the same tensors do not."""

    exit_code = 6


class UnsafeError(CkptError):
    """Refused: reading on would run code or leave the checkpoint's folder."""

    exit_code = 7


class DestinationExistsError(CkptError):
    """The destination exists; ``--overwrite`` replaces it."""

    exit_code = 8


class MemoryBudgetError(CkptError):
    """The work does not fit in the memory budget."""

    exit_code = 9


UNREADABLE = (FormatError, UnsafeError, UsageError, SourceNotFoundError)
"""Errors of reading a checkpoint that say something about it, and nothing about the disk or the network."""
