"""One test a rule of the zip format, each on a real archive with one field changed."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from itertools import pairwise

import pytest

from ckpt_tools.core.layout import Literal
from ckpt_tools.errors import CkptError, MalformedError, UnsafeError, UnsupportedError
from ckpt_tools.serialization.zip_archive import (
    CENTRAL_MAGIC,
    END64_MAGIC,
    END_MAGIC,
    LOCATOR64_MAGIC,
    ArchiveWriter,
    Directory,
    read_directory,
)
from tests.serialization.archives import central, materialised, patched, reader, zipped

pytestmark = pytest.mark.quick

NAMES = ("a/one", "a/two", "a/three")
PLAIN = zipped({name: name.encode() * 3 for name in NAMES})


def directory(data: bytes, tail_bytes: int = 1 << 16) -> Directory:
    found = read_directory(reader(data), len(data), "x.zip", tail_bytes=tail_bytes)
    assert found is not None
    return found


def ours() -> bytes:
    """The same records as our writer lays them out, with zip64 end records and descriptors."""
    writer = ArchiveWriter("a", base=0)
    for name in NAMES:
        writer.add(name.removeprefix("a/"), [Literal(name.encode() * 3)])
    return materialised(writer.finish(), {})


@pytest.fixture(params=["zipfile", "ours"])
def data(request):
    return PLAIN if request.param == "zipfile" else ours()


def refused(data: bytes, error: type[CkptError], reason: str) -> None:
    """Refused by the directory, or by the first record that is read."""
    with pytest.raises(error, match=reason) as caught:
        _locate_all(data)
    assert caught.value.path == "x.zip"


def _locate_all(data: bytes) -> None:
    found = directory(data)
    found.payload_ranges(reader(data), found.records)


@pytest.mark.parametrize("tail_bytes", [22, 100, 1 << 16])
def test_records_are_found_and_read(data, tail_bytes):
    found = directory(data, tail_bytes)
    ranges = found.payload_ranges(reader(data), found.records)
    assert list(found.records) == list(NAMES)
    for name, (start, stop) in ranges.items():
        assert data[start:stop] == name.encode() * 3 == found.read_record(reader(data), name)


@pytest.mark.parametrize("data", [b"", b"x", b"PK", b"x" * 100, PLAIN[:-1], PLAIN + b"x"])
def test_no_end_record_is_no_zip(data):
    assert read_directory(reader(data), len(data), "x", tail_bytes=1 << 16) is None


def end(data: bytes) -> int:
    return data.rindex(END_MAGIC)


@pytest.mark.parametrize("at", [4, 6])
def test_several_disks(data, at):
    refused(patched(data, end(data) + at, "<H", 1), UnsupportedError, "disks")


def test_counts_that_disagree(data):
    refused(patched(data, end(data) + 8, "<H", 2), UnsupportedError, "disks")


@pytest.mark.parametrize("count", [0, 2, 4, 60_000])
def test_a_wrong_count(data, count):
    refused(patched(data, end(data) + 8, "<2H", count, count), MalformedError, "directory")


@pytest.mark.parametrize("change", [-1, 1, 1 << 20])
@pytest.mark.parametrize("field", [12, 16])
def test_a_directory_that_lies_elsewhere(data, change, field):
    at = end(data) + field
    (value,) = struct.unpack_from("<I", data, at)
    refused(patched(data, at, "<I", value + change), MalformedError, "directory|record")


def test_data_before_the_archive(data):
    refused(b"#!/bin/sh" + data, MalformedError, "directory")


def test_a_directory_entry_without_its_magic(data):
    refused(patched(data, central(data, "a/one"), "<I", 0), MalformedError, "directory is damaged")


@pytest.mark.parametrize("at", [28, 30, 32])
def test_a_directory_entry_that_is_too_long(data, at):
    refused(patched(data, central(data, "a/three") + at, "<H", 60_000), MalformedError, "directory is damaged")


def test_a_compressed_record(data):
    refused(patched(data, central(data, "a/two") + 10, "<H", 8), UnsupportedError, r"a/two.*compressed")
    refused(zipped({"a/x": b"x" * 999}, compress=True), UnsupportedError, "compressed")


def test_an_encrypted_record(data):
    refused(patched(data, central(data, "a/two") + 8, "<H", 1), UnsupportedError, r"a/two.*encrypted")


def test_a_record_on_another_disk(data):
    refused(patched(data, central(data, "a/two") + 34, "<H", 1), UnsupportedError, "disks")


@pytest.mark.parametrize("at", [20, 24])
def test_two_sizes_of_a_stored_record(data, at):
    refused(patched(data, central(data, "a/two") + at, "<I", 7), MalformedError, r"a/two.*two sizes")


@pytest.mark.parametrize("size", [100, 1000, 1 << 31])
def test_a_record_that_runs_into_the_next(data, size):
    refused(
        patched(data, central(data, "a/one") + 20, "<2I", size, size),
        MalformedError,
        "overlaps",
    )


def test_a_record_that_runs_into_the_directory(data):
    refused(patched(data, central(data, "a/three") + 20, "<2I", 999, 999), MalformedError, r"a/three.*overlaps")


def test_two_records_at_one_place(data):
    at = central(data, "a/two") + 42
    refused(patched(data, at, "<I", 0), MalformedError, "overlaps")


def test_a_record_that_starts_elsewhere(data):
    at = central(data, "a/two") + 42
    (offset,) = struct.unpack_from("<I", data, at)
    refused(patched(data, at, "<I", offset - 1), MalformedError, "overlaps|does not start|does not end")


@pytest.mark.parametrize("num_bytes", [-1, 1, 8, 16])
def test_bytes_that_a_longer_or_shorter_extra_field_moves(num_bytes):
    """No checksum covers a local header, and reading elements checks none."""
    data = ours()
    at = data.index(b"PK\3\4", 1) + 28
    (extra,) = struct.unpack_from("<H", data, at)
    refused(patched(data, at, "<H", extra + num_bytes), MalformedError, r"does not end where|overlaps")


def test_a_record_that_starts_behind_the_directory(data):
    refused(patched(data, central(data, "a/three") + 42, "<I", len(data) - 10), MalformedError, "overlaps")


@pytest.mark.parametrize(("at", "value"), [(0, 0), (6, 1), (8, 8), (30, 0x5858)])
def test_a_local_header_that_says_otherwise(data, at, value):
    """Magic, encryption, compression, name."""
    refused(patched(data, at, "<H", value), MalformedError, "does not start where")


def test_a_local_header_with_a_longer_name(data):
    refused(patched(data, 26, "<H", 6), MalformedError, "does not start where")


def test_a_local_header_whose_extra_field_reaches_into_the_next_record(data):
    refused(patched(data, 28, "<H", 60_000), MalformedError, "overlaps")


def test_a_record_with_a_wrong_checksum(data):
    damaged = data.replace(b"a/onea/one", b"a/onea/onf")
    with pytest.raises(MalformedError, match=r"a/one.*checksum"):
        directory(damaged).read_record(reader(damaged), "a/one")


@pytest.mark.parametrize("name", ["../x", "/abs", "a/../../x", "a\\x", "a/..", "c\0x"])
def test_names_that_lead_out_of_the_archive(name):
    data = zipped({"X" * len(name): b"1"}).replace(b"X" * len(name), name.encode())
    refused(data, UnsafeError, "outside of it")


def test_a_name_that_is_no_text():
    refused(zipped({"XX": b"1"}).replace(b"XX", b"\xff\xfe"), MalformedError, "UTF-8")


def test_a_name_twice():
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


def test_a_zip64_field_that_is_missing(data):
    refused(patched(data, central(data, "a/one") + 42, "<I", 0xFFFFFFFF), MalformedError, "zip64 field")


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


def test_damaged_archives_are_read_or_refused():
    """Bytes changed and dropped anywhere: ranges inside the file, or one of our errors."""
    generator = random.Random(3)
    samples = [PLAIN, ours()]
    for _ in range(5_000):
        data = bytearray(generator.choice(samples))
        for _ in range(generator.randrange(1, 4)):
            at = generator.randrange(len(data))
            if generator.random() < 0.7:
                data[at] = generator.choice((0, 1, 0xFF, generator.randrange(256)))
            else:
                del data[at : at + generator.randrange(1, 9)]
        _read_or_refuse(bytes(data))


def _read_or_refuse(data: bytes) -> None:
    try:
        found = read_directory(reader(data), len(data), "x", tail_bytes=100)
        ranges = found.payload_ranges(reader(data), found.records) if found else {}
    except CkptError:
        return
    spans = sorted(ranges.values())
    assert all(0 <= start <= stop <= len(data) for start, stop in spans)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_many_records_are_written_and_read():
    """More than 65,535 take the zip64 end record."""
    writer = ArchiveWriter("a", base=0)
    for number in range(66_000):
        writer.add(str(number), [])
    data = b"".join(segment.data for segment in writer.finish() if isinstance(segment, Literal))
    assert len(directory(data).records) == 66_000 and CENTRAL_MAGIC in data


def test_python_reads_what_we_write():
    with zipfile.ZipFile(io.BytesIO(ours())) as archive:
        assert archive.testzip() is None and archive.namelist() == list(NAMES)


class TestTwoDirectories:
    """What one library takes for the archive must not be another archive to the next."""

    def test_a_second_end_record_in_the_comment(self):
        hidden = END_MAGIC + bytes(18)
        at = PLAIN.rfind(END_MAGIC)
        data = PLAIN[: at + 20] + struct.pack("<H", len(hidden) + 4) + hidden + b"tail"
        refused(data, MalformedError, "more than one end record")

    @pytest.mark.parametrize("offset", [12, 16], ids=["bytes", "start"])
    def test_a_plain_end_record_that_says_something_else_than_the_wide_one(self, offset):
        data = bytearray(ours())
        at = data.rfind(END_MAGIC)
        data[at + offset] ^= 1
        refused(bytes(data), MalformedError, "two end records")
