"""Tasks cover an output once, and hits find every element of it, judged by indexing numpy arrays."""

import time
from itertools import chain, pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Crc32, FileLayout, Layout, Literal, Padding, Payload, Segment
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.options import parse_size
from ckpt_tools.core.part_rules import PartRules
from ckpt_tools.core.shards import ByteRange, Framing, RowTable, Shard, ShardTable
from ckpt_tools.errors import MemoryBudgetError
from ckpt_tools.planning.hits import FlatHit, Hit, find_hits
from ckpt_tools.planning.plan import (
    MAX_SCRATCH_BYTES,
    MAX_TASK_BYTES,
    MIN_TASK_BYTES,
    REMOTE_BYTES,
    Plan,
    PlanFigures,
    make_plan,
)
from ckpt_tools.planning.tasks import FillBytes, FillZeros, GatherElements, TransferTask, iter_fill_steps
from ckpt_tools.testing import strategies
from ckpt_tools.testing.stored import StoredTensor, opaque, stored_tensors

pytestmark = pytest.mark.quick

many = settings(max_examples=40, deadline=None)
KEY = StateKey("w")
MIB = 1 << 20


@st.composite
def file_layouts(draw: st.DrawFn) -> FileLayout:
    """Segments of every kind and width in any order."""
    segments: list[Segment] = []
    offset = covered = 0
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["literal", "padding", "payload", "payload", "checksum"]))
        if kind == "literal":
            segments.append(Literal(draw(st.binary(max_size=20))))
        elif kind == "padding":
            segments.append(Padding(draw(st.integers(0, 20))))
        elif kind == "payload":
            shape = draw(strategies.shapes(max_ndim=2))
            segments.append(Payload(KEY, draw(strategies.boxes(shape)), shape, draw(strategies.dtypes())))
        else:
            start, stop = draw(strategies.intervals(offset - covered))
            segments.append(Crc32(covered + start, covered + stop))
            covered = offset + 4
        offset += segments[-1].num_bytes
    return FileLayout("f", tuple(segments))


def plan_of(files: tuple[FileLayout, ...], task_bytes: int) -> Plan:
    return Plan(Manifest("test", {}), Layout(files), task_bytes, num_workers=1)


class TestTasks:
    @many
    @given(file_layouts(), st.integers(16, 40))
    def test_they_cover_a_file_once_in_order_and_split_no_element(self, file, task_bytes):
        tasks = list(plan_of((file,), task_bytes).iter_tasks())
        assert [task.start for task in tasks] == [0, *(task.stop for task in tasks[:-1])]
        assert tasks[-1].stop == file.size_bytes
        assert all(task.num_bytes <= task_bytes for task in tasks)
        assert all(task.num_bytes > 0 for task in tasks) or len(tasks) == 1
        for task in tasks:
            for offset, segment in zip(file.offsets, file.segments, strict=False):
                if isinstance(segment, Payload) and offset < task.stop < offset + segment.num_bytes:
                    assert (task.stop - offset) % segment.dtype.item_bytes == 0

    def test_they_are_no_more_than_a_destination_takes(self):
        """Though each ends a little earlier, so as to split no element."""
        payload = Payload(KEY, Box.whole((1000,)), (1000,), DType.COMPLEX128)
        file = FileLayout("f", (Literal(b"1234567"), payload))
        task_bytes = PartRules(max_parts=10).required_task_bytes(file.size_bytes)
        assert len(list(plan_of((file,), task_bytes).iter_tasks())) <= 10

    @many
    @given(file_layouts(), st.integers(16, 40))
    def test_their_steps_are_the_segments(self, file, task_bytes):
        def described(segment: Segment, first: int, last: int) -> list[object]:
            match segment:
                case Literal(data):
                    return [("byte", value) for value in data[first:last]]
                case Payload():
                    return [("payload", id(segment), index) for index in range(first, last)]
                case _:
                    return [("byte", 0)] * (last - first)

        expected = [part for segment in file.segments for part in described(segment, 0, segment.num_bytes)]
        found: list[object] = []
        for task in plan_of((file,), task_bytes).iter_tasks():
            cursor = 0
            for step in iter_fill_steps(file, task):
                assert step.offset == cursor
                match step:
                    case FillBytes(_, data):
                        more: list[object] = [("byte", value) for value in data]
                    case FillZeros(_, num_bytes):
                        more = [("byte", 0)] * num_bytes
                    case GatherElements(_, payload, start, stop):
                        item = payload.dtype.item_bytes
                        more = described(payload, start * item, stop * item)
                cursor += len(more)
                found += more
            assert cursor == task.num_bytes
        assert found == expected

    def test_an_empty_file_has_one_empty_task_that_makes_it(self):
        plan = plan_of((FileLayout("a", ()), FileLayout("b", (Padding(0), Literal(b"")))), 16)
        assert list(plan.iter_tasks()) == [TransferTask(0, 0, 0, 0), TransferTask(1, 0, 0, 0)]
        assert plan.compute_figures() == PlanFigures(
            {"a": 0, "b": 0}, frozenset(), num_tasks=2, bytes_read=0, bytes_written=0
        )

    def test_an_odd_header_shifts_the_cuts_to_elements(self):
        payload = Payload(KEY, Box((0,), (8,)), (8,), DType.COMPLEX128)
        plan = plan_of((FileLayout("f", (Literal(b"abc"), payload)),), 40)
        assert [(task.start, task.stop) for task in plan.iter_tasks()] == [(0, 35), (35, 67), (67, 99), (99, 131)]


