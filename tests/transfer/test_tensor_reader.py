"""Elements out of files into place: any sharding, any wish, judged by numpy; items judged by torch, who wrote them."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, TensorEntry
from ckpt_tools.core.shards import ByteRange, Framing, Shard, ShardTable
from ckpt_tools.errors import IncompleteError, MalformedError, StoreError
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.testing import strategies
from ckpt_tools.testing.stored import arbitrary_elements, stored_tensors
from ckpt_tools.transfer.tensor_reader import MAX_GAP_BYTES, TensorReader
from tests.support.refusals import refusal_test

MIB = 1 << 20


def store_of(files: dict[str, bytes]) -> MemoryStore:
    return MemoryStore({name: bytearray(data) for name, data in files.items()})


def read(tensor_reader: TensorReader, entry: TensorEntry, box: Box, shape: Shape, start: int, stop: int) -> bytes:
    """The elements, read into the middle of a larger buffer, of which nothing else may change."""
    size = (stop - start) * entry.dtype.item_bytes
    buffer = bytearray(b"\xee" * (size + 6))
    tensor_reader.read(entry, box, shape, start, stop, memoryview(buffer)[3 : 3 + size])
    assert buffer[:3] == buffer[3 + size :] == b"\xee\xee\xee"
    return bytes(buffer[3 : 3 + size])


def read_all(tensor_reader: TensorReader, entry: TensorEntry) -> bytes:
    return read(tensor_reader, entry, Box.whole(entry.shape), entry.shape, 0, entry.numel)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


@st.composite
def wishes(draw: st.DrawFn, shape: Shape) -> tuple[Shape, Box, int, int]:
    """A geometry of the tensor, a box in it, and an interval of the box's elements."""
    geometry = draw(st.sampled_from([shape, (prod(shape),)]))
    box = draw(strategies.boxes(geometry))
    return geometry, box, *draw(strategies.intervals(box.numel))


@settings(max_examples=120, deadline=None)
@given(stored_tensors(), st.data(), st.integers(16, 200))
def test_any_interval_of_any_box_of_any_sharding(stored, data, scratch_bytes):
    geometry, box, start, stop = data.draw(wishes(stored.entry.shape))
    expected = stored.elements.reshape(geometry)[index(box)].reshape(-1)[start:stop].tobytes()
    tensor_reader = TensorReader(store_of(stored.files), scratch_bytes)
    assert read(tensor_reader, stored.entry, box, geometry, start, stop) == expected
    place = tensor_reader.find_stored_range(stored.entry, box, geometry, start, stop)
    assert place is None or stored.files[place.file][place.start : place.stop] == expected
    assert tensor_reader.bytes_read >= (0 if stored.entry.shards.strides is not None else len(expected))


def entry_of(array: NDArray[Any], dtype: DType, boxes: list[Box]) -> tuple[TensorEntry, dict[str, bytes]]:
    """An entry whose pieces are files of their own."""
    pieces = {f"{number}": array[index(box)].tobytes() for number, box in enumerate(boxes)}
    shards = [Shard(box, ByteRange(f"{n}", 0, len(pieces[f"{n}"]))) for n, box in enumerate(boxes)]
    table = ShardTable.build(array.shape, dtype, shards)
    return TensorEntry(array.shape, dtype, Kind.PARAMETER, table), pieces


@dataclass(slots=True)
class Recording(MemoryStore):
    """A store that remembers what was read of it."""

    reads: list[tuple[str, int, int]] = field(default_factory=list)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self.reads.append((path, start, len(buffer)))
        MemoryStore.read_into(self, path, start, buffer)


