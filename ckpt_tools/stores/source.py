"""What a place that holds bytes must be able to do, and a source as a reader sees it.

A store knows files by relative names, moves bytes exactly, and confines itself: a name that leaves the store is refused
whoever gave it. It knows nothing of formats, staging or retries.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Protocol, runtime_checkable

from ckpt_tools.errors import IncompleteError, MalformedError, UnsafeError

Buffer = bytes | bytearray | memoryview


class Store(Protocol):
    """A folder of files, local or remote."""

    @property
    def url(self) -> str:
        """Where the store is, for messages."""

    def list(self) -> Mapping[str, int]:
        """Every file below the store by relative name, and its bytes. Raises SourceNotFoundError, StoreError."""

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``path`` from ``start``.

        Raises:
            IncompleteError: the file is missing or ends early.
            StoreError: reading failed.
        """


@runtime_checkable
class Versioned(Protocol):
    """A store that can tell a file from another that took its place."""

    def version(self, path: str) -> str:
        """Another text where the file was written again. Raises IncompleteError, StoreError."""


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """A file in terms of the service that keeps it, which can itself copy between files of its own.

    ``service`` says which one, and is equal for two files of one service; ``version`` tells the file from one written
    later.
    """

    service: Hashable
    name: str
    version: str


@runtime_checkable
class Located(Protocol):
    """A store that is a part of a service."""

    def locate(self, path: str) -> ServiceFile | None:
        """Where the file is, if it is in the service."""


@runtime_checkable
class Prefetching(Protocol):
    """A distant store, for which many small reads cost more than one of all."""

    def prefetch(self, path: str, start: int, stop: int) -> None:
        """Most of these bytes are about to be read by this thread. Raises as ``read_into``."""


def checked_name(path: str) -> str:
    """``path`` if it is a plain relative name that stays inside a store.

    Raises:
        UnsafeError: it is absolute, climbs out, is a URL, names a drive, holds a NUL or a backslash, or cannot be
        encoded as a file name.
    """
    parts = PurePosixPath(path).parts
    unsafe = (
        not parts
        or path.startswith("/")
        or ".." in parts
        or any(character in path for character in "\0\\")
        or "://" in path
        or (len(path) > 1 and path[1] == ":")
        or not _is_encodable(path)
    )
    if unsafe:
        raise UnsafeError(f"the checkpoint names a file {path!r} outside of itself; it was not opened")
    return path


def _is_encodable(path: str) -> bool:
    """False for lone surrogates, which JSON and pickles can hold and a file name cannot."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Source:
    """A store and what it held when it was opened."""

    store: Store
    files: Mapping[str, int] = field(repr=False)

    @classmethod
    def open(cls, store: Store) -> Source:
        return cls(store, dict(sorted(store.list().items())))

    def size(self, path: str) -> int:
        """Bytes of ``path``. Raises IncompleteError where it is missing."""
        if path not in self.files:
            checked_name(path)
            raise IncompleteError("this file of the checkpoint is missing", path=path)
        return self.files[path]

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of ``path``. Raises IncompleteError where the file ends before ``stop``."""
        if not 0 <= start <= stop <= self.size(path):
            raise IncompleteError(f"it ends at byte {self.size(path):,}, before byte {stop:,}", path=path)
        buffer = bytearray(stop - start)
        self.store.read_into(path, start, memoryview(buffer))
        return bytes(buffer)

    def read_all(self, path: str, *, limit_bytes: int) -> bytes:
        """The whole of a header file. Raises MalformedError where it is larger than any such file may be."""
        size = self.size(path)
        if size > limit_bytes:
            raise MalformedError(
                f"{size:,} bytes are too many for a file of this kind (at most {limit_bytes:,})", path=path
            )
        return self.read(path, 0, size)
