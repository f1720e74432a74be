"""Zip archives whose records are stored, not deflated, so that a record is a byte range of the file.

Format facts are from PKWARE's APPNOTE 6.3.10. Only archives with certain ranges are accepted: one disk, a directory
that ends where the end record starts, records that do not overlap, no compression, no encryption, no name twice. The
directory at the end lists the records; only the local header of a record says where its bytes start, by an extra field
of its own.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType

from ckpt_tools.errors import MalformedError, UnsafeError, UnsupportedError

ReadRange = Callable[[int, int], bytes]
"""Bytes ``[start, stop)`` of an archive."""

MapReads = Callable[[Callable[[tuple[int, int]], bytes], Iterable[tuple[int, int]]], Iterator[bytes]]
"""As ``map``, or one that has several reads under way."""

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
CRC_OFFSET = struct.calcsize("<4s6H")
"""Of the checksum in ``CENTRAL``."""
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR64 = struct.Struct("<4sIQI")

LOCAL_MAGIC, CENTRAL_MAGIC, DESCRIPTOR_MAGIC = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
END_MAGIC, END64_MAGIC, LOCATOR64_MAGIC = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"

TORCHSCRIPT = (
    "it is a TorchScript archive, which holds a program; load it with torch.jit.load and save its state_dict()"
)
"""Message for TorchScript archives: their code is compressed, which the directory tells before any record does."""

ENCRYPTED, DESCRIPTOR_FOLLOWS, UTF8_NAME = 1 << 0, 1 << 3, 1 << 11
DESCRIPTOR_BYTES = (12, 16, 20, 24)
"""Data descriptors: with and without magic, with sizes of 4 and of 8 bytes."""

MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF
ZIP64_EXTRA = 0x0001

ALIGNMENT = 64
"""Default alignment of payloads in torch's writer, so that tensors can be mapped."""

STORED, DEFLATED = 0, 8
"""Methods of compression."""

MAX_DIRECTORY_BYTES = 1 << 28
"""About four million records."""

MAX_MERGED_BYTES = 1 << 20
"""Size of such a read: a million small tensors lie one after the other."""

MERGE_GAP_BYTES = 4096
"""Local headers closer than this are read at once; farther ones would drag tensor bytes along."""


