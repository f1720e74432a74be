"""Compares the CRC-32 of zip records with the stated one as their bytes pass, in whatever order and pieces.

``.pt``, ``.npz`` and ZeRO files are zips of records, and each item of a DCP is such a zip. A record is compared if all
its bytes passed in this process. Of one in progress, the ranges that have passed are kept, each with its CRC-32; a
record that has passed is forgotten.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from isal import isal_zlib

from ckpt_tools.errors import FormatError, IncompleteError, MalformedError, UnsafeError
from ckpt_tools.serialization.zip_archive import LOCAL_MAGIC, ZipDirectory, read_directory
from ckpt_tools.stores.source import Buffer

MAX_RANGES: Final = 1 << 15
"""Ranges kept of all records in progress, at 170 bytes each; with more, the oldest record is not compared."""

MAX_ZIPS: Final = 1 << 14
"""Files whose directories are kept, at 20 bytes a record and 600 for the file."""

TAIL_BYTES: Final = 1 << 16
"""One read from the end that holds the directory of about 900 records."""

MAX_REST_BYTES: Final = 4 << 10
"""So much of a record is always read, if the others have passed; of a large one, an eighth."""

BLOCK_BYTES: Final = 1 << 20
"""Read at a time of what has not passed."""


@dataclass(slots=True, eq=False)
class Record:
    """A record of ``file`` while its ``size`` bytes pass. ``ranges`` have passed: start, stop and CRC-32 of each, in
    order. ``size`` is 0 where no CRC-32 is stated."""

    file: str
    number: int = 0
    """Its position among the records of its zip, or the start of its item."""
    size: int = 0
    stated: Callable[[], int] = int
    """The CRC-32 that the directory states; 0 for none."""
    start: Callable[[], int] = int
    ranges: list[tuple[int, int, int]] = field(default_factory=list)

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of ``[start, stop)`` that have not passed."""
        for lower, upper, _ in self.ranges[max(0, bisect_left(self.ranges, (start,)) - 1) :]:
            if lower >= stop:
                break
            if start < lower:
                yield start, lower
            start = max(start, upper)
        if start < stop:
            yield start, stop

    def add(self, start: int, stop: int, crc: int) -> None:
        """A part that has passed, unless a part of it has: another thread may be faster."""
        at = bisect_left(self.ranges, (start,))
        if any(each[0] < stop and start < each[1] for each in self.ranges[max(0, at - 1) : at + 1]):
            return
        if at < len(self.ranges) and self.ranges[at][0] == stop:
            _, last, after = self.ranges.pop(at)
            stop, crc = last, isal_zlib.crc32_combine(crc, after, last - stop)
        if at and self.ranges[at - 1][1] == start:
            first, _, before = self.ranges.pop(at - 1)
            at, crc, start = at - 1, isal_zlib.crc32_combine(before, crc, stop - start), first
        self.ranges.insert(at, (start, stop, crc))


@dataclass(frozen=True, slots=True)
class _Zip:
    """Columns of a zip's directory, by the position of the record."""

    headers: array[int]
    sizes: array[int]
    crcs: array[int]


@dataclass(slots=True)
class RecordChecks:
    """The records in progress of the files that ``read`` reads, whose sizes ``size`` says. Threads may share it."""

    read: Callable[[str, int, int], bytes]
    size: Callable[[str], int]
    _zips: OrderedDict[str, _Zip | None] = field(default_factory=OrderedDict)
    _begun: OrderedDict[tuple[str, int], Record] = field(default_factory=OrderedDict)
    _num_ranges: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def in_zip(self, file: str, start: int) -> Record:
        """The record of byte ``start`` of ``file``, if that is a zip."""
        if file not in self._zips:
            found = self._opened(file)
            with self._lock:
                self._zips[file] = found
                if len(self._zips) > MAX_ZIPS:
                    self._zips.popitem(last=False)
        archive = self._zips.get(file)
        number = -1 if archive is None else bisect_right(archive.headers, start) - 1
        if archive is None or number < 0 or not archive.crcs[number]:
            return Record(file)
        size, crc = archive.sizes[number], archive.crcs[number]
        return Record(file, number, size, lambda: crc, lambda: self._named(file, number)[1])

    def in_item(self, file: str, start: int, stop: int, crc_at: int) -> Record:
        """The record ``[start, stop)`` of an item in ``file``, whose CRC-32 is stated at byte ``crc_at``."""
        return Record(
            file,
            start,
            stop - start,
            lambda: int.from_bytes(self.read(file, crc_at, crc_at + 4), "little"),
            lambda: start,
        )

    def passed(self, record: Record, start: int, data: Buffer) -> None:
        """``data`` was read from byte ``start`` of the file. Raises MalformedError if the record is whole and wrong."""
        if not record.size:
            return
        key = record.file, record.number
        with self._lock:
            record = self._begun.setdefault(key, record)
            missing = list(record.missing(start, start + len(data)))
        view = memoryview(data)
        found = [(*part, isal_zlib.crc32(view[part[0] - start : part[1] - start])) for part in missing]
        with self._lock:
            before = len(record.ranges)
            for part in found:
                record.add(*part)
            first, last, crc = record.ranges[0]
            is_whole = last - first == record.size
            if is_whole:
                self._begun.pop(key, None)
            self._num_ranges += (0 if is_whole else len(record.ranges)) - before
            while self._num_ranges > MAX_RANGES:
                self._num_ranges -= len(self._begun.popitem(last=False)[1].ranges)
        if is_whole and found and crc != (stated := record.stated()) and stated:
            raise self._wrong(record)

    def finish(self, *, every: bool) -> None:
        """Read and compare the rest of records, such as the padding of a flat buffer and the header of an array, if it
        is short, or of ``every`` one. Raises as ``passed``, and as reading does."""
        for record in list(self._begun.values()):
            rest = record.size - sum(stop - start for start, stop, _ in record.ranges)
            if every or rest <= max(MAX_REST_BYTES, record.size // 8):
                start = record.start()
                for lower, upper in list(record.missing(start, start + record.size)):
                    for first in range(lower, upper, BLOCK_BYTES):
                        data = self.read(record.file, first, min(first + BLOCK_BYTES, upper))
                        self.passed(record, first, data)

    def _opened(self, file: str) -> _Zip | None:
        try:
            size = self.size(file)  # a file that is made as it is read has none, and is not made for this
            if self.read(file, 0, min(size, len(LOCAL_MAGIC))) != LOCAL_MAGIC:
                return None
            records = list(self._directory(file, size).records.values())
        except (FormatError, UnsafeError):
            return None
        return _Zip(
            array("Q", [each.header_offset for each in records]),
            array("Q", [each.size for each in records]),
            array("I", [each.crc32 for each in records]),
        )

    def _directory(self, file: str, size: int) -> ZipDirectory:
        found = read_directory(partial(self.read, file), size, file, tail_bytes=min(size, TAIL_BYTES))
        if found is None:
            raise IncompleteError("it is not a zip", path=file)
        return found

    def _named(self, file: str, number: int) -> tuple[str, int]:
        """Name and first byte of a record of a zip."""
        directory = self._directory(file, self.size(file))
        name = list(directory.records)[number]
        return name, directory.locate_payloads(partial(self.read, file), [name])[name][0]

    def _wrong(self, record: Record) -> MalformedError:
        start = record.ranges[0][0]
        what = f"the item with elements at byte {start:,}"
        if self._zips.get(record.file) is not None:
            what = f"the record {self._named(record.file, record.number)[0]} at byte {start:,}"
        return MalformedError(
            f"{what} does not have its stored CRC-32: the file is damaged; take it from a copy", path=record.file
        )
