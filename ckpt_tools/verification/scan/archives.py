"""Archives as loaders other than ours see them, also where they break a rule.

``containers.stored_zip`` refuses whatever leaves doubt; torch's miniz takes much of it: compressed records, wrong
checksums, names that differ between directory and record. What a scan is asked about may be made so.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tools.errors import CkptError
from ckpt_tools.serialization.range_stream import RangeStream
from ckpt_tools.serialization.zip_archive import (
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    LOCAL,
    LOCATOR64,
    LOCATOR64_MAGIC,
    MAX16,
    MAX32,
    ReadRange,
)

MAX_BROKEN_ZIP_BYTES = 1 << 26
"""Size of an archive that is read so: zipfile holds its whole directory."""

MAX_MEMBERS = 1 << 14

_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Member:
    """A record of an archive, as far as it was inflated."""

    name: str
    data: bytes


def is_zip_at_the_end(read: ReadRange, size: int) -> bool:
    """Whether a file that does not start as a zip ends as one, which is enough for Python's zipfile."""
    return read(max(0, size - END.size), size).startswith(END_MAGIC)


def has_one_directory(read: ReadRange, size: int) -> bool:
    """Whether the end of a zip leaves one directory to find: miniz takes the last end record whatever follows it, and
    the zip64 record also where the other needs none."""
    tail = read(max(0, size - END.size - LOCATOR64.size), size)
    end = tail.rfind(END_MAGIC)
    if end < 0 or end + END.size != len(tail):
        return False
    *_, count, num_bytes, start, comment_bytes = END.unpack_from(tail, end)
    return not comment_bytes and _agrees(read, size, tail[:end], ((count, MAX16), (num_bytes, MAX32), (start, MAX32)))


def _agrees(read: ReadRange, size: int, before_end: bytes, stated: tuple[tuple[int, int], ...]) -> bool:
    """Whether a zip64 end record, if there is one, states the same; all ones in the other leave it to this one."""
    locator = before_end[-LOCATOR64.size :]
    if len(locator) < LOCATOR64.size or not locator.startswith(LOCATOR64_MAGIC):
        return True
    at = LOCATOR64.unpack(locator)[2]
    wide = read(at, at + END64.size) if at + END64.size <= size else b""
    if not wide.startswith(END64_MAGIC):
        return False
    numbers = zip(END64.unpack(wide)[-3:], stated, strict=True)
    return all(narrow in (number, most) for number, (narrow, most) in numbers)


def members_of_any_zip(read: ReadRange, size: int, limit: int) -> tuple[list[Member], str | None]:
    """The records of a zip that Python can find, and why not more."""
    if size > MAX_BROKEN_ZIP_BYTES:
        return [], "the zip archive is damaged, and too large to search for its records"
    members: list[Member] = []
    try:
        with zipfile.ZipFile(io.BufferedReader(RangeStream(read, size))) as archive:
            members.extend(_inflated(read, size, archive.infolist(), limit))
    except CkptError:
        raise
    except Exception as error:
        # zipfile raises what struct, zlib, its decoders and itself find wrong.
        return members, f"the zip archive is broken: {' '.join(str(error).split())[:200] or type(error).__name__}"
    return members, None


def _inflated(read: ReadRange, size: int, records: list[zipfile.ZipInfo], left: int) -> Iterator[Member]:
    if len(records) > MAX_MEMBERS:
        raise zipfile.BadZipFile(f"{len(records):,} records")
    for record in records:
        data = _payload(read, size, record, left)
        left -= len(data)
        yield Member(record.filename, data)
        if left <= 0:
            raise zipfile.BadZipFile("its records inflate to more than is followed")


def _payload(read: ReadRange, size: int, record: zipfile.ZipInfo, limit: int) -> bytes:
    """Up to ``limit`` bytes of a record, whatever its local header and its checksum say."""
    at = record.header_offset
    *_, name_bytes, extra_bytes = LOCAL.unpack(read(at, min(at + LOCAL.size, size)))
    start = at + LOCAL.size + name_bytes + extra_bytes
    packed = read(min(start, size), min(start + min(record.compress_size, limit), size))
    if record.compress_type == zipfile.ZIP_STORED:
        return packed
    if record.compress_type != zipfile.ZIP_DEFLATED or record.flag_bits & 1:
        raise zipfile.BadZipFile(f"the record {record.filename!r} is encrypted or compressed in an unknown way")
    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, limit)


def tar_members(read: ReadRange, size: int) -> tuple[list[tuple[str, int, int]], str | None]:
    """Name, start and stop of the files of a tar, and why not more: torch wrote plain ones alone."""
    members: list[tuple[str, int, int]] = []
    at = 0
    while at + _BLOCK <= size and len(members) < MAX_MEMBERS:
        header = read(at, at + _BLOCK)
        if not header.strip(b"\0"):
            return members, None
        name, length, kind = _tar_header(header)
        if length is None or kind not in "0\x005" or at + _BLOCK + length > size:
            return members, f"the tar has a member {name!r} that torch would not have written"
        if kind != "5":
            members.append((name, at + _BLOCK, at + _BLOCK + length))
        at += _BLOCK + -(-length // _BLOCK) * _BLOCK
    return members, None if at >= size else "the tar has too many members, or does not end"


def _tar_header(header: bytes) -> tuple[str, int | None, str]:
    name = header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
    try:
        length: int | None = int(header[124:136].strip(b"\0 ") or b"0", 8)
    except ValueError:
        length = None
    return name, length, chr(header[156])