class TestReads:
    """How much is read, and in how many reads."""

    @staticmethod
    def recorded(
        shape: Shape, boxes: list[Box], wish: Box, *, scratch_bytes: int = MIB
    ) -> tuple[list[tuple[str, int, int]], int]:
        array = arbitrary_elements(shape, DType.FLOAT32, 0)
        entry, pieces = entry_of(array, DType.FLOAT32, boxes)
        store = Recording({name: bytearray(data) for name, data in pieces.items()})
        tensor_reader = TensorReader(store, scratch_bytes)
        assert read(tensor_reader, entry, wish, shape, 0, wish.numel) == array[index(wish)].tobytes()
        reads = [each for each in store.reads if each[1:] != (0, 4)]  # the first bytes: is it a zip?
        assert tensor_reader.bytes_read == sum(size for _, _, size in reads)
        return reads, tensor_reader.bytes_read

    def test_rows_of_rows_are_one_read_however_large(self):
        shape = (512, 1024)
        reads, _ = self.recorded(shape, [Box.whole(shape)], Box((3, 0), (500, 1024)), scratch_bytes=1 << 16)
        assert reads == [("0", 3 * 4096, 497 * 4096)]

    def test_columns_into_a_whole_are_read_by_the_piece(self):
        """Four ranks' columns: rows are read in one go and placed strided."""
        shape = (512, 1024)
        boxes = [Box((0, 256 * rank), (512, 256 * (rank + 1))) for rank in range(4)]
        reads, total = self.recorded(shape, boxes, Box.whole(shape))
        assert (len(reads), total) == (4, 512 * 4096)

    def test_no_read_of_strided_elements_is_larger_than_the_scratch(self):
        shape = (512, 1024)
        boxes = [Box((0, 512 * rank), (512, 512 * (rank + 1))) for rank in range(2)]
        reads, total = self.recorded(shape, boxes, Box.whole(shape), scratch_bytes=64 << 10)
        assert max(size for _, _, size in reads) <= 64 << 10
        assert (len(reads), total) == (32, 512 * 4096)

    def test_columns_of_a_whole_are_read_with_the_short_gaps_between_them(self):
        """An eighth of rows of 4 KiB: 512 reads of 512 bytes would take ten times as long as 2 MiB in two."""
        shape = (512, 1024)
        reads, total = self.recorded(shape, [Box.whole(shape)], Box((0, 128), (512, 256)))
        assert len(reads) <= 4
        assert total <= 512 * 4096

    def test_long_gaps_are_left_out_and_short_ones_within_are_not(self):
        gap = MAX_GAP_BYTES
        reads, total = self.recorded(
            (8, 2, gap), [Box.whole((8, 2, gap))], Box((0, 1, 0), (8, 2, 100)), scratch_bytes=16 * MIB
        )
        assert (len(reads), total) == (8, 8 * 400)
        shape = (4, 64, 16384)
        reads, total = self.recorded(shape, [Box.whole(shape)], Box((0, 0, 0), (4, 8, 9000)), scratch_bytes=16 * MIB)
        assert (len(reads), total) == (4, 4 * (7 * 16384 + 9000) * 4)

    def test_one_element_of_a_large_tensor_is_a_read_of_one(self):
        shape = (64, 64, 64)
        reads, _ = self.recorded(shape, [Box.whole(shape)], Box((5, 6, 7), (6, 7, 8)))
        assert reads == [("0", (5 * 4096 + 6 * 64 + 7) * 4, 4)]

    def test_an_expanded_tensor_is_read_once(self):
        """Strides of 0, as torch saves ``x.expand(...)``."""
        shard = Shard(Box.whole((300, 4)), ByteRange("f", 0, 4), (0, 1))
        entry = TensorEntry((300, 4), DType.UINT8, Kind.BUFFER, ShardTable.build((300, 4), DType.UINT8, [shard]))
        store = Recording({"f": bytearray(b"abcd")})
        assert read_all(TensorReader(store, 1 << 16), entry) == b"abcd" * 300
        of_first_bytes, *reads = store.reads
        assert reads == [of_first_bytes] == [("f", 0, 4)]


@dataclass(frozen=True, slots=True)
class Items:
    """DCP items, one after the other in a file, as torch writes them."""

    data: bytes
    ranges: list[tuple[int, int]]

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> Items:
        data, ranges = b"before", []
        for tensor in tensors:
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            ranges.append((len(data), len(data) + buffer.tell()))
            data += buffer.getvalue()
        return cls(data + b"after", ranges)

    def entry(self, shape: Shape, dtype: DType, boxes: list[Box]) -> TensorEntry:
        shards = [
            Shard(box, ByteRange("f", start, stop)) for box, (start, stop) in zip(boxes, self.ranges, strict=True)
        ]
        table = ShardTable.build(shape, dtype, shards, framing=Framing.TORCH_ITEM)
        return TensorEntry(shape, dtype, Kind.PARAMETER, table)

    def tensor_reader(self, scratch_bytes: int = MIB) -> TensorReader:
        return TensorReader(store_of({"f": self.data}), scratch_bytes)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "rows of a larger storage": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 2, 1))[2:-1],
    "view into a larger storage": lambda x: torch.nn.functional.pad(x, (1, 2, 3, 1, 1, 1))[1:-1, 3:-1, 1:-2],
    "every second element": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last)[0],
}


class TestItems:
    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32, DType.INT64, DType.COMPLEX128, DType.BOOL])
    def test_a_tensor_as_torch_saved_it(self, view, dtype):
        shape = (4, 3, 5)
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype.value))
        halves = [VIEWS[view](tensor[:3]), VIEWS[view](tensor[3:])]
        items = Items.of(*halves)
        entry = items.entry(shape, dtype, [Box((0, 0, 0), (3, 3, 5)), Box((3, 0, 0), (4, 3, 5))])
        expected = tensor.contiguous().view(torch.uint8 if dtype is DType.BOOL else tensor.dtype)
        bits = expected.reshape(-1).view(torch.uint8).numpy().tobytes()
        item = dtype.item_bytes
        place = items.tensor_reader().find_stored_range(entry, Box((7,), (30,)), (60,), 1, 20)
        assert place is None or items.data[place.start : place.stop] == bits[8 * item : 27 * item]
        for scratch_bytes in (16, MIB):
            tensor_reader = items.tensor_reader(scratch_bytes)
            assert read_all(tensor_reader, entry) == bits
            assert read(tensor_reader, entry, Box((7,), (60,)), (60,), 1, 50) == bits[8 * item : 57 * item]
            columns = tensor[1:, :, 1:4].contiguous().reshape(-1)
            assert (
                read(tensor_reader, entry, Box((1, 0, 1), (4, 3, 4)), shape, 0, 27)
                == columns.view(torch.uint8).numpy().tobytes()
            )

    def test_the_header_of_an_item_is_read_once(self):
        items = Items.of(torch.arange(100.0))
        entry, tensor_reader = items.entry((100,), DType.FLOAT32, [Box((0,), (100,))]), items.tensor_reader()
        read_all(tensor_reader, entry)
        before = tensor_reader.bytes_read
        read_all(tensor_reader, entry)
        assert tensor_reader.bytes_read - before == 400
        scalar = Items.of(torch.tensor(7, dtype=torch.int64))
        assert read_all(scalar.tensor_reader(), scalar.entry((), DType.INT64, [Box((), ())])) == (7).to_bytes(
            8, "little"
        )


