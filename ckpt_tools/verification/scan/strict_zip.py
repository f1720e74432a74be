"""Zip archives with every byte accounted for: headers, records, descriptors, one directory, its end.

``serialization.zip_archive`` checks only what makes the ranges of records certain. A proof needs more: that a loader
which reads the archive in another way, from the start, past the directory, or by another end record, finds the same.
"""

from __future__ import annotations

import struct

from ckpt_tools.errors import MalformedError
from ckpt_tools.messages.wording import format_count
from ckpt_tools.serialization.zip_archive import (
    CENTRAL,
    DESCRIPTOR_FOLLOWS,
    DESCRIPTOR_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    LOCAL,
    LOCATOR64,
    LOCATOR64_MAGIC,
    MAX16,
    MAX32,
    UTF8_NAME,
    ZIP64_EXTRA,
    ReadRange,
    ZipDirectory,
    ZipRecord,
    read_directory,
)

ARRAY_MAGIC = b"\x93NUMPY"

TAIL_BYTES = 1 << 13
"""One read from the end that holds the directory of an item of a DCP; larger ones take another read."""

_PADDING_EXTRA = int.from_bytes(b"FB", "little")
"""The extra field by which torch aligns a record; what it holds is the letter Z."""


def read_strict_zip(
    read: ReadRange, size: int, path: str, *, deflated_suffix: str | None = None
) -> tuple[ZipDirectory, dict[str, tuple[int, int]]]:
    """The directory of an archive, and the range of every record, deflated or not.

    Raises:
        FormatError: a byte of it belongs to nothing, or the archive could be read in another way.
    """
    directory = read_directory(read, size, path, tail_bytes=TAIL_BYTES, deflated_suffix=deflated_suffix)
    if directory is None or not directory.records:
        raise MalformedError("the zip archive has no end, or no records", path=path)
    if not _has_one_directory(read, size):
        raise MalformedError("the zip archive has a second directory, which a loader may read instead", path=path)
    return directory, _ZipCoverageCheck(read, size, directory).find_record_ranges()


def _has_one_directory(read: ReadRange, size: int) -> bool:
    """True if the end of a zip leaves one directory to find: miniz takes the last end record whatever follows it, and
    the zip64 record also where the other needs none."""
    tail = read(max(0, size - END.size - LOCATOR64.size), size)
    end_offset = tail.rfind(END_MAGIC)
    if end_offset < 0 or end_offset + END.size != len(tail):
        return False
    *_, num_entries, num_bytes, directory_start, comment_bytes = END.unpack_from(tail, end_offset)
    return not comment_bytes and _does_zip64_end_agree(
        read, size, tail[:end_offset], ((num_entries, MAX16), (num_bytes, MAX32), (directory_start, MAX32))
    )


def _does_zip64_end_agree(
    read: ReadRange, size: int, before_end: bytes, stated_fields: tuple[tuple[int, int], ...]
) -> bool:
    """True if a zip64 end record, if there is one, agrees with the end record; a field of all ones leaves the value to
    it."""
    locator = before_end[-LOCATOR64.size :]
    if len(locator) < LOCATOR64.size or not locator.startswith(LOCATOR64_MAGIC):
        return True
    zip64_start = LOCATOR64.unpack(locator)[2]
    zip64_record = read(zip64_start, zip64_start + END64.size) if zip64_start + END64.size <= size else b""
    if not zip64_record.startswith(END64_MAGIC):
        return False
    field_pairs = zip(END64.unpack(zip64_record)[-3:], stated_fields, strict=True)
    return all(narrow in (number, most) for number, (narrow, most) in field_pairs)


