"""Zip archives as torch's writer (miniz) writes them: segments whose bytes are known, except payloads and checksums.

The layout is that of ``zip_archive``, which reads it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tools.core.layout import Crc32, Literal, Segment
from ckpt_tools.serialization.zip_archive import (
    ALIGNMENT,
    CENTRAL,
    CENTRAL_MAGIC,
    CRC_OFFSET,
    DESCRIPTOR_FOLLOWS,
    DESCRIPTOR_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR64,
    LOCATOR64_MAGIC,
    MAX16,
    MAX32,
    UTF8_NAME,
    ZIP64_EXTRA,
)


class ArchiveWriter:
    """Segments of a stored zip as torch's writer (miniz) writes it; ``base`` is its start in the file.

    Payloads start at multiples of 64 bytes from the start of the archive, through an ``FB`` field of padding in the
    local header. Sizes and checksums follow a record in a descriptor, so that the header can be written before the
    bytes; the checksum of a payload is a ``Crc32`` there and in the directory.
    """

    def __init__(self, root: str, *, base: int) -> None:
        self._root = root
        self._base = base
        self._position = 0
        self._segments: list[Segment] = []
        self._literals: list[bytes] = []
        self._entries: list[_WrittenRecord] = []

    def add_record(self, name: str, content: Sequence[Segment]) -> None:
        """A record of ``content`` below the root folder, if there is one."""
        full_name = (f"{self._root}/{name}" if self._root else name).encode()
        size = sum(segment.num_bytes for segment in content)
        header = _pack_local_header(full_name, self._position, size)
        start = self._position + len(header)
        entry = _WrittenRecord(full_name, self._position, size, self._make_checksum(content, start, start + size))
        for segment in (Literal(header), *content, *_make_descriptor(entry)):
            self._append_segment(segment)
        self._entries.append(entry)

    def finish(self) -> list[Segment]:
        """All segments, the directory at the end."""
        start = self._position
        for entry in self._entries:
            for segment in _make_central_header(entry):
                self._append_segment(segment)
        self._append_segment(Literal(_pack_end_records(len(self._entries), start, self._position)))
        self._flush_literals()
        return self._segments

    def _make_checksum(self, content: Sequence[Segment], start: int, stop: int) -> Segment:
        crc32 = 0
        for segment in content:
            if not isinstance(segment, Literal):
                return Crc32(self._base + start, self._base + stop)
            crc32 = zlib.crc32(segment.data, crc32)
        return Literal(struct.pack("<I", crc32))

    def _append_segment(self, segment: Segment) -> None:
        """Append ``segment``; literals in a row become one, as writing takes a step for each segment."""
        self._position += segment.num_bytes
        if isinstance(segment, Literal):
            self._literals.append(segment.data)
        elif segment.num_bytes:
            self._flush_literals()
            self._segments.append(segment)

    def _flush_literals(self) -> None:
        if self._literals:
            self._segments.append(Literal(b"".join(self._literals)))
            self._literals = []


@dataclass(frozen=True, slots=True)
class _WrittenRecord:
    name: bytes
    offset: int
    size: int
    checksum: Segment


def _get_flags(size: int) -> int:
    """Flags of a record of ``size`` bytes; an empty one has no descriptor."""
    return UTF8_NAME | (DESCRIPTOR_FOLLOWS if size else 0)


def _pack_zip64_field(*numbers: int) -> bytes:
    return struct.pack(f"<2H{len(numbers)}Q", ZIP64_EXTRA, 8 * len(numbers), *numbers) if numbers else b""


def _pack_local_header(name: bytes, offset: int, size: int) -> bytes:
    """The header of a record at ``offset``, padded so that what follows is aligned; torch's writer (miniz) puts the
    offset into the local zip64 field too, and leaves the packed size 0."""
    zip64_field = _pack_zip64_field(*((size, 0) if size >= MAX32 else ()), *((offset,) if offset >= MAX32 else ()))
    padding = -(offset + LOCAL.size + len(name) + len(zip64_field) + 4) % ALIGNMENT
    extra = zip64_field + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return LOCAL.pack(LOCAL_MAGIC, 0, _get_flags(size), 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def _make_descriptor(entry: _WrittenRecord) -> list[Segment]:
    if not entry.size:
        return []
    # A number that does not fit 32 bits has a zip64 field in the local header, and then sizes of 64 bits here.
    sizes = struct.pack("<2Q" if max(entry.size, entry.offset) >= MAX32 else "<2I", entry.size, entry.size)
    return [Literal(DESCRIPTOR_MAGIC), entry.checksum, Literal(sizes)]


def _make_central_header(entry: _WrittenRecord) -> list[Segment]:
    is_large, is_far = entry.size >= MAX32, entry.offset >= MAX32
    extra = _pack_zip64_field(*((entry.size, entry.size) if is_large else ()), *((entry.offset,) if is_far else ()))
    size, offset = min(entry.size, MAX32), min(entry.offset, MAX32)
    # Magic, versions, flags, method, time, date, checksum, sizes, lengths of name, extra and comment, disk, attributes.
    head = (CENTRAL_MAGIC, 0, 0, _get_flags(entry.size), 0, 0, 0, 0)
    fields = CENTRAL.pack(*head, size, size, len(entry.name), len(extra), 0, 0, 0, 0, offset)
    return [Literal(fields[:CRC_OFFSET]), entry.checksum, Literal(fields[CRC_OFFSET + 4 :] + entry.name + extra)]


def _pack_end_records(count: int, start: int, stop: int) -> bytes:
    """The end records; torch's writer always adds those of zip64."""
    count16 = min(count, MAX16)
    end = END.pack(END_MAGIC, 0, 0, count16, count16, min(stop - start, MAX32), min(start, MAX32), 0)
    # Made on UNIX by version 3.0, needs version 4.5: what miniz says of itself.
    end64 = END64.pack(END64_MAGIC, END64.size - 12, 0x031E, 45, 0, 0, count, count, stop - start, start)
    return end64 + LOCATOR64.pack(LOCATOR64_MAGIC, 0, stop, 1) + end
