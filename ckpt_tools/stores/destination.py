"""What a place that takes bytes must be able to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from ckpt_tools.core.dtypes import SPARE_BYTES
from ckpt_tools.core.showing import Jsonable
from ckpt_tools.stores.output_form import Folder, OutputForm, SingleFile
from ckpt_tools.stores.present import NOTHING, Present
from ckpt_tools.stores.source import Buffer, ServiceFile, Store


@dataclass(frozen=True, slots=True)
class CopyingRules:
    """How a destination copies: ranges of files of its own ``service``, as parts of at least ``min_bytes``. Where a
    file has such parts, all of its parts but the last hold as many."""

    service: Hashable
    min_bytes: int

    def allow(self, source: ServiceFile, num_bytes: int) -> bool:
        """Whether so many bytes of ``source`` may be copied as a part."""
        return source.service == self.service and num_bytes >= self.min_bytes


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


class Destination(ABC):
    """Files being written, part by part, none of which anybody else can see yet.

    Parts of a file are numbered from 0 in order of their bytes, and may be written in any order, from any thread or
    process that was given the destination and the file's handle; a part may be written twice, and holds the same
    bytes both times. A destination inherits it, and overrides what it can do beyond that.
    """

    __slots__ = ()

    @abstractmethod
    def begin(self, path: str, size_bytes: int) -> str:
        """Make a new file of exactly ``size_bytes``; its handle. Raises StoreError."""

    @abstractmethod
    def write(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        """Write part ``number``, all of ``data`` at ``offset``; a part tag for it. Raises StoreError."""

    @abstractmethod
    def holds(self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str) -> bool:
        """Whether that part is there, whole, as the process that wrote it said: its CRC-32 and its part tag."""

    @abstractmethod
    def finish(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        """All parts were written, with these part tags. Raises StoreError."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of what is open; nothing is removed, nothing is raised."""

    @property
    def copying(self) -> CopyingRules | None:
        """What ``copy`` takes, if the destination is in a service that copies within itself, so that bytes need not
        come here and go back."""
        return None

    def copy(self, path: str, handle: str, number: int, source: ServiceFile, start: int, stop: int) -> str:
        """As ``write``, with bytes ``[start, stop)`` of ``source``, which ``copying`` allows. Raises StoreError."""
        raise AssertionError("a destination without copying rules copies nothing")

    def fail(self, error: BaseException) -> None:  # noqa: B027 - nothing to do is the default
        """Somebody's part will never come: whoever waits for parts before its own raises this."""


class Log(Protocol):
    """Bytes kept beside unfinished output, which outlive the process that wrote them."""

    def read(self) -> bytes:
        """All that was appended, perhaps but for an end that was cut off. Raises StoreError."""

    def append(self, data: bytes) -> None:
        """Add ``data``. Raises StoreError."""

    def clear(self) -> None:
        """Forget everything. Raises StoreError."""


@dataclass(frozen=True, slots=True)
class Leftover(Jsonable):
    """Something of ours, ``num_bytes`` large, that an ended run left at its destination or beside it."""

    kind: str
    """What it is, in words: unfinished output, an open upload."""
    url: str
    num_bytes: int


class Claim(ABC):
    """A place that this process alone is writing to: files go to ``destination``, and what was written is noted in
    ``log``."""

    __slots__ = ()
    destination: Destination
    log: Log

    @property
    def finished(self) -> Store | None:
        """The finished files, if they can be read before they are published."""
        return None

    @abstractmethod
    def publish(self, paths: Sequence[str], replaced: Mapping[str, int] = NOTHING) -> None:
        """Make the finished files visible, the last of ``paths`` last, and remove ``replaced``: names and sizes.

        Raises:
            DestinationExistsError: something else than ``replaced`` is there; it is kept. StoreError.
        """


@dataclass(frozen=True, slots=True)
class Place(ABC):
    """Where an output is to be, as a file or as a folder, before anything is written there."""

    form: OutputForm = field(default=Folder(), kw_only=True)

    def taken_as(self, form: OutputForm) -> Self:
        """The same place, for an output of another form."""
        return replace(self, form=form)

    def as_file(self) -> Self:
        """The same place, for an output that is one file whatever its name says."""
        return self.taken_as(SingleFile(self.name))

    @property
    @abstractmethod
    def url(self) -> str:
        """For messages."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the URL."""

    @property
    def parts(self) -> PartRules:
        """How files are cut there."""
        return PartRules()

    @abstractmethod
    def present(self) -> Present | None:
        """What stands there already, as one file or as a folder that is not empty. Raises StoreError."""

    @abstractmethod
    def check_free(self, *, overwrite: bool) -> None:
        """Raises DestinationExistsError or UsageError where the place may not, or cannot, be taken; StoreError."""

    @abstractmethod
    def claim(self, *, overwrite: bool, resume: bool, fsync: bool = False) -> AbstractContextManager[Claim]:
        """Take the place; on leaving, what was not published is removed.

        With ``resume`` what a killed run left is kept, and is kept again where this run fails. With ``fsync`` what is
        published outlives a power failure.

        Raises:
            DestinationExistsError: something is there and ``overwrite`` is False, or another process is writing it.
            UsageError: the place cannot be replaced. StoreError: it cannot be written.
        """

    @abstractmethod
    def leftovers(self) -> Sequence[Leftover]:
        """What killed runs left there, whatever the form of their output, and nothing else.

        Raises:
            DestinationExistsError: a process is writing there. StoreError: looking failed.
        """

    @abstractmethod
    def remove_leftovers(self) -> Sequence[Leftover]:
        """Remove them, and put back what a killed run had moved aside; what they were. Raises as ``leftovers``."""

    @abstractmethod
    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        """Remove files of the folder by name, each batch after the one before it, then the folders that are empty.

        A folder or a link of such a name stays, and a name that is gone already is no error. Raises StoreError.
        """