RULES = PartRules(min_copy_bytes=500, max_parts=100)


def stored_as(dtype: DType, *shards: tuple[Box, int]) -> TensorEntry:
    """A tensor of boxes, each in a file of its own whose elements begin at that byte."""
    shape = tuple(max(stops) for stops in zip(*(box.stop for box, _ in shards), strict=True))
    placed = [
        Shard(box, ByteRange(f"{number}", at, at + box.numel * dtype.item_bytes))
        for number, (box, at) in enumerate(shards)
    ]
    return TensorEntry(shape, dtype, Kind.PARAMETER, ShardTable.build(shape, dtype, placed))


def cut(entry: TensorEntry, *segments: Segment, rules: PartRules | None = RULES) -> list[int]:
    """Where the tasks of a file end of which ``entry`` is the one tensor."""
    manifest, layout = Manifest("test", {KEY: entry}), Layout((FileLayout("f", segments),))
    plan = Plan(manifest, layout, RULES.min_copy_task_bytes, num_workers=1, copy_rules=rules)
    tasks = list(plan.iter_tasks())
    assert plan.compute_figures().num_tasks == len(tasks)
    assert [task.start for task in tasks] == [0, *(task.stop for task in tasks[:-1])]
    return [task.stop for task in tasks]


def rows(*bounds: int, width: int = 5) -> list[Box]:
    return [Box((a, 0), (b, width)) for a, b in pairwise(bounds)]


def whole_of(entry: TensorEntry, dtype: DType | None = None) -> Payload:
    return Payload(KEY, Box.whole(entry.shape), entry.shape, dtype or entry.dtype)


def strided() -> TensorEntry:
    shard = Shard(Box((0, 0), (40, 30)), ByteRange("f", 0, 1200), (1, 40))
    return TensorEntry((40, 30), DType.UINT8, Kind.PARAMETER, ShardTable.build((40, 30), DType.UINT8, [shard]))


OF_ROWS = stored_as(DType.UINT8, *((box, 7) for box in rows(0, 120, 260, 380)))
OF_COLUMNS = stored_as(DType.UINT8, (Box((0, 0), (200, 5)), 0), (Box((0, 5), (200, 10)), 0))
LONGER = stored_as(DType.UINT8, *((box, 7) for box in rows(0, 240, 520, 760)))
AS_EVER: dict[str, tuple[TensorEntry, list[Segment]]] = {
    "columns of rows": (LONGER, [Payload(KEY, Box((0, 1), (760, 4)), LONGER.shape, LONGER.dtype)]),
    "a cast": (LONGER, [whole_of(LONGER, DType.BFLOAT16)]),
    "shards of columns": (OF_COLUMNS, [whole_of(OF_COLUMNS)]),
    "a strided piece": (strided(), [Literal(bytes(700)), whole_of(strided())]),
    "a file of checksums": (OF_ROWS, [whole_of(OF_ROWS), Crc32(0, 1900)]),
}