def is_safe_name(name: str) -> bool:
    """Whether a record of this name stays inside the folder that it is unpacked to."""
    return not (any(each in name for each in "\0\\") or name.startswith("/") or ".." in name.split("/"))


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """An entry of the directory: ``size`` bytes with checksum ``crc32``, after a local header at ``header_offset``.

    ``deflated_size`` is the number of bytes in the archive if they are deflated, which ``read_directory`` allows only
    if it is told to.
    """

    name: str
    header_offset: int
    size: int
    crc32: int
    crc_at: int
    """Where the directory states ``crc32``."""
    deflated_size: int | None = None

    @property
    def stored_size(self) -> int:
        """Bytes between its local header and what follows it."""
        return self.size if self.deflated_size is None else self.deflated_size

    @property
    def method(self) -> int:
        return STORED if self.deflated_size is None else DEFLATED

    @property
    def states_checksum(self) -> bool:
        """False if every checksum is 0, as after torch.serialization.set_crc32_options(False)."""
        return self.crc32 != 0


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """The records of an archive in the order of the file, and the ``start`` of the directory itself."""

    records: Mapping[str, ZipRecord]
    start: int
    path: str

    def locate_payloads(
        self, read: ReadRange, names: Iterable[str], *, map_reads: MapReads = map
    ) -> dict[str, tuple[int, int]]:
        """The byte ranges of the records ``names``, from their local headers, read in as few pieces as make sense.

        Raises:
            MalformedError: a local header is not where it should be, or the record runs into the next.
        """
        sorted_records = sorted((self.records[name] for name in names), key=attrgetter("header_offset"))
        end_by_name = self._get_record_limits()
        ranges, groups = {}, list(_group_neighbours(sorted_records))
        pieces = [
            (group[0].header_offset, group[-1].header_offset + _get_min_header_bytes(group[-1])) for group in groups
        ]
        headers = map_reads(lambda piece: read(*piece), pieces)
        for group, (first_offset, _), data in zip(groups, pieces, headers, strict=True):
            for record in group:
                position = record.header_offset - first_offset
                start = record.header_offset + self._read_header_length(record, data, position, end_by_name)
                ranges[record.name] = (start, start + record.size)
        return ranges

    def read_record(self, read: ReadRange, name: str) -> bytes:
        """The bytes of a record, whose checksum must be right. Usually one read. Raises MalformedError."""
        record = self.records[name]
        # torch pads a header to 64 bytes through its extra field; a longer one costs a second read.
        stop_guess = min(record.header_offset + _get_min_header_bytes(record) + 128 + record.size, self.start)
        data = read(record.header_offset, stop_guess)
        offset = self._read_header_length(record, data, 0, self._get_record_limits())
        payload = data[offset : offset + record.size]
        if len(payload) < record.size:
            payload = read(record.header_offset + offset, record.header_offset + offset + record.size)
        if record.states_checksum and zlib.crc32(payload) != record.crc32:
            raise _make_malformed_error(self.path, f"record {name!r} is damaged: its checksum is wrong")
        return payload

    def _get_record_limits(self) -> dict[str, int]:
        return {record.name: stop for record, stop in _pair_with_limits(list(self.records.values()), self.start)}

    def _read_header_length(self, record: ZipRecord, data: bytes, position: int, limits: Mapping[str, int]) -> int:
        """Bytes of the record's local header, which stands at ``position`` of ``data``.

            | local header | name | extra field | bytes of the record | descriptor | next local header

        The header alone says how long its extra field is, and no checksum covers it: so the record must end before what
        follows it, and the bytes between must be as many as a descriptor has where the header announces one.
        """
        if len(data) - position < _get_min_header_bytes(record):
            raise _make_malformed_error(self.path, f"record {record.name!r} is truncated")
        magic, _, flags, method, *_, name_bytes, extra_bytes = LOCAL.unpack_from(data, position)
        name = data[position + LOCAL.size : position + LOCAL.size + name_bytes]
        if magic != LOCAL_MAGIC or method or flags & ENCRYPTED or name != record.name.encode():
            raise _make_malformed_error(self.path, f"record {record.name!r} does not start where the directory says")
        length = int(LOCAL.size + name_bytes + extra_bytes)
        descriptor_bytes = limits[record.name] - record.header_offset - length - record.size
        if descriptor_bytes < 0:
            raise _make_malformed_error(self.path, f"record {record.name!r} overlaps what follows it")
        if flags & DESCRIPTOR_FOLLOWS and descriptor_bytes not in DESCRIPTOR_BYTES:
            raise _make_malformed_error(self.path, f"record {record.name!r} does not end where its descriptor begins")
        return length


def _make_malformed_error(path: str, reason: str) -> MalformedError:
    return MalformedError(f"the zip archive is malformed: {reason}", path=path)


def _get_min_header_bytes(record: ZipRecord) -> int:
    return LOCAL.size + len(record.name.encode())


def _pair_with_limits(records: list[ZipRecord], directory_start: int) -> Iterator[tuple[ZipRecord, int]]:
    """Each record with its latest end: the next header, or the directory."""
    return zip(records, [*(record.header_offset for record in records[1:]), directory_start], strict=False)


def _group_neighbours(records: list[ZipRecord]) -> list[list[ZipRecord]]:
    groups: list[list[ZipRecord]] = []
    for record in records:
        is_near = groups and record.header_offset - groups[-1][-1].header_offset <= MERGE_GAP_BYTES
        if is_near and record.header_offset - groups[-1][0].header_offset <= MAX_MERGED_BYTES:
            groups[-1].append(record)
        else:
            groups.append([record])
    return groups


COMPRESSED_ADVICE = "torch.save never does this; pack it again without compression (zip -0)"
"""Message for a compressed record."""


def read_directory(
    read: ReadRange,
    size: int,
    path: str,
    *,
    tail_bytes: int,
    compressed_advice: str = COMPRESSED_ADVICE,
    deflated_suffix: str | None = None,
) -> ZipDirectory | None:
    """The directory of the archive of ``size`` bytes; None where it has no end record, so that it is not a zip.

    One read of ``tail_bytes`` serves archives of a few hundred records; larger ones take another.
    ``compressed_advice`` is the advice for a compressed record. Records whose names end in ``deflated_suffix`` may be
    deflated.

    Raises:
        MalformedError: a rule of the format is broken. UnsupportedError: compressed, encrypted, or on several disks.
        UnsafeError: a name leads out of the archive.
    """
    return _DirectoryReader(read, size, path, tail_bytes, compressed_advice, deflated_suffix).read_directory()