def read_item(*tensors: torch.Tensor | bytes, shape: Shape = (5,)) -> Callable[[Path], object]:
    """Items that the index states to be equal parts of a tensor of that shape."""

    def read_them(_: Path) -> object:
        items = Items(tensors[0], [(0, 500)]) if isinstance(tensors[0], bytes) else Items.of(*tensors)  # type: ignore[arg-type]
        width = shape[-1] // len(tensors)
        boxes = [
            Box((*(0 for _ in shape[:-1]), n * width), (*shape[:-1], (n + 1) * width)) for n in range(len(tensors))
        ]
        return read_all(items.tensor_reader(), items.entry(shape, DType.FLOAT32, boxes))

    return read_them


ENTRY, PIECES = entry_of(arbitrary_elements((4, 6), DType.FLOAT32, 0), DType.FLOAT32, [Box.whole((4, 6))])


def read_short(wish: Box) -> object:
    return read(TensorReader(store_of({"0": PIECES["0"][:-1]}), 64), ENTRY, wish, (4, 6), 0, wish.numel)


class Failing(MemoryStore):
    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        raise StoreError("reading failed", path=path)


OTHER_DTYPE = r"holds \[5\] of int32 but its index states 5 elements of float32"
OTHER_SHAPE = r"holds \[6\] of float32 but its index states 5 elements of float32"
STRIDED = torch.zeros(4, 3).t()
SHORT = "it ends at byte 95"

test_a_refusal = refusal_test(
    ("an item of another dtype", read_item(torch.zeros(5, dtype=torch.int32)), MalformedError, OTHER_DTYPE),
    ("an item of another shape", read_item(torch.zeros(6)), MalformedError, OTHER_SHAPE),
    ("an empty item", read_item(torch.zeros(0)), MalformedError, r"holds \[0\]"),
    (
        "a strided item of another shape",
        read_item(STRIDED, STRIDED, shape=(2, 12)),
        MalformedError,
        r"holds \[3, 4\] but its index states \[2, 6\]",
    ),
    ("no item", read_item(b"x" * 500), MalformedError, "."),
    ("a missing file", lambda _: read_all(TensorReader(MemoryStore(), 64), ENTRY), IncompleteError, "missing"),
    ("a short file", lambda _: read_short(Box((0, 0), (4, 6))), IncompleteError, SHORT),
    ("columns of a short file", lambda _: read_short(Box((0, 5), (4, 6))), IncompleteError, SHORT),
    ("a failing disk", lambda _: read_all(TensorReader(Failing(), 64), ENTRY), StoreError, "reading failed"),
)


FLOATS = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT64: torch.float64,
    DType.FLOAT16: torch.float16,
}


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(FLOATS, key=str)), st.sampled_from(sorted(FLOATS, key=str)), st.data())
def test_a_cast_of_any_interval_is_torchs(stored, wanted, data):
    shape = data.draw(strategies.shapes(min_extent=1))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(FLOATS[stored])
    array = values.reshape(-1).view(torch.uint8).numpy().view(f"V{stored.item_bytes}").reshape(shape)
    entry, pieces = entry_of(array, stored, data.draw(strategies.box_shardings(shape)))
    geometry, box, start, stop = data.draw(wishes(shape))
    tensor_reader = TensorReader(store_of(pieces), data.draw(st.integers(16, 100)))
    cast = values.reshape(geometry)[index(box)].reshape(-1)[start:stop].to(FLOATS[wanted])
    expected = cast.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
    assert read(tensor_reader, entry.cast_to(wanted), box, geometry, start, stop) == expected


def test_threads_share_one():
    shape = (64, 96)
    array = arbitrary_elements(shape, DType.FLOAT32, 0)
    entry, pieces = entry_of(array, DType.FLOAT32, [Box((0, 0), (64, 40)), Box((0, 40), (64, 96))])
    tensor_reader, cast = TensorReader(store_of(pieces), 1 << 12), entry.cast_to(DType.BFLOAT16)
    alone = TensorReader(store_of(pieces), 1 << 12)
    expected, expected_cast = read_all(alone, entry), read_all(alone, cast)

    def work(number: int) -> bool:
        found = read_all(tensor_reader, cast if number % 2 else entry)
        return found == (expected_cast if number % 2 else expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(200)))
    assert tensor_reader.bytes_read == 100 * alone.bytes_read