class TestCopies:
    """Tasks where the destination copies ranges of the source's files itself."""

    def test_they_end_where_shards_do(self):
        assert cut(OF_ROWS, whole_of(OF_ROWS)) == [600, 1300, 1900]
        assert cut(OF_ROWS, Literal(bytes(500)), whole_of(OF_ROWS)) == [500, 1100, 1800, 2400]
        assert cut(OF_ROWS, whole_of(OF_ROWS), rules=None) == [1128, 1900]

    def test_they_end_between_elements(self):
        """The head of 101 bytes needs 399 of the first shard; 463 are 28 elements and a part of one."""
        entry = stored_as(DType.COMPLEX128, *((box, 7) for box in rows(0, 13, 25)))
        assert cut(entry, Literal(bytes(101)), whole_of(entry)) == [101 + 28 * 16, 1141, 2101]

    @pytest.mark.parametrize("why", AS_EVER)
    def test_what_is_not_stored_as_it_is_written_is_cut_as_ever(self, why):
        entry, segments = AS_EVER[why]
        assert cut(entry, *segments) == cut(entry, *segments, rules=None)

    def test_rows_of_a_shard_of_columns_are_no_runs_but_whole_shards_are(self):
        boxes = [Box((0, 0), (120, 5)), Box((120, 0), (260, 3)), Box((120, 3), (260, 5)), Box((260, 0), (380, 5))]
        entry = stored_as(DType.UINT8, *((box, 0) for box in boxes))
        assert cut(entry, whole_of(entry)) == [600, 1300, 1900]

    def test_a_file_of_too_many_parts_is_cut_as_ever(self):
        assert cut(OF_ROWS, whole_of(OF_ROWS), rules=PartRules(min_copy_bytes=500, max_parts=3)) == [600, 1300, 1900]
        assert cut(OF_ROWS, whole_of(OF_ROWS), rules=PartRules(min_copy_bytes=500, max_parts=2)) == [1128, 1900]

    @many
    @given(stored_tensors(), st.data())
    def test_of_any_tensor_tasks_are_of_a_size_and_split_no_element(self, stored, data):
        geometry, box, _, _ = data.draw(wanted(stored.entry.shape))
        head, item = Literal(data.draw(st.binary(max_size=20))), stored.entry.dtype.item_bytes
        file = FileLayout("f", (head, Payload(KEY, box, geometry, stored.entry.dtype)))
        rules = PartRules(min_copy_bytes=data.draw(st.integers(1, 40)), max_parts=10**6)
        manifest = Manifest("test", {KEY: stored.entry})
        tasks = list(
            Plan(manifest, Layout((file,)), rules.min_copy_task_bytes, num_workers=1, copy_rules=rules).iter_tasks()
        )
        assert [task.start for task in tasks] == [0, *(task.stop for task in tasks[:-1])]
        assert tasks[-1].stop == file.size_bytes
        assert all(task.num_bytes <= rules.min_copy_task_bytes for task in tasks)
        assert all(task.num_bytes >= rules.min_copy_bytes for task in tasks[:-1])
        assert all((task.stop - len(head.data)) % item == 0 for task in tasks if task.stop > len(head.data))


def found_by(hit: Hit, files: dict[str, bytes]) -> list[tuple[int, Any]]:
    """The elements of a hit: position in the destination, and the element in its file."""
    memory = np.frombuffer(files[hit.at.file][hit.at.start : hit.at.stop], opaque(hit.dtype))
    if isinstance(hit, FlatHit):
        return [(hit.destination_start + i, memory[hit.start + i]) for i in range(hit.stop - hit.start)]
    return [
        (hit.destination_start + dot(index, hit.destination_strides), memory[hit.start + dot(index, hit.strides)])
        for index in np.ndindex(hit.extents)
    ]


def dot(index: Shape, strides: Shape) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=True))


@st.composite
def wanted(draw: st.DrawFn, shape: Shape) -> tuple[Shape, Box, int, int]:
    """A geometry of the tensor, a box in it, and an interval of the box's elements."""
    geometry = draw(st.sampled_from([shape, (prod(shape),)]))
    box = draw(strategies.boxes(geometry))
    return geometry, box, *draw(strategies.intervals(box.numel))


def expected_elements(stored: StoredTensor, geometry: Shape, box: Box, start: int, stop: int) -> NDArray[Any]:
    index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return stored.elements.reshape(geometry)[index].reshape(-1)[start:stop]


