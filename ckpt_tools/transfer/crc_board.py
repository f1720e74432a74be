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
    """The CRC-32 of bytes ``[start, stop)`` of a file, a part of the range ``covers``."""

    covers: tuple[int, int]
    start: int
    stop: int
    value: int

    @property
    def is_whole(self) -> bool:
        return self.covers == (self.start, self.stop)


class Board(Protocol):
    """Exchange of parts' checksums between workers, by the number of the file."""

    def post(self, file: int, parts: Iterable[PartCrc]) -> None:
        """Tell; a part told twice counts once."""

    def value(self, file: int, covers: tuple[int, int]) -> int:
        """The checksum of a range, as soon as all of its parts are known. Raises what ``fail`` was given."""

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in all workers that wait, because a part will not come."""

    def forget(self, file: int) -> None:
        """The file is complete."""


@dataclass(slots=True)
class LocalBoard:
    """A board for the threads of one process."""

    _parts: defaultdict[int, dict[tuple[int, int], dict[int, PartCrc]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _error: list[BaseException] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition, repr=False)

    def post(self, file: int, parts: Iterable[PartCrc]) -> None:
        with self._news:
            for part in parts:
                self._parts[file].setdefault(part.covers, {})[part.start] = part
            self._news.notify_all()

    def value(self, file: int, covers: tuple[int, int]) -> int:
        with self._news:
            while (found := self.known(file, covers)) is None:
                if self._error:
                    raise self._error[0]
                self._news.wait()
            return found

    def known(self, file: int, covers: tuple[int, int]) -> int | None:
        """The checksum of a range, or None while a part is missing."""
        parts = self._parts[file].get(covers, {})
        if sum(part.stop - part.start for part in parts.values()) < covers[1] - covers[0]:
            return None
        return combined(parts.values())

    def fail(self, error: BaseException) -> None:
        with self._news:
            self._error.append(error)
            self._news.notify_all()

    def forget(self, file: int) -> None:
        with self._news:
            self._parts.pop(file, None)


def combined(parts: Iterable[PartCrc]) -> int:
    """The CRC-32 of a range from those of its parts, each once; 0 for no part."""
    in_order = sorted(parts, key=lambda part: part.start)
    return reduce(lambda crc, part: isal_zlib.crc32_combine(crc, part.value, part.stop - part.start), in_order, 0)
