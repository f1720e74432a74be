"""Offsets follow from the order, and what cannot be computed cannot be built."""

import pytest

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import (
    MAX_CACHED_LAYOUTS,
    Crc32,
    FileLayout,
    FileLayoutCache,
    Layout,
    LazyFile,
    Literal,
    Padding,
    Payload,
    merge_literals,
)
from ckpt_tools.core.manifest import StateKey

pytestmark = pytest.mark.quick

KEY = StateKey("w")


def test_offsets_are_where_segments_start_and_the_size_is_last():
    payload = Payload(KEY, Box((1, 0), (3, 3)), (4, 3), DType.FLOAT32)
    file = FileLayout("f", (Literal(b"head"), Padding(4), payload, Padding(0), Crc32(8, 32)))
    assert file.offsets == (0, 4, 8, 32, 32, 36)
    assert file.size_bytes == 36
    assert (FileLayout("f", ()).offsets, FileLayout("f", ()).size_bytes) == ((0,), 0)
    assert Layout((FileLayout("a", (Padding(3),)), FileLayout("b", (Literal(b"12"),)))).size_bytes == 5


def test_a_payload_is_as_long_as_its_elements():
    for dtype in DType:
        assert Payload(KEY, Box((2,), (5,)), (6,), dtype).num_bytes == 3 * dtype.item_bytes
        assert Payload(KEY, Box((), ()), (), dtype).num_bytes == dtype.item_bytes
        assert Payload(KEY, Box((0, 1), (0, 2)), (0, 2), dtype).num_bytes == 0


@pytest.mark.parametrize(("box", "shape"), [(Box((0,), (3,)), (2,)), (Box((0, 0), (1, 1)), (1,)), (Box((), ()), (1,))])
def test_a_payload_lies_in_its_tensor(box, shape):
    with pytest.raises(ValueError, match="does not hold"):
        Payload(KEY, box, shape, DType.UINT8)


@pytest.mark.parametrize(
    "segments",
    [
        (Crc32(0, 4), Padding(4)),
        (Padding(4), Crc32(0, 5)),
        (Padding(4), Crc32(3, 2)),
        (Padding(4), Crc32(-1, 2)),
        (Padding(8), Crc32(0, 6), Crc32(5, 8)),
        (Padding(8), Crc32(0, 8), Crc32(0, 4)),
        (Padding(8), Crc32(0, 8), Crc32(8, 12)),
        (Padding(8), Crc32(4, 8), Padding(4), Crc32(6, 14)),
    ],
)
def test_a_checksum_of_what_is_not_yet_known_is_our_own_mistake(segments):
    with pytest.raises(AssertionError):
        FileLayout("f", segments)
    # One range may have its checksum in several places.
    FileLayout("f", (Padding(2), Padding(8), Crc32(2, 10), Padding(3), Crc32(2, 10), Crc32(14, 17), Crc32(5, 5)))


def test_neighbouring_literals_become_one():
    parts = [Literal(b"ab"), Literal(b"c"), Padding(2), Literal(b"d"), Crc32(0, 3), Literal(b"e"), Literal(b"")]
    assert merge_literals(parts) == [Literal(b"abc"), Padding(2), Literal(b"d"), Crc32(0, 3), Literal(b"e")]


def test_files_are_made_when_asked_for_and_few_are_kept():
    asked: list[int] = []

    def make(number: int) -> FileLayout:
        asked.append(number)
        return FileLayout(f"f{number}", (Padding(number),))

    cache = FileLayoutCache(make)
    layout = Layout([LazyFile(f"f{number}", number, number, cache) for number in range(100)])
    assert layout.size_bytes == sum(range(100)) and not asked
    assert [file.load_layout().offsets for file in layout.files] == [(0, number) for number in range(100)]
    assert layout.files[99].load_layout().segments == (Padding(99),) and asked == list(range(100))
    assert (
        layout.files[99 - MAX_CACHED_LAYOUTS].load_layout().path == f"f{99 - MAX_CACHED_LAYOUTS}" and len(asked) == 101
    )


def test_two_files_of_one_name_are_our_own_mistake():
    with pytest.raises(AssertionError, match="two files have the same name"):
        Layout((FileLayout("a", ()), FileLayout("a", (Padding(1),))))