class TestHits:
    @settings(max_examples=80, deadline=None)
    @given(stored_tensors(), st.data())
    def test_they_find_every_element_once(self, stored, data):
        geometry, box, start, stop = data.draw(wanted(stored.entry.shape))
        each = [found_by(hit, stored.files) for hit in find_hits(stored.entry.shards, box, geometry, start, stop)]
        assert all(each), "no hit is empty"
        found = list(chain.from_iterable(each))
        assert sorted(place for place, _ in found) == list(range(stop - start))
        expected = expected_elements(stored, geometry, box, start, stop)
        assert all(element == expected[place] for place, element in found)

    def test_a_hit_stays_a_box_where_runs_would_be_many(self):
        shape, ways = (4096, 4096), 8
        width = shape[1] // ways
        shards = [
            Shard(Box((0, width * w), (shape[0], width * (w + 1))), ByteRange(f"{w}", 0, shape[0] * width * 2))
            for w in range(ways)
        ]
        table = ShardTable.build(shape, DType.BFLOAT16, shards)
        assert len(find_hits(table, Box.whole(shape), shape, 0, prod(shape))) == ways

    @staticmethod
    def intervals(count: int, num_bytes: int) -> RowTable:
        """So many shards, each of an interval of so many bytes, one after the other in a file."""
        starts = np.arange(count, dtype=np.int64)[:, None] * num_bytes
        at, file_ids = starts[:, 0], np.zeros(count, np.int64)
        shape, stops = (num_bytes * count,), starts + num_bytes
        return RowTable(shape, DType.UINT8, starts, stops, ("f",), file_ids, at, at + num_bytes)

    def test_an_interval_of_many_is_found_by_search(self):
        table = self.intervals(1 << 20, 4)
        first, last = find_hits(table, Box.whole(table.shape), table.shape, 4002, 4006)
        assert first == FlatHit(
            ByteRange("f", 4000, 4004), Framing.RAW, DType.UINT8, 4, start=2, stop=4, destination_start=0
        )
        assert last == FlatHit(
            ByteRange("f", 4004, 4008), Framing.RAW, DType.UINT8, 4, start=0, stop=2, destination_start=2
        )

    def test_of_a_parameter_that_many_ranks_share_only_the_near_intervals_are_unfolded(self):
        table = self.intervals(10_000, 64)

        def found(start: int, stop: int) -> tuple[list[int], float]:
            began = time.thread_time()
            each = find_hits(table, Box((0, 3), (10_000, 5)), (10_000, 64), start, stop)
            return [hit.at.start for hit in each], time.thread_time() - began

        near, seconds = min((found(8000, 8006) for _ in range(3)), key=lambda each: each[1])
        assert near == [64 * row for row in (4000, 4001, 4002)]
        assert seconds < found(0, 20_000)[1] / 20, "it takes a thousandth"


def manifest_of(num_tensors: int, shards_each: int = 1) -> Manifest:
    shards = [Shard(Box((i,), (i + 1,)), ByteRange("f", 4 * i, 4 * i + 4)) for i in range(shards_each)]
    table = ShardTable.build((shards_each,), DType.FLOAT32, shards)
    entry = TensorEntry((shards_each,), DType.FLOAT32, Kind.PARAMETER, table)
    return Manifest("test", {StateKey(f"w{i}"): entry for i in range(num_tensors)})


LARGE = Layout((FileLayout("f", (Padding(1 << 30),)),))


def planned(
    manifest: Manifest | None = None, layout: Layout = LARGE, memory_bytes: int = 1024 * MIB, **more: Any
) -> Plan:
    """For two workers, in a gigabyte, where no other is said."""
    usual = {"num_workers": 2, **more}
    return make_plan(manifest or manifest_of(1), layout, memory_bytes=memory_bytes, **usual)


