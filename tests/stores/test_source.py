"""A source: what a reader sees of a store."""

from __future__ import annotations

import pytest

from ckpt_tools.errors import IncompleteError, MalformedError, UnsafeError
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source

pytestmark = pytest.mark.quick


@pytest.fixture
def source():
    return Source.open(MemoryStore({"b": bytearray(b"01234"), "a": bytearray(b"")}))


def test_it_knows_names_and_sizes(source):
    assert dict(source.files) == {"a": 0, "b": 5}
    assert list(source.files) == ["a", "b"]
    assert source.size("b") == 5


def test_it_reads_ranges(source):
    assert (source.read("b", 1, 3), source.read("b", 5, 5), source.read("a", 0, 0)) == (b"12", b"", b"")


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (-1, 2), (3, 2), (6, 6)])
def test_a_range_beyond_the_file_is_incomplete(source, start, stop):
    with pytest.raises(IncompleteError, match="it ends at byte 5"):
        source.read("b", start, stop)


def test_a_missing_file_is_incomplete_and_one_outside_unsafe(source):
    with pytest.raises(IncompleteError, match="missing"):
        source.size("c")
    with pytest.raises(UnsafeError):
        source.size("../b")


def test_a_header_file_has_a_limit(source):
    assert source.read_all("b", limit_bytes=5) == b"01234"
    with pytest.raises(MalformedError, match="at most 4"):
        source.read_all("b", limit_bytes=4)