class _ZipCoverageCheck:
    def __init__(self, read: ReadRange, size: int, directory: ZipDirectory) -> None:
        self._read = read
        self._size = size
        self._directory = directory

    def find_record_ranges(self) -> dict[str, tuple[int, int]]:
        """The range of each record's bytes. Raises MalformedError if a byte belongs to nothing, or has two meanings."""
        #     | header | data | descriptor? | header | data | ... | directory | zip64 end? | end |
        # `expected_start` moves from record to record, and must meet the directory.
        self._check_directory()
        ranges, expected_start = {}, 0
        for record in self._directory.records.values():
            if record.header_offset != expected_start:
                raise self._build_error(
                    f"{format_count(record.header_offset - expected_start, 'byte')} before the record {record.name!r} "
                    "outside any record"
                )
            start, has_descriptor = self._check_header(record)
            expected_start = start + record.stored_size
            ranges[record.name] = (start, expected_start)
            expected_start += self._check_descriptor(record, expected_start) if has_descriptor else 0
        if expected_start != self._directory.start:
            raise self._build_error(
                f"{format_count(self._directory.start - expected_start, 'byte')} before its directory outside any "
                f"record"
            )
        return ranges

    def _check_header(self, record: ZipRecord) -> tuple[int, bool]:
        header_start = record.header_offset
        name = record.name.encode()
        data = self._read(header_start, min(header_start + LOCAL.size + len(name) + 256, self._directory.start))
        if len(data) < LOCAL.size:
            raise self._build_error(f"record {record.name!r} is truncated")
        _, _, flags, method, _, _, crc32, compressed_size, size, name_bytes, extra_bytes = LOCAL.unpack_from(data)
        extra_at = LOCAL.size + name_bytes
        if not data.startswith(b"PK\x03\x04") or method != record.method or data[LOCAL.size : extra_at] != name:
            raise self._build_error(f"record {record.name!r} does not start where the directory says")
        if len(data) < extra_at + extra_bytes:
            data = self._read(header_start, min(header_start + extra_at + extra_bytes, self._directory.start))
        zip64_sizes = self._parse_extra_field(record, data[extra_at : extra_at + extra_bytes])
        has_descriptor = bool(flags & DESCRIPTOR_FOLLOWS)
        if flags & ~(DESCRIPTOR_FOLLOWS | UTF8_NAME) or not self._does_header_agree(
            record, (compressed_size, size), crc32, zip64_sizes, has_descriptor
        ):
            raise self._build_error(f"record {record.name!r} is described in two ways")
        start = header_start + extra_at + extra_bytes
        self._check_no_array(record, start, data[extra_at + extra_bytes :])
        return start, has_descriptor

    def _check_no_array(self, record: ZipRecord, start: int, bytes_read: bytes) -> None:
        """numpy.load reads a record that begins as an array, whatever its name is."""
        num_bytes = min(len(ARRAY_MAGIC), record.size)
        head = bytes_read[:num_bytes] if len(bytes_read) >= num_bytes else self._read(start, start + num_bytes)
        if head == ARRAY_MAGIC and not record.name.endswith(".npy"):
            raise self._build_error(f"record {record.name!r} may be taken for an array of numpy")

    def _does_header_agree(
        self, record: ZipRecord, sizes: tuple[int, int], crc32: int, zip64_sizes: tuple[int, ...], has_descriptor: bool
    ) -> bool:
        """True if the local header agrees with the directory, or leaves the values to the descriptor."""
        if MAX32 in sizes:
            # zip64: torch's writer leaves the packed size 0 here.
            return zip64_sizes[:1] == (record.size,) and zip64_sizes[1:2] in ((record.stored_size,), (0,))
        stated_sizes, absent_values = (record.stored_size, record.size), (0,) if has_descriptor else ()
        fits = all(size in (known, *absent_values) for size, known in zip(sizes, stated_sizes, strict=True))
        return fits and crc32 in (record.crc32, *absent_values)

    def _parse_extra_field(self, record: ZipRecord, data: bytes) -> tuple[int, ...]:
        """The numbers of a zip64 field. Raises MalformedError where anything but that and padding is there."""
        position, zip64_sizes = 0, tuple[int, ...]()
        while position < len(data):
            field_id, length = struct.unpack_from("<2H", data.ljust(position + 4, b"\0"), position)
            body = data[position + 4 : position + 4 + length]
            if len(body) != length or field_id not in (ZIP64_EXTRA, _PADDING_EXTRA):
                raise self._build_error(f"the header of record {record.name!r} holds something unknown")
            if field_id == _PADDING_EXTRA and body.strip(b"Z\0"):
                raise self._build_error(f"the padding of record {record.name!r} is not padding")
            if field_id == ZIP64_EXTRA:
                zip64_sizes = struct.unpack(f"<{length // 8}Q", body[: length // 8 * 8])
            position += 4 + length
        return zip64_sizes

    def _check_descriptor(self, record: ZipRecord, at: int) -> int:
        data = self._read(at, min(at + 24, self._directory.start))
        for layout in ("<4s3I", "<4sI2Q"):
            length = struct.calcsize(layout)
            if len(data) < length:
                continue
            magic, crc32, compressed_size, size = struct.unpack_from(layout, data)
            if magic == DESCRIPTOR_MAGIC and (crc32, compressed_size, size) == (
                record.crc32,
                record.stored_size,
                record.size,
            ):
                return length
        raise self._build_error(f"the descriptor of record {record.name!r} says something else than the directory")

    def _check_directory(self) -> None:
        """Raises MalformedError if the directory has comments, or extra fields but zip64: bytes that could hold
        something else."""
        start = self._directory.start
        data = self._read(start, self._size)
        position = 0
        for record in self._directory.records.values():
            _, _, _, flags, *_, name_bytes, extra_bytes, comment_bytes, _, _, _, _ = CENTRAL.unpack_from(data, position)
            extra_at = position + CENTRAL.size + name_bytes
            if comment_bytes or flags & ~(DESCRIPTOR_FOLLOWS | UTF8_NAME):
                raise self._build_error("its directory holds more than its records")
            self._parse_extra_field(record, data[extra_at : extra_at + extra_bytes])
            position = extra_at + extra_bytes
        if len(data) - position not in (END.size, END64.size + LOCATOR64.size + END.size):
            raise self._build_error("bytes behind its directory belong to nothing")

    def _build_error(self, reason: str) -> MalformedError:
        return MalformedError(f"the zip archive cannot be proved: {reason}", path=self._directory.path)