class _DirectoryReader:
    def __init__(
        self,
        read: ReadRange,
        size: int,
        path: str,
        tail_bytes: int,
        compressed_advice: str,
        deflated_suffix: str | None,
    ) -> None:
        self._read = read
        self._deflated_suffix = deflated_suffix
        self._compressed_advice = compressed_advice
        self._path = path
        self._size = size
        self._tail_start = max(0, size - tail_bytes)
        self._tail = read(self._tail_start, size)

    def read_directory(self) -> ZipDirectory | None:
        end = self._find_end_record()
        if end is None:
            return None
        start, stop, count = self._read_extent(end)
        if stop - start > MAX_DIRECTORY_BYTES or count * CENTRAL.size > stop - start:
            raise _make_malformed_error(self._path, f"a directory of {count:,} records in {stop - start:,} bytes")
        records = self._parse_records(self._read_bytes(start, stop), count, start)
        # Each record, with the smallest possible header, ends before the next starts.
        for record, limit in _pair_with_limits(records, start):
            if record.header_offset + _get_min_header_bytes(record) + record.stored_size > limit:
                raise _make_malformed_error(self._path, f"record {record.name!r} overlaps what follows it")
        return ZipDirectory(MappingProxyType({record.name: record for record in records}), start, self._path)

    def _read_bytes(self, start: int, stop: int) -> bytes:
        if not 0 <= start <= stop <= self._size:
            raise _make_malformed_error(self._path, "its directory is outside the file")
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : stop - self._tail_start]
        return self._read(start, stop)

    def _find_end_record(self) -> int | None:
        """Start of the end record: the last one whose comment reaches exactly to the end of the file.

        Another one after it would lie in its comment, and some libraries take the last that looks like one.
        """
        position, num_later_ends = self._tail.rfind(END_MAGIC), 0
        while position >= 0:
            is_whole = position + END.size <= len(self._tail)
            if is_whole and position + END.size + END.unpack_from(self._tail, position)[-1] == len(self._tail):
                if num_later_ends:
                    raise _make_malformed_error(self._path, "it has more than one end record of its directory")
                return self._tail_start + position
            num_later_ends += is_whole
            position = self._tail.rfind(END_MAGIC, 0, position + 3)
        return None

    def _read_extent(self, end: int) -> tuple[int, int, int]:
        """Start, stop and number of records of the directory."""
        # | records | directory | zip64 end record, locator | end record |
        # Both end records must agree where the fields of the plain one are not saturated (MAX16, MAX32). torch adds
        # those of zip64 also where no number needs them.
        end_fields = zip64_fields = END.unpack(self._read_bytes(end, end + END.size))[1:7]
        locator = self._read_bytes(max(0, end - LOCATOR64.size), end)
        if MAX16 in end_fields[2:4] or MAX32 in end_fields[4:6] or locator.startswith(LOCATOR64_MAGIC):
            end, zip64_fields = self._read_zip64_end(end, locator)
        for disk, first_disk, num_on_disk, count, *_ in (end_fields, zip64_fields):
            if disk or first_disk or num_on_disk != count:
                raise UnsupportedError("a zip archive on several disks cannot be read", path=self._path)
        if any(a not in (b, MAX16, MAX32) for a, b in zip(end_fields, zip64_fields, strict=True)):
            raise _make_malformed_error(self._path, "its two end records contradict each other about its directory")
        *_, count, num_bytes, start = zip64_fields
        stop = start + num_bytes
        is_end64 = stop + END64.size + LOCATOR64.size == end and self._read_bytes(stop, stop + 4) == END64_MAGIC
        if stop != end and not is_end64:
            raise _make_malformed_error(self._path, "its directory does not end where its end record starts")
        return start, stop, count

    def _read_zip64_end(self, end: int, locator: bytes) -> tuple[int, tuple[int, int, int, int, int, int]]:
        if len(locator) < LOCATOR64.size or not locator.startswith(LOCATOR64_MAGIC):
            raise _make_malformed_error(self._path, "its zip64 end record is missing")
        _, _, position, _ = LOCATOR64.unpack(locator)
        if position + END64.size + LOCATOR64.size != end:
            raise _make_malformed_error(self._path, "its zip64 end record is not before the end of its directory")
        fields = END64.unpack(self._read_bytes(position, position + END64.size))
        magic, _, _, _, disk, first_disk, num_on_disk, count, num_bytes, start = fields
        if magic != END64_MAGIC:
            raise _make_malformed_error(self._path, "its zip64 end record is missing")
        return position, (disk, first_disk, num_on_disk, count, num_bytes, start)

    def _parse_records(self, data: bytes, count: int, start: int) -> list[ZipRecord]:
        records, position = [], 0
        for _ in range(count):
            if position + CENTRAL.size > len(data):
                raise _make_malformed_error(self._path, "its directory ends early")
            record, position = self._parse_record(data, position, start)
            records.append(record)
        if position != len(data):
            raise _make_malformed_error(self._path, "its directory contains more than its records")
        if len({record.name for record in records}) < len(records):
            raise _make_malformed_error(self._path, "two records have the same name")
        return sorted(records, key=attrgetter("header_offset"))

    def _parse_record(self, data: bytes, position: int, start: int) -> tuple[ZipRecord, int]:
        fields = CENTRAL.unpack_from(data, position)
        magic, _, _, flags, method, _, _, crc32, packed_size, size, name_bytes, extra_bytes, comment_bytes = fields[:13]
        disk, _, _, offset = fields[13:]
        name_stop = position + CENTRAL.size + name_bytes
        extra_stop = name_stop + extra_bytes
        if magic != CENTRAL_MAGIC or extra_stop + comment_bytes > len(data):
            raise _make_malformed_error(self._path, "its directory is damaged")
        name = self._decode_name(data[position + CENTRAL.size : name_stop])
        size, packed_size, offset = self._apply_zip64_sizes(data[name_stop:extra_stop], size, packed_size, offset)
        may_deflate = self._deflated_suffix is not None and name.endswith(self._deflated_suffix)
        is_deflated = method == DEFLATED and may_deflate
        self._check_supported(name, flags, STORED if is_deflated else method, disk)
        if size != packed_size and not is_deflated:
            raise _make_malformed_error(self._path, f"record {name!r} is stored, yet has two sizes")
        crc_at = start + position + CRC_OFFSET
        record = ZipRecord(name, offset, size, crc32, crc_at, packed_size if is_deflated else None)
        return record, extra_stop + comment_bytes

    def _check_supported(self, name: str, flags: int, method: int, disk: int) -> None:
        problem = f"record {name!r} of the zip archive is encrypted" if flags & ENCRYPTED else ""
        if method and not problem:
            compressed = f"record {name!r} of the zip archive is compressed; {self._compressed_advice}"
            problem = TORCHSCRIPT if "/code/" in name else compressed
        if disk and not problem:
            problem = "a zip archive on several disks cannot be read"
        if problem:
            raise UnsupportedError(problem, path=self._path)

    def _decode_name(self, raw: bytes) -> str:
        try:
            name = raw.decode()
        except UnicodeDecodeError as error:
            raise _make_malformed_error(self._path, "a record has a name that is not UTF-8") from error
        if not name or not is_safe_name(name):
            raise UnsafeError(f"a record of the zip archive is named {name!r}, outside of it", path=self._path)
        return name

    def _apply_zip64_sizes(self, extra: bytes, size: int, packed_size: int, offset: int) -> tuple[int, int, int]:
        """The sizes and the offset; the zip64 extra field has those that are saturated, in order (APPNOTE 4.5.3)."""
        values = (size, packed_size, offset)
        if MAX32 not in values:
            return values
        zip64_numbers = self._parse_zip64_numbers(extra)
        if len(zip64_numbers) < values.count(MAX32):
            raise _make_malformed_error(self._path, "a zip64 field is missing")
        size, packed_size, offset = (zip64_numbers.pop(0) if value == MAX32 else value for value in values)
        return size, packed_size, offset

    def _parse_zip64_numbers(self, extra: bytes) -> list[int]:
        position = 0
        while position + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, position)
            body = extra[position + 4 : position + 4 + length]
            if kind == ZIP64_EXTRA:
                return list(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
            position += 4 + length
        return []
