"""Files being written part by part, unseen: the interface, and that of a store which takes bytes at any position."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from ckpt_tools.core.part_rules import PartRules
from ckpt_tools.errors import CkptError
from ckpt_tools.stores.source import Buffer, CopySource, FileWriter, FillableStore

VERIFY_BLOCK_BYTES = 1 << 20
"""Bytes that are read again at a time, to be checked."""


class Destination(ABC):
    """Files being written part by part, not visible to other processes yet.

    Parts of a file are numbered from 0 in order of their bytes, and may be written in any order, from any thread or
    process that has the destination and the file's handle. A part that is written twice holds the same bytes both
    times.
    """

    __slots__ = ()
    splits_files: ClassVar[bool] = False
    """True if several processes may each write a part of one file without telling each other."""
    files_begun_at_once: ClassVar[int] = 1
    """How many files are begun together, if so many tasks follow one another."""

    def check_free_space(self, num_bytes: int) -> None:  # noqa: B027 - most stores cannot tell
        """Raises StoreError if files of so many bytes in all are known not to fit."""

    def bypass_page_cache(self) -> None:  # noqa: B027 - only local files have one
        """From now on, write files without keeping them in the system's page cache."""

    @abstractmethod
    def begin_file(self, path: str, size_bytes: int) -> str:
        """Make a new file of exactly ``size_bytes``; its handle. Raises StoreError."""

    def begin_files(self, sizes: Mapping[str, int]) -> list[str]:
        """Begin several files, by path with their sizes: the handle of each. Raises StoreError."""
        return [self.begin_file(path, size) for path, size in sizes.items()]

    @abstractmethod
    def write_part(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        """Write part ``number``, all of ``data`` at ``offset``; a part tag for it. Raises StoreError."""

    @abstractmethod
    def has_part(
        self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str
    ) -> bool:
        """True if that part is stored completely, with the CRC-32 and the part tag of the process that wrote it."""

    @abstractmethod
    def finish_file(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        """Complete a file whose parts were all written, with these part tags. Raises StoreError."""

    @abstractmethod
    def close_open_files(self) -> None:
        """Close everything that is open; nothing is removed or raised."""

    @property
    def part_rules(self) -> PartRules:
        """Rules for parts, those for ``copy_part`` among them."""
        return PartRules()

    def copy_part(self, path: str, handle: str, number: int, source: CopySource, start: int, stop: int) -> str:
        """Like ``write_part``, with bytes ``[start, stop)`` of ``source``, which ``part_rules`` allow. Raises
        StoreError."""
        raise AssertionError("a destination whose rules name no service copies nothing")

    def fail_waiting_writers(self, error: BaseException) -> None:  # noqa: B027 - nothing to do is the default
        """Make every process that waits for parts raise this error, because a part will not come."""


class JournalLog(Protocol):
    """An append-only log stored beside unfinished output, which outlives the process that wrote it."""

    def read(self) -> bytes:
        """Everything that was appended; the end may be cut off. Raises StoreError."""

    def append(self, data: bytes) -> None:
        """Add ``data``. Raises StoreError."""

    def clear(self) -> None:
        """Remove all entries. Raises StoreError."""


@dataclass(slots=True)
class StoreDestination(Destination):
    """Files of ``store``, a local folder or memory, each open from its first part until it is finished.

    A copy in another process has no file open, and opens one when it first writes to it.
    """

    splits_files: ClassVar[bool] = True
    store: FillableStore
    _writers: dict[str, FileWriter] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def check_free_space(self, num_bytes: int) -> None:
        self.store.check_free_space(num_bytes)

    def bypass_page_cache(self) -> None:
        self.store.bypass_page_cache()

    def begin_file(self, path: str, size_bytes: int) -> str:
        with self._lock:
            self._writers[path] = self.store.create(path, size_bytes)
        return ""

    def write_part(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        self._writer_of(path).write_at(offset, data)
        return ""

    def _writer_of(self, path: str) -> FileWriter:
        with self._lock:
            if path not in self._writers:
                self._writers[path] = self.store.reopen(path)
            return self._writers[path]

    def has_part(
        self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str
    ) -> bool:
        from isal import isal_zlib

        crc_so_far = 0
        try:
            for start in range(offset, offset + num_bytes, VERIFY_BLOCK_BYTES) or (offset,):
                buffer = bytearray(min(VERIFY_BLOCK_BYTES, offset + num_bytes - start))
                self.store.read_into(path, start, memoryview(buffer))
                crc_so_far = isal_zlib.crc32(buffer, crc_so_far)
        except CkptError:
            return False
        return crc_so_far == crc

    def finish_file(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        writer = self._writer_of(path)
        with self._lock:
            del self._writers[path]
        writer.close()

    def close_open_files(self) -> None:
        with self._lock:
            for writer in self._writers.values():
                with suppress(CkptError):
                    writer.abandon()
            self._writers.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return StoreDestination, (self.store,)
