"""Each rule of the zip format on a real archive with one field changed, and frames of zstd."""

import io
import struct
import zipfile
from collections.abc import Callable
from itertools import product

import pytest
import zstandard

from ckpt_tools.core.layout import Literal
from ckpt_tools.errors import CkptError, MalformedError, UnsafeError, UnsupportedError
from ckpt_tools.serialization.zip_archive import (
    CENTRAL_MAGIC,
    END64_MAGIC,
    END_MAGIC,
    LOCATOR64_MAGIC,
    ZipDirectory,
    read_directory,
)
from ckpt_tools.serialization.zip_writer import ArchiveWriter
from ckpt_tools.serialization.zstd import decompress_all, decompress_frame
from tests.serialization.archives import central, materialised, patched, reader, zipped

pytestmark = pytest.mark.quick

Change = Callable[[bytes], bytes]

NAMES = ("a/one", "a/two", "a/three")
PLAIN = zipped({name: name.encode() * 3 for name in NAMES})


def directory(data: bytes, tail_bytes: int = 1 << 16) -> ZipDirectory:
    found = read_directory(reader(data), len(data), "x.zip", tail_bytes=tail_bytes)
    assert found is not None
    return found


def ours() -> bytes:
    """The same records as our writer lays them out, with zip64 end records and descriptors."""
    writer = ArchiveWriter("a", base=0)
    for name in NAMES:
        writer.add_record(name.removeprefix("a/"), [Literal(name.encode() * 3)])
    return materialised(writer.finish(), {})


@pytest.fixture(params=["zipfile", "ours"])
def data(request):
    return PLAIN if request.param == "zipfile" else ours()


def end(data: bytes) -> int:
    return data.rindex(END_MAGIC)


def refused(data: bytes, error: type[CkptError], reason: str) -> None:
    """Refused by the directory, or by the first record that is read."""
    with pytest.raises(error, match=reason) as caught:
        (found := directory(data)).locate_payloads(reader(data), found.records)
    assert caught.value.path == "x.zip"


@pytest.mark.parametrize("tail_bytes", [22, 100, 1 << 16])
def test_records_are_found_and_read(data, tail_bytes):
    found = directory(data, tail_bytes)
    ranges = found.locate_payloads(reader(data), found.records)
    assert list(found.records) == list(NAMES)
    for name, (start, stop) in ranges.items():
        assert data[start:stop] == name.encode() * 3 == found.read_record(reader(data), name)


@pytest.mark.parametrize("data", [b"", b"x", b"PK", b"x" * 100, PLAIN[:-1], PLAIN + b"x"])
def test_no_end_record_is_no_zip(data):
    assert read_directory(reader(data), len(data), "x", tail_bytes=1 << 16) is None


# Each rule of the format, on an archive with one field changed


def at_end(offset: int, form: str, *values: int) -> Change:
    return lambda data: patched(data, end(data) + offset, form, *values)


def in_directory(name: str, offset: int, form: str, *values: int) -> Change:
    return lambda data: patched(data, central(data, name) + offset, form, *values)


def moved(at: Callable[[bytes], int], form: str, by: int) -> Change:
    """A field by which something lies elsewhere."""
    return lambda data: patched(data, at(data), form, struct.unpack_from(form, data, at(data))[0] + by)


