"""What a place that holds bytes must be able to do, and a source as a reader sees it.

A store knows files by relative names, moves bytes exactly, and confines itself: a name that leaves the store is refused
whoever gave it. It knows nothing of formats, staging or retries.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Protocol, runtime_checkable

from ckpt_tools.errors import IncompleteError, MalformedError, UnsafeError
from ckpt_tools.parts import SPARE_BYTES
from ckpt_tools.stores.present import NOTHING, Present

Buffer = bytes | bytearray | memoryview


class FileWriter(Protocol):
    """An output file being filled; positions may come in any order and from any thread."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at ``offset``. Raises StoreError."""

    def close(self) -> None:
        """The file is complete. Raises StoreError."""

    def abandon(self) -> None:
        """Let go of it, whatever it holds. Raises StoreError."""


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


class FillableStore(Store, Protocol):
    """A store whose files take bytes at any position: a local folder, or memory, but no object store."""

    def create(self, path: str, size_bytes: int) -> FileWriter:
        """A new file of exactly ``size_bytes``. Raises StoreError, for example where the disk is full."""

    def reopen(self, path: str) -> FileWriter:
        """A file that was created before, for writing on. Raises StoreError."""


@runtime_checkable
class Versioned(Protocol):
    """A store that can tell a file from another that took its place."""

    def version(self, path: str) -> str:
        """Another text where the file was written again. Raises IncompleteError, StoreError."""


@dataclass(frozen=True, slots=True)
class Location:
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

    def locate(self, path: str) -> Location | None:
        """Where the file is, if it is in the service."""


@runtime_checkable
class Expecting(Protocol):
    """A distant store, for which many small reads cost more than one of all."""

    def expect(self, path: str, start: int, stop: int) -> None:
        """Most of these bytes are about to be read by this thread. Raises as ``read_into``."""


@dataclass(frozen=True, slots=True)
class CopyingRules:
    """How a destination copies: ranges of files of its own ``service``, as parts of at least ``min_bytes``. Where a
    file has such parts, all of its parts but the last hold as many."""

    service: Hashable
    min_bytes: int


@dataclass(frozen=True, slots=True)
class PartRules:
    """How a destination wants its files cut: into parts of about ``part_bytes``, at most ``max_parts`` of a file.

    ``copying`` is there where it may copy of files itself.
    """

    part_bytes: int = 0
    max_parts: int | None = None
    copying: CopyingRules | None = None

    def wanted_bytes(self, largest_file: int) -> int:
        """The size to cut at, with room for parts that end a little earlier so as to split no element."""
        by_number = 0 if self.max_parts is None else -(-largest_file // self.max_parts) + SPARE_BYTES
        return max(self.part_bytes + SPARE_BYTES if self.part_bytes else 0, by_number)


class Destination(Protocol):
    """Files being written, part by part, none of which anybody else can see yet.

    Parts of a file are numbered from 0 in order of their bytes, and may be written in any order, from any thread or
    process that was given the destination and the file's handle; a part may be written twice, and holds the same
    bytes both times.
    """

    def begin(self, path: str, size_bytes: int) -> str:
        """Make a new file of exactly ``size_bytes``; its handle. Raises StoreError."""

    def write(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        """Write part ``number``, all of ``data`` at ``offset``; a proof of it. Raises StoreError."""

    def holds(self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, proof: str) -> bool:
        """Whether that part is there, whole, as the process that wrote it said: its CRC-32 and its proof."""

    def finish(self, path: str, handle: str, proofs: Sequence[str]) -> None:
        """All parts were written, with these proofs. Raises StoreError."""

    def abandon(self) -> None:
        """Let go of what is open; nothing is removed, nothing is raised."""


@runtime_checkable
class Copying(Protocol):
    """A destination in a service that copies within itself, so that bytes need not come here and go back."""

    def can_copy(self, source: Location, num_bytes: int) -> bool:
        """Whether ``copy`` takes so many bytes from there as a part."""

    def copy(self, path: str, handle: str, number: int, source: Location, start: int, stop: int) -> str:
        """As ``write``, with bytes ``[start, stop)`` of ``source``. Raises StoreError."""


@runtime_checkable
class InOrder(Protocol):
    """A destination whose parts wait for those before them."""

    def fail(self, error: BaseException) -> None:
        """Somebody's part will never come: whoever waits raises this."""


class Log(Protocol):
    """Bytes kept beside unfinished output, which outlive the process that wrote them."""

    def read(self) -> bytes:
        """All that was appended, perhaps but for an end that was cut off. Raises StoreError."""

    def append(self, data: bytes) -> None:
        """Add ``data``. Raises StoreError."""

    def clear(self) -> None:
        """Forget everything. Raises StoreError."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something of ours, ``num_bytes`` large, that an ended run left at its destination or beside it."""

    kind: str
    """What it is, in words: unfinished output, an open upload."""
    url: str
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "url": self.url, "bytes": self.num_bytes}


class Claim(Protocol):
    """A place that this process alone is writing to."""

    @property
    def destination(self) -> Destination:
        """Where to write."""

    @property
    def log(self) -> Log:
        """Where to note what was written."""

    def publish(self, paths: Sequence[str], replaced: Mapping[str, int] = NOTHING) -> None:
        """Make the finished files visible, the last of ``paths`` last, and remove ``replaced``: names and sizes.

        Raises:
            DestinationExistsError: something else than ``replaced`` is there; it is kept. StoreError.
        """


@runtime_checkable
class Readable(Protocol):
    """A claim whose finished files can be read before they are published."""

    @property
    def finished(self) -> Store:
        """The finished files."""


class Place(Protocol):
    """Where an output is to be, before anything is written there."""

    @property
    def url(self) -> str:
        """For messages."""

    @property
    def name(self) -> str:
        """The last part of the URL."""

    @property
    def parts(self) -> PartRules:
        """How files are cut there."""

    def present(self, *, is_file: bool) -> Present | None:
        """What stands there already, as one file or as a folder that is not empty. Raises StoreError."""

    def check_free(self, *, is_file: bool, overwrite: bool) -> None:
        """Raises DestinationExistsError or UsageError where the place may not, or cannot, be taken; StoreError."""

    def claim(
        self, *, is_file: bool, overwrite: bool, resume: bool, fsync: bool = False
    ) -> AbstractContextManager[Claim]:
        """Take the place, as one file or as a folder; on leaving, what was not published is removed.

        With ``resume`` what a killed run left is kept, and is kept again where this run fails. With ``fsync`` what is
        published outlives a power failure.

        Raises:
            DestinationExistsError: something is there and ``overwrite`` is False, or another process is writing it.
            UsageError: the place cannot be replaced. StoreError: it cannot be written.
        """

    def leftovers(self) -> Sequence[Leftover]:
        """What killed runs left there, and nothing else.

        Raises:
            DestinationExistsError: a process is writing there. StoreError: looking failed.
        """

    def remove_leftovers(self) -> Sequence[Leftover]:
        """Remove them, and put back what a killed run had moved aside; what they were. Raises as ``leftovers``."""


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
            raise MalformedError(f"{size:,} bytes are too many for such a file (at most {limit_bytes:,})", path=path)
        return self.read(path, 0, size)
