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

MAX_REMAINING_BYTES: Final = 4 << 10
"""So much of a record is always read, if the others have passed; of a large one, an eighth."""

BLOCK_BYTES: Final = 1 << 20
"""Read at a time of what has not passed."""


@dataclass(slots=True, eq=False)
class RecordProgress:
    """A record of ``file`` while its ``size`` bytes pass. ``size`` is 0 if no CRC-32 is stated."""

    file: str
    number: int = 0
    """Its position among the records of its zip, or the start of its item."""
    size: int = 0
    read_stated_crc: Callable[[], int] = int
    """The CRC-32 that the directory states; 0 for none."""
    find_start: Callable[[], int] = int
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    """Ranges that have passed: start, stop and CRC-32 of each. They are disjoint, in order, and never adjacent, since
    adjacent ones are merged: a record that has passed completely is one range."""

    def iter_missing_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of ``[start, stop)`` that have not passed."""
        for lower, upper, _ in self.ranges[max(0, bisect_left(self.ranges, (start,)) - 1) :]:
            if lower >= stop:
                break
            if start < lower:
                yield start, lower
            start = max(start, upper)
        if start < stop:
            yield start, stop

    def add_range(self, start: int, stop: int, crc: int) -> None:
        """Add a range that has passed, unless a part of it has already: another thread may be faster."""
        index = bisect_left(self.ranges, (start,))
        if any(each[0] < stop and start < each[1] for each in self.ranges[max(0, index - 1) : index + 1]):
            return
        if index < len(self.ranges) and self.ranges[index][0] == stop:
            _, last, next_crc = self.ranges.pop(index)
            stop, crc = last, isal_zlib.crc32_combine(crc, next_crc, last - stop)
        if index and self.ranges[index - 1][1] == start:
            first, _, previous_crc = self.ranges.pop(index - 1)
            index, crc, start = index - 1, isal_zlib.crc32_combine(previous_crc, crc, stop - start), first
        self.ranges.insert(index, (start, stop, crc))


@dataclass(frozen=True, slots=True)
class _ZipColumns:
    """Columns of a zip's directory, by the position of the record."""

    headers: array[int]
    sizes: array[int]
    crcs: array[int]


@dataclass(slots=True)
class RecordChecks:
    """The records in progress of the files that ``read_range`` reads and ``size_of_file`` measures. Threads may share
    it."""

    read_range: Callable[[str, int, int], bytes]
    size_of_file: Callable[[str], int]
    _zip_columns: OrderedDict[str, _ZipColumns | None] = field(default_factory=OrderedDict)
    _in_progress: OrderedDict[tuple[str, int], RecordProgress] = field(default_factory=OrderedDict)
    _num_ranges: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find_record_in_zip(self, file: str, start: int) -> RecordProgress:
        """The record of byte ``start`` of ``file``, if that is a zip."""
        if file not in self._zip_columns:
            new_columns = self._read_zip_columns(file)
            with self._lock:
                self._zip_columns[file] = new_columns
                if len(self._zip_columns) > MAX_ZIPS:
                    self._zip_columns.popitem(last=False)
        zip_columns = self._zip_columns.get(file)
        number = -1 if zip_columns is None else bisect_right(zip_columns.headers, start) - 1
        if zip_columns is None or number < 0 or not zip_columns.crcs[number]:
            return RecordProgress(file)
        size, crc = zip_columns.sizes[number], zip_columns.crcs[number]
        return RecordProgress(file, number, size, lambda: crc, lambda: self._record_name_and_start(file, number)[1])

    def make_item_record(self, file: str, start: int, stop: int, crc_at: int) -> RecordProgress:
        """The record ``[start, stop)`` of an item in ``file``, whose CRC-32 is stated at byte ``crc_at``."""
        return RecordProgress(
            file,
            start,
            stop - start,
            lambda: int.from_bytes(self.read_range(file, crc_at, crc_at + 4), "little"),
            lambda: start,
        )

    def check_passed_bytes(self, record: RecordProgress, start: int, data: Buffer) -> None:
        """``data`` was read from byte ``start`` of the file. Raises MalformedError if the record is whole and wrong."""
        if not record.size:
            return
        key = record.file, record.number
        with self._lock:
            record = self._in_progress.setdefault(key, record)
            missing = list(record.iter_missing_ranges(start, start + len(data)))
        view = memoryview(data)
        passed_ranges = [(*part, isal_zlib.crc32(view[part[0] - start : part[1] - start])) for part in missing]
        with self._lock:
            num_ranges_before = len(record.ranges)
            for part in passed_ranges:
                record.add_range(*part)
            first, last, crc = record.ranges[0]
            is_complete = last - first == record.size
            if is_complete:
                self._in_progress.pop(key, None)
            self._num_ranges += (0 if is_complete else len(record.ranges)) - num_ranges_before
            while self._num_ranges > MAX_RANGES:
                self._num_ranges -= len(self._in_progress.popitem(last=False)[1].ranges)
        if is_complete and passed_ranges and crc != (stated := record.read_stated_crc()) and stated:
            raise self._mismatch_error(record)

    def check_remaining(self, *, all_records: bool) -> None:
        """Read the rest of records in progress, such as the padding of a flat buffer or the header of an array, and
        compare them: if the rest is short, or all with ``all_records``. Raises as ``check_passed_bytes``, and as
        reading does."""
        for record in list(self._in_progress.values()):
            missing_bytes = record.size - sum(stop - start for start, stop, _ in record.ranges)
            if all_records or missing_bytes <= max(MAX_REMAINING_BYTES, record.size // 8):
                start = record.find_start()
                for lower, upper in list(record.iter_missing_ranges(start, start + record.size)):
                    for first in range(lower, upper, BLOCK_BYTES):
                        data = self.read_range(record.file, first, min(first + BLOCK_BYTES, upper))
                        self.check_passed_bytes(record, first, data)

    def _read_zip_columns(self, file: str) -> _ZipColumns | None:
        try:
            size = self.size_of_file(file)  # a file that is made as it is read has none, and is not made for this
            if self.read_range(file, 0, min(size, len(LOCAL_MAGIC))) != LOCAL_MAGIC:
                return None
            records = list(self._load_directory(file, size).records.values())
        except (FormatError, UnsafeError):
            return None
        return _ZipColumns(
            array("Q", [each.header_offset for each in records]),
            array("Q", [each.size for each in records]),
            array("I", [each.crc32 for each in records]),
        )

    def _load_directory(self, file: str, size: int) -> ZipDirectory:
        directory = read_directory(partial(self.read_range, file), size, file, tail_bytes=min(size, TAIL_BYTES))
        if directory is None:
            raise IncompleteError("it is not a zip", path=file)
        return directory

    def _record_name_and_start(self, file: str, number: int) -> tuple[str, int]:
        """Name and first byte of a record of a zip."""
        directory = self._load_directory(file, self.size_of_file(file))
        name = list(directory.records)[number]
        return name, directory.locate_payloads(partial(self.read_range, file), [name])[name][0]

    def _mismatch_error(self, record: RecordProgress) -> MalformedError:
        start = record.ranges[0][0]
        description = f"the item with elements at byte {start:,}"
        if self._zip_columns.get(record.file) is not None:
            description = f"the record {self._record_name_and_start(record.file, record.number)[0]} at byte {start:,}"
        return MalformedError(
            f"{description} does not have its stored CRC-32: the file is damaged; take it from a copy", path=record.file
        )