DAMAGE: list[tuple[str, Change, type[CkptError], str]] = [
    ("several disks", at_end(4, "<H", 1), UnsupportedError, "disks"),
    ("a directory on another disk", at_end(6, "<H", 1), UnsupportedError, "disks"),
    ("counts that disagree", at_end(8, "<H", 2), UnsupportedError, "disks"),
    *((f"a count of {n}", at_end(8, "<2H", n, n), MalformedError, "directory") for n in (0, 2, 4, 60_000)),
    *(
        (f"a directory elsewhere: {by} in {field}", moved(lambda data, field=field: end(data) + field, "<I", by),
         MalformedError, "directory|record")
        for by, field in product((-1, 1, 1 << 20), (12, 16))
    ),
    ("data before the archive", lambda data: b"#!/bin/sh" + data, MalformedError, "directory"),
    ("an entry without its magic", in_directory("a/one", 0, "<I", 0), MalformedError, "directory is damaged"),
    *(
        (f"an entry that is too long at {at}", in_directory("a/three", at, "<H", 60_000), MalformedError,
         "directory is damaged")
        for at in (28, 30, 32)
    ),
    ("a compressed record", in_directory("a/two", 10, "<H", 8), UnsupportedError, "a/two.*compressed"),
    ("an encrypted record", in_directory("a/two", 8, "<H", 1), UnsupportedError, "a/two.*encrypted"),
    ("a record on another disk", in_directory("a/two", 34, "<H", 1), UnsupportedError, "disks"),
    ("two sizes, packed", in_directory("a/two", 20, "<I", 7), MalformedError, "a/two.*two sizes"),
    ("two sizes, whole", in_directory("a/two", 24, "<I", 7), MalformedError, "a/two.*two sizes"),
    *(
        (f"a record of {n} that runs into the next", in_directory("a/one", 20, "<2I", n, n), MalformedError, "overlaps")
        for n in (100, 1000, 1 << 31)
    ),
    ("a record that runs into the directory", in_directory("a/three", 20, "<2I", 999, 999), MalformedError,
     "a/three.*overlaps"),
    ("two records at one place", in_directory("a/two", 42, "<I", 0), MalformedError, "overlaps"),
    ("a record that starts elsewhere", moved(lambda data: central(data, "a/two") + 42, "<I", -1), MalformedError,
     "overlaps|does not start|does not end"),
    ("a record behind the directory", lambda data: in_directory("a/three", 42, "<I", len(data) - 10)(data),
     MalformedError, "overlaps"),
    *(
        (f"a local header with another {what}", lambda data, at=at, value=value: patched(data, at, "<H", value),
         MalformedError, "does not start where")
        for what, at, value in (("magic", 0, 0), ("encryption", 6, 1), ("compression", 8, 8), ("name", 30, 0x5858),
                                ("length of its name", 26, 6))
    ),
    ("a local header that reaches into the next record", lambda data: patched(data, 28, "<H", 60_000), MalformedError,
     "overlaps"),
    ("a missing field of zip64", in_directory("a/one", 42, "<I", 0xFFFFFFFF), MalformedError, "zip64 field"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "reason"), [pytest.param(*row[1:], id=row[0]) for row in DAMAGE])
def test_one_changed_field_is_refused(data, change, error, reason):
    refused(change(data), error, reason)


@pytest.mark.parametrize("num_bytes", [-1, 1, 8, 16])
def test_bytes_that_a_longer_or_shorter_extra_field_moves(num_bytes):
    """No checksum covers a local header, and reading elements checks none."""
    data = ours()
    at = data.index(b"PK\3\4", 1) + 28
    (extra,) = struct.unpack_from("<H", data, at)
    refused(patched(data, at, "<H", extra + num_bytes), MalformedError, r"does not end where|overlaps")


def test_a_record_that_zipfile_compressed():
    refused(zipped({"a/x": b"x" * 999}, compress=True), UnsupportedError, "compressed")


def test_a_record_with_a_wrong_checksum(data):
    damaged = data.replace(b"a/onea/one", b"a/onea/onf")
    with pytest.raises(MalformedError, match=r"a/one.*checksum"):
        directory(damaged).read_record(reader(damaged), "a/one")


@pytest.mark.parametrize("name", ["../x", "/abs", "a/../../x", "a\\x", "a/..", "c\0x"])
def test_names_that_lead_out_of_the_archive(name):
    data = zipped({"X" * len(name): b"1"}).replace(b"X" * len(name), name.encode())
    refused(data, UnsafeError, "outside of it")


def test_names_that_are_no_text_or_come_twice():
    refused(zipped({"XX": b"1"}).replace(b"XX", b"\xff\xfe"), MalformedError, "UTF-8")
    data = zipped({"a/one": b"1", "a/two": b"2"})
    refused(data.replace(b"a/two", b"a/one"), MalformedError, "the same name")