class TestBudget:
    @pytest.mark.parametrize("budget", [48 * MIB, 64 * MIB, 128 * MIB, 1024 * MIB])
    @pytest.mark.parametrize("num_workers", [1, 2, 4])
    def test_the_projected_peak_keeps_to_it(self, budget, num_workers):
        plan = planned(manifest_of(10), memory_bytes=budget, num_workers=num_workers)
        assert plan.peak_memory_bytes <= budget
        assert MIN_TASK_BYTES <= plan.task_bytes <= MAX_TASK_BYTES
        assert plan.task_bytes % MIN_TASK_BYTES == 0

    def test_it_is_used_up_to_the_largest_useful_task(self):
        smaller, larger = planned(memory_bytes=50 * MIB), planned()
        assert smaller.task_bytes < larger.task_bytes == MAX_TASK_BYTES
        assert 50 * MIB - smaller.peak_memory_bytes < 2 * 3 * MIN_TASK_BYTES

    def test_one_that_cannot_be_met_is_refused_with_the_one_that_can(self):
        manifest = manifest_of(5, shards_each=1000)
        with pytest.raises(MemoryBudgetError, match=r"needs at least [\d.]+ MB .* memory=") as caught:
            planned(manifest, memory_bytes=1000)
        needed = parse_size(str(caught.value).partition("at least ")[2].partition(" of")[0])
        peak = planned(manifest, memory_bytes=needed).peak_memory_bytes
        assert needed - 10_000 <= peak <= needed
        with pytest.raises(MemoryBudgetError):
            planned(manifest, memory_bytes=peak - 1)

    def test_a_budget_that_is_no_limit_leaves_tasks_their_size(self):
        plan = planned(manifest_of(10), memory_bytes=MIB, is_limit=False)
        assert plan.task_bytes == MAX_TASK_BYTES and plan.peak_memory_bytes > MIB

    def test_one_without_room_for_tasks_of_copies_has_none_of_them(self):
        rules = PartRules(min_copy_bytes=5 * MIB, max_parts=10_000)
        larger, smaller, unlimited = (
            planned(None, Layout(()), size, is_limit=is_limit, copy_rules=rules)
            for size, is_limit in [(72 * MIB, True), (66 * MIB, True), (66 * MIB, False)]
        )
        assert larger.task_bytes == unlimited.task_bytes == rules.min_copy_task_bytes == 2 * (5 * MIB + 64)
        assert (larger.copy_rules, smaller.copy_rules, unlimited.copy_rules) == (rules, None, rules)
        assert smaller.task_bytes == MAX_TASK_BYTES

    def test_a_block_to_be_placed_strided_is_as_large_as_a_task_only_where_it_is_foreseen(self):
        at = [ByteRange("f", 8 * n, 8 * n + 8) for n in range(2)]
        columns = [Shard(Box((0, n), (2, n + 1)), at[n]) for n in range(2)]
        rows = [Shard(Box((n, 0), (n + 1, 2)), at[n]) for n in range(2)]

        def plan(shards: list[Shard], box: Box) -> Plan:
            entry = TensorEntry((2, 2), DType.FLOAT32, Kind.PARAMETER, ShardTable.build((2, 2), DType.FLOAT32, shards))
            file = FileLayout("f", (Payload(KEY, box, (2, 2), DType.FLOAT32), Padding(1 << 30)))
            return planned(Manifest("test", {KEY: entry}), Layout((file,)), num_workers=1)

        whole, column = Box((0, 0), (2, 2)), Box((0, 0), (2, 1))
        assert plan(rows, whole).scratch_bytes == MAX_SCRATCH_BYTES
        assert plan(columns, whole).scratch_bytes == plan(rows, column).scratch_bytes == MAX_TASK_BYTES
        more = plan(columns, whole).peak_memory_bytes - plan(rows, whole).peak_memory_bytes
        assert more == MAX_TASK_BYTES - MAX_SCRATCH_BYTES

    def test_what_counts(self):
        """Files smaller than a task take as much as they have; a store that is not local, shards and tensors count."""
        tiny = Layout((FileLayout("f", (Padding(1000),)),))
        empty, one, large = (planned(layout=layout).peak_memory_bytes for layout in (Layout(()), tiny, LARGE))
        assert empty < one < empty + 10_000 < large
        assert planned(remote_bytes=REMOTE_BYTES).peak_memory_bytes - large == REMOTE_BYTES
        manifests = (manifest_of(1), manifest_of(1, shards_each=1000), manifest_of(1000))
        peaks = [planned(manifest, Layout(())).peak_memory_bytes for manifest in manifests]
        assert peaks == sorted({*peaks})


def test_bytes_read_are_as_stored_and_bytes_written_as_laid_out():
    shard = Shard(Box((0,), (6,)), ByteRange("f", 0, 24))
    entry = TensorEntry((6,), DType.BFLOAT16, Kind.PARAMETER, ShardTable.build((6,), DType.FLOAT32, [shard]))
    file = FileLayout("f", (Literal(b"head"), Payload(KEY, Box((1,), (6,)), (6,), DType.BFLOAT16)))
    plan = planned(Manifest("test", {KEY: entry}), Layout((file,)), num_workers=1)
    assert plan.compute_figures() == PlanFigures(
        {"f": 14}, frozenset({KEY}), num_tasks=1, bytes_read=5 * 4, bytes_written=4 + 10
    )
