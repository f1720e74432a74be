"""What a place that takes bytes must be able to do."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ckpt_tools.core.dtypes import SPARE_BYTES
from ckpt_tools.core.json_fields import json_of
from ckpt_tools.stores.present import NOTHING, Present
from ckpt_tools.stores.source import Buffer, ServiceFile, Store


class FileWriter(Protocol):
    """An output file being filled; positions may come in any order and from any thread."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at ``offset``. Raises StoreError."""

    def close(self) -> None:
        """The file is complete. Raises StoreError."""

    def abandon(self) -> None:
        """Let go of it, whatever it holds. Raises StoreError."""


class FillableStore(Store, Protocol):
    """A store whose files take bytes at any position: a local folder, or memory, but no object store."""

    def create(self, path: str, size_bytes: int) -> FileWriter:
        """A new file of exactly ``size_bytes``. Raises StoreError, for example where the disk is full."""

    def reopen(self, path: str) -> FileWriter:
        """A file that was created before, for writing on. Raises StoreError."""


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
        """Write part ``number``, all of ``data`` at ``offset``; a part tag for it. Raises StoreError."""

    def holds(self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str) -> bool:
        """Whether that part is there, whole, as the process that wrote it said: its CRC-32 and its part tag."""

    def finish(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        """All parts were written, with these part tags. Raises StoreError."""

    def abandon(self) -> None:
        """Let go of what is open; nothing is removed, nothing is raised."""


@runtime_checkable
class Copying(Protocol):
    """A destination in a service that copies within itself, so that bytes need not come here and go back."""

    def can_copy(self, source: ServiceFile, num_bytes: int) -> bool:
        """Whether ``copy`` takes so many bytes from there as a part."""

    def copy(self, path: str, handle: str, number: int, source: ServiceFile, start: int, stop: int) -> str:
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
        return json_of(self)


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