def test_zip64_records_are_needed_where_the_end_says_so():
    refused(patched(PLAIN, end(PLAIN) + 16, "<I", 0xFFFFFFFF), MalformedError, "zip64")
    data = patched(ours(), end(ours()) + 16, "<I", 0xFFFFFFFF)
    assert list(directory(data).records) == list(NAMES)
    refused(data.replace(LOCATOR64_MAGIC, b"PK\x06\x09"), MalformedError, "zip64")
    refused(data.replace(END64_MAGIC, b"PK\x06\x09"), MalformedError, "zip64")
    locator = data.rindex(LOCATOR64_MAGIC)
    for at in (0, len(data), 1 << 62):
        refused(patched(data, locator + 8, "<Q", at), MalformedError, "zip64")


def test_a_huge_directory_is_refused_before_it_is_read():
    data = patched(ours(), end(ours()) + 8, "<2H2I", 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    at = data.rindex(END64_MAGIC)
    refused(patched(data, at + 24, "<2Q", 1 << 40, 1 << 40), MalformedError, "directory of")
    refused(patched(data, at + 40, "<2Q", 1 << 62, 0), MalformedError, "directory")


def test_zip64_fields_hold_only_what_is_needed_in_order():
    """An entry whose offset alone is wide, as torch writes it beyond 4 GiB."""
    data = zipped({"a/one": b"1"})
    at = central(data, "a/one")
    field = struct.pack("<2HQ", 1, 8, 0)
    wide = patched(patched(data, at + 42, "<I", 0xFFFFFFFF), at + 30, "<H", len(field))
    wide = wide[: at + 51] + field + wide[at + 51 :]
    (size,) = struct.unpack_from("<I", wide, end(wide) + 12)
    found = directory(patched(wide, end(wide) + 12, "<I", size + len(field)))
    assert found.records["a/one"].header_offset == 0


def test_many_records_are_written_and_read():
    """More than 65,535 take the zip64 end record."""
    writer = ArchiveWriter("a", base=0)
    for number in range(66_000):
        writer.add_record(str(number), [])
    data = b"".join(segment.data for segment in writer.finish() if isinstance(segment, Literal))
    assert len(directory(data).records) == 66_000 and CENTRAL_MAGIC in data


def test_python_reads_what_we_write():
    with zipfile.ZipFile(io.BytesIO(ours())) as archive:
        assert archive.testzip() is None and archive.namelist() == list(NAMES)


# What one library takes for the archive must not be another archive to the next


def test_a_second_end_record_in_the_comment():
    hidden = END_MAGIC + bytes(18)
    data = PLAIN[: end(PLAIN) + 20] + struct.pack("<H", len(hidden) + 4) + hidden + b"tail"
    refused(data, MalformedError, "more than one end record")


@pytest.mark.parametrize("offset", [12, 16], ids=["bytes", "start"])
def test_a_plain_end_record_that_says_something_else_than_the_wide_one(offset):
    data = bytearray(ours())
    data[end(data) + offset] ^= 1
    refused(bytes(data), MalformedError, "two end records")


# Items compressed with zstd: what all decompressors read alike, and what is refused

DATA = bytes(range(256)) * 1000
FRAME = zstandard.ZstdCompressor().compress(DATA)
SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"


def one_frame(data: bytes, limit_bytes: int = len(DATA)) -> bytes:
    return decompress_frame(lambda start, stop: data[start:stop], len(data), "a", limit_bytes=limit_bytes)


def test_one_frame_is_read_to_its_last_byte():
    assert one_frame(FRAME) == DATA


@pytest.mark.parametrize("data", [b"", FRAME[:-1], FRAME + b"\0", FRAME * 2, SKIPPABLE + FRAME, FRAME + SKIPPABLE])
def test_what_is_not_one_frame_is_refused(data):
    with pytest.raises(MalformedError, match="zstd"):
        one_frame(data, limit_bytes=2 * len(DATA))


def test_several_frames_are_read_as_one():
    assert (
        decompress_all(lambda start, stop: (FRAME * 2)[start:stop], 2 * len(FRAME), "a", limit_bytes=1 << 20)
        == DATA * 2
    )


def test_more_than_the_limit_is_refused():
    with pytest.raises(UnsupportedError, match="more than 255,999 bytes"):
        one_frame(FRAME, len(DATA) - 1)
    with pytest.raises(MalformedError, match="more than 255,999 bytes"):
        decompress_all(lambda start, stop: FRAME[start:stop], len(FRAME), "a", limit_bytes=len(DATA) - 1)
