"""Checksums over ranges of output files whose parts are made by different workers.

A checksum follows the bytes it covers, so the worker that writes it needs the checksums of earlier parts from other
workers. Workers post their checksums before they write, and wait for those they need. No worker waits forever: tasks
are assigned in order, and a task needs earlier ones only.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Protocol

from isal import isal_zlib


@dataclass(frozen=True, slots=True)
class PartCrc:
    """The CRC-32 of bytes ``[start, stop)`` of a file, a part of ``covered_range``."""

    covered_range: tuple[int, int]
    start: int
    stop: int
    crc: int

    @property
    def is_whole(self) -> bool:
        return self.covered_range == (self.start, self.stop)


class ChecksumBoard(Protocol):
    """Exchange of parts' checksums between workers, by the number of the file."""

    def post_checksums(self, file: int, parts: Iterable[PartCrc]) -> None:
        """Make parts known to all workers; a part posted twice counts once."""

    def wait_for_checksum(self, file: int, covers: tuple[int, int]) -> int:
        """The checksum of a range, as soon as all of its parts are known. Raises the error that
        ``fail_waiting_workers`` got."""

    def fail_waiting_workers(self, error: BaseException) -> None:
        """Raise ``error`` in all workers that wait, because a part will not come."""

    def forget_file(self, file: int) -> None:
        """The file is complete."""


@dataclass(slots=True)
class LocalChecksumBoard:
    """A board for the threads of one process."""

    _parts: defaultdict[int, dict[tuple[int, int], dict[int, PartCrc]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _error: list[BaseException] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)

    def post_checksums(self, file: int, parts: Iterable[PartCrc]) -> None:
        with self._changed:
            for part in parts:
                self._parts[file].setdefault(part.covered_range, {})[part.start] = part
            self._changed.notify_all()

    def wait_for_checksum(self, file: int, covers: tuple[int, int]) -> int:
        with self._changed:
            while (checksum := self.find_checksum(file, covers)) is None:
                if self._error:
                    raise self._error[0]
                self._changed.wait()
            return checksum

    def find_checksum(self, file: int, covers: tuple[int, int]) -> int | None:
        """The checksum of a range, or None while a part is missing."""
        parts = self._parts[file].get(covers, {})
        if sum(part.stop - part.start for part in parts.values()) < covers[1] - covers[0]:
            return None
        return combine_crcs(parts.values())

    def fail_waiting_workers(self, error: BaseException) -> None:
        with self._changed:
            self._error.append(error)
            self._changed.notify_all()

    def forget_file(self, file: int) -> None:
        with self._changed:
            self._parts.pop(file, None)


def combine_crcs(parts: Iterable[PartCrc]) -> int:
    """The CRC-32 of a range from those of its parts, each once; 0 for no part."""
    in_order = sorted(parts, key=lambda part: part.start)
    return reduce(lambda crc, part: isal_zlib.crc32_combine(crc, part.crc, part.stop - part.start), in_order, 0)
