"""Plans: from a manifest and a layout to tasks and the bytes each needs. Pure: no store, no format, no I/O.

A task fills one contiguous range of one output file. What it must read is found when it runs, by intersecting its range
with the shards of the tensors in it, so that a plan of a trillion parameters is its manifest and its layout and nothing
more. A hit stays a box until the bytes are placed: one weight sharded eight ways on its last axis is a few dozen hits
but tens of thousands of runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import sub

from ckpt_tools.core.boxes import is_contiguous, is_row_major
from ckpt_tools.core.casts import MAX_CAST_BYTES
from ckpt_tools.core.layout import MAX_CACHED_LAYOUTS, Crc32, FileLayout, Layout, LazyFile, Literal, Payload
from ckpt_tools.core.manifest import Manifest, StateKey, TensorEntry
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.part_rules import PartRules
from ckpt_tools.core.shards import Framing, ShardTable
from ckpt_tools.errors import MemoryBudgetError
from ckpt_tools.messages.wording import format_count, format_size
from ckpt_tools.planning.cuts import cut_at_stored_ranges
from ckpt_tools.planning.hits import FlatHit, Hit, find_hits
from ckpt_tools.planning.tasks import TransferTask

MAX_TASK_BYTES = 4 << 20
"""Measured on 2 cores, 4.49 GB: writes of 4 MiB 0.64 s, of 1 MiB 0.73 s, of 256 KiB 0.88 s; larger ones gain
nothing."""

MIN_TASK_BYTES = 64 << 10
"""Below this the work a task costs outweighs the bytes it moves."""

BASE_BYTES = 46 << 20
"""Resident memory of the interpreter with numpy and all that a conversion between local paths imports, before any
tensor byte: 36.2 MB of a conversion of four elements, 39.5 MB with a cast, and up to 46 MB where no module is compiled,
which is so in a folder that cannot be written to."""

BYTES_PER_SHARD = 100
"""Resident bytes of one row of a shard table and of what indexes it: 4.1 million rows of ZeRO-3 took 55 each, those of
matrices have two more columns."""

BYTES_PER_ITEM = 900
"""Memory of one item of a DCP while its index is read as objects: 1,035,264 took 735 bytes each."""

BYTES_PER_TENSOR = 4 << 10
"""Resident bytes of one tensor's entry and its table's columns."""

BYTES_PER_SEGMENT = 300
"""Resident bytes of a payload with its box, or of a literal without its data."""

COPIES_OF_LITERALS = 3
"""A literal, what it was made of, and what it was made from: an index of 1.2 million chunks has 97 MB and took 196."""

INFLATING_BYTES = 96 << 20
"""Memory of the streams of compressed items: the last four outputs of 12 MiB, and a window of at most 8 MiB each."""

REMOTE_BYTES = 60 << 20
"""Memory of a remote store's client and connections: botocore with eight of them takes 46 to 55 MB."""

MAX_SCRATCH_BYTES = 1 << 20
"""Block that is read to be placed strided, if only an item turns out to be stored in another order."""


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """Figures of a plan: its files with their bytes, the tensors whose elements these hold, tensor bytes read from
    the source as they are stored there, and bytes written."""

    files: Mapping[str, int]
    tensors: frozenset[StateKey]
    num_tasks: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversion, decided: what is read, what is written, in which pieces, and in how much memory."""

    manifest: Manifest
    layout: Layout
    task_bytes: int
    num_workers: int
    reading_bytes: int = 0
    """The most memory that reading the manifest took."""
    copy_rules: PartRules | None = None
    """If given, files are cut where stored ranges begin and end."""
    remote_bytes: int = 0
    """Memory for reaching a remote store."""
    is_strided: bool = True
    """True if a stored or written piece is not an interval of its tensor: blocks as large as tasks are read to place
    it."""

    def __post_init__(self) -> None:
        assert self.copy_rules is None or self.task_bytes >= self.copy_rules.min_copy_task_bytes, (
            "tasks too small to be cut anywhere"
        )

    def iter_tasks(self) -> Iterator[TransferTask]:
        """Every task, files in order, each file from its start."""
        for number, file in enumerate(self.layout.files):
            start = 0
            for part_number, stop in enumerate(self._task_ends(file.load_layout())):
                yield TransferTask(number, part_number, start, stop)
                start = stop

    def _task_ends(self, file: FileLayout) -> Iterable[int]:
        if self.copy_rules is not None:
            ends = _task_ends_at_stored_ranges(self.manifest, file, self.task_bytes, self.copy_rules)
            if ends is not None:
                return ends
        return _regular_task_ends(file, self.task_bytes)

    def compute_figures(self) -> PlanFigures:
        """Bytes moved, computed in one pass, because files made on demand are made once."""
        stored_bytes = {key: self._stored_bytes_per_element(entry) for key, entry in self.manifest.tensors.items()}
        files: dict[str, int] = {}
        tensors: set[StateKey] = set()
        num_tasks, bytes_read = 0, 0.0
        for file in self.layout.files:
            file_layout = file.load_layout()
            files[file.path] = file_layout.size_bytes
            tensors.update(segment.key for segment in file_layout.segments if isinstance(segment, Payload))
            num_tasks += sum(1 for _ in self._task_ends(file_layout))
            bytes_read += sum(
                num_bytes // segment.dtype.item_bytes * stored_bytes[segment.key]
                for segment, num_bytes in zip(
                    file_layout.segments, map(sub, file_layout.offsets[1:], file_layout.offsets), strict=True
                )
                if isinstance(segment, Payload)
            )
        return PlanFigures(files, frozenset(tensors), num_tasks, round(bytes_read), sum(files.values()))

    def _stored_bytes_per_element(self, entry: TensorEntry) -> float:
        """Bytes that are read for an element. A tensor is computed whole or not at all."""
        computed_tensor = self.manifest.computed.get(entry.shards.files[0]) if entry.shards.files else None
        return entry.shards.dtype.item_bytes * (1 if computed_tensor is None else computed_tensor.read_amplification)

    @property
    def scratch_bytes(self) -> int:
        """The most that a worker reads in one block to place it strided."""
        return _estimate_scratch_bytes(self.task_bytes, self.is_strided)

    @property
    def peak_memory_bytes(self) -> int:
        """The most resident memory the conversion will take, start-up included."""
        # Reading the manifest and moving the bytes do not overlap: the larger of the two counts, and not their sum.
        fixed_bytes = _estimate_fixed_bytes(self.manifest, self.layout, self.num_workers)
        largest_file = max((file.size_bytes for file in self.layout.files), default=0)
        worker_bytes = _estimate_worker_bytes(min(self.task_bytes, largest_file), self.is_strided)
        return self.remote_bytes + max(self.reading_bytes, fixed_bytes + self.num_workers * worker_bytes)


def make_plan(
    manifest: Manifest,
    layout: Layout,
    *,
    memory_bytes: int,
    num_workers: int,
    is_limit: bool = True,
    required_task_bytes: int = 0,
    reading_bytes: int = 0,
    remote_bytes: int = 0,
    copy_rules: PartRules | None = None,
) -> Plan:
    """The plan that fills ``layout`` from ``manifest`` within ``memory_bytes``; if these are not a limit, a checkpoint
    whose index alone needs more gets more.

    Tasks are as close to 4 MiB as fits, but at least ``required_task_bytes``, which the destination asks for. If
    ``copy_rules`` are given, tasks are also large enough for them; if that does not fit, they are given up.
    ``reading_bytes`` is the most that reading the checkpoint took; ``manifest`` may be a part of it.
    ``remote_bytes`` is what reaching the source or the destination takes.

    Raises:
        MemoryBudgetError: not even the smallest tasks fit.
    """
    fixed_bytes, is_strided = _estimate_fixed_bytes(manifest, layout, num_workers), _is_strided(manifest, layout)

    def needed_bytes(task_bytes: int) -> int:
        return remote_bytes + max(
            reading_bytes, fixed_bytes + num_workers * _estimate_worker_bytes(task_bytes, is_strided)
        )

    if copy_rules is not None and is_limit and needed_bytes(copy_rules.min_copy_task_bytes) > memory_bytes:
        copy_rules = None
    required_task_bytes = max(required_task_bytes, 0 if copy_rules is None else copy_rules.min_copy_task_bytes)
    smallest_task_bytes = max(MIN_TASK_BYTES, required_task_bytes)
    if not is_limit:
        # Tasks of full size: smaller ones would be a hundred million where there are terabytes to write.
        memory_bytes = max(memory_bytes, needed_bytes(max(MAX_TASK_BYTES, smallest_task_bytes)))
    if needed_bytes(smallest_task_bytes) > memory_bytes:
        raise MemoryBudgetError(
            f"this checkpoint needs at least {format_size(needed_bytes(smallest_task_bytes), at_least=True)} of memory "
            f"with {format_count(num_workers, 'worker')}, and the budget is {format_size(memory_bytes)}; raise "
            f"{format_option('memory')} or lower {format_option('workers')}"
        )
    fitting_sizes = (
        aligned for aligned in range(MAX_TASK_BYTES, 0, -MIN_TASK_BYTES) if needed_bytes(aligned) <= memory_bytes
    )
    task_bytes = max(next(fitting_sizes, MIN_TASK_BYTES), required_task_bytes)
    return Plan(manifest, layout, task_bytes, num_workers, reading_bytes, copy_rules, remote_bytes, is_strided)


def estimate_reading_bytes(manifest: Manifest) -> int:
    """The most resident memory that reading ``manifest`` took, start-up included."""
    items = sum(len(table) for table in _list_read_tables(manifest) if table.framing is not Framing.RAW)
    return _estimate_table_bytes(manifest) + items * (BYTES_PER_ITEM - BYTES_PER_SHARD)


def _estimate_worker_bytes(task_bytes: int, is_strided: bool) -> int:
    """A worker's output, the elements before a cast, and a block read to be placed strided."""
    return task_bytes + min(task_bytes, MAX_CAST_BYTES) + _estimate_scratch_bytes(task_bytes, is_strided)


def _estimate_scratch_bytes(task_bytes: int, is_strided: bool) -> int:
    return task_bytes if is_strided else min(task_bytes, MAX_SCRATCH_BYTES)


def _is_strided(manifest: Manifest, layout: Layout) -> bool:
    """True if a stored piece, or one of the layout, is not an interval of its tensor's row-major order."""
    lazy_files, ready_files = _split_lazy_files(layout)
    return any(entry.shards.flat_index is None for entry in manifest.tensors.values()) or any(
        not is_contiguous(segment.box, segment.shape)
        for file in (*ready_files, *(file.load_layout() for file in _representative_files(lazy_files)))
        for segment in file.segments
        if isinstance(segment, Payload) and not segment.is_whole
    )


def _split_lazy_files(layout: Layout) -> tuple[list[LazyFile], list[FileLayout]]:
    lazy_files = [file for file in layout.files if isinstance(file, LazyFile)]
    return lazy_files, [file.load_layout() for file in layout.files if not isinstance(file, LazyFile)]


def _representative_files(lazy_files: Sequence[LazyFile]) -> Sequence[LazyFile]:
    """Two that speak for all: those of the first and the last rank."""
    return (*lazy_files[:1], *lazy_files[-1:])


def _estimate_fixed_bytes(manifest: Manifest, layout: Layout, num_workers: int) -> int:
    computation_steps = manifest.computed_in_order
    computing_bytes = num_workers * sum(
        max(each.working_bytes for each in computed.values()) for computed in computation_steps
    )
    return _estimate_table_bytes(manifest) + _estimate_layout_bytes(layout) + manifest.decoding_bytes + computing_bytes


def _list_read_tables(manifest: Manifest) -> list[ShardTable]:
    """The shards of the tensors, and of what some of them are computed from."""
    operands = (entry for each in manifest.computed.values() for entry in each.operands)
    return [entry.shards for entry in (*manifest.tensors.values(), *operands)]


def _estimate_table_bytes(manifest: Manifest) -> int:
    tables = _list_read_tables(manifest)
    is_compressed = any(table.framing is Framing.ZSTD_ITEM for table in tables)
    stream_bytes = INFLATING_BYTES if is_compressed else 0
    return BASE_BYTES + stream_bytes + BYTES_PER_SHARD * sum(map(len, tables)) + BYTES_PER_TENSOR * len(tables)


def _estimate_layout_bytes(layout: Layout) -> int:
    """Files that are there, and as many of those made on demand as are kept."""
    lazy_files, ready_files = _split_lazy_files(layout)
    largest_file_bytes = max(
        (_estimate_file_bytes(file.load_layout()) for file in _representative_files(lazy_files)), default=0
    )
    lazy_bytes = min(MAX_CACHED_LAYOUTS, len(lazy_files)) * largest_file_bytes
    return lazy_bytes + sum(_estimate_file_bytes(file) for file in ready_files)


def _estimate_file_bytes(file: FileLayout) -> int:
    literals = {id(segment): len(segment.data) for segment in file.segments if isinstance(segment, Literal)}
    return BYTES_PER_SEGMENT * len(file.segments) + COPIES_OF_LITERALS * sum(literals.values())


def _regular_task_ends(file: FileLayout, task_bytes: int) -> Iterator[int]:
    """Ends of tasks of at most ``task_bytes`` that never split an element or a checksum; an empty file has one empty
    task."""
    size, stop = file.size_bytes, 0
    while True:
        stop = _floor_to_element(file, min(stop + task_bytes, size))
        yield stop
        if stop == size:
            return


def _task_ends_at_stored_ranges(
    manifest: Manifest, file: FileLayout, task_bytes: int, copy_rules: PartRules
) -> list[int] | None:
    """Ends of tasks so that most bytes lie in tasks that the destination copies; None if nothing can be copied, or if
    these tasks were too many for the destination."""
    stored_runs = list(_find_stored_runs(manifest, file, copy_rules.min_copy_bytes))
    if not stored_runs:
        return None
    part_ends = cut_at_stored_ranges(
        file.size_bytes,
        stored_runs,
        min_bytes=copy_rules.min_copy_bytes,
        max_bytes=task_bytes,
        floor_to_boundary=partial(_floor_to_element, file),
    )
    is_allowed = copy_rules.max_parts is None or len(part_ends) <= copy_rules.max_parts
    return part_ends if is_allowed else None


def _find_stored_runs(manifest: Manifest, file: FileLayout, min_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of a file, in order, of ``min_bytes`` or more, each one range of one stored file.

    There are none in a file that holds checksums: the bytes that a service copies never pass here. Whether an item of
    torch is stored in row-major order, as nearly all are, is found when it is read.
    """
    if any(isinstance(segment, Crc32) for segment in file.segments):
        return
    for offset, segment in zip(file.offsets, file.segments, strict=False):
        if isinstance(segment, Payload) and segment.num_bytes >= min_bytes:
            entry = manifest.tensors[segment.key]
            item_bytes, table = segment.dtype.item_bytes, entry.shards
            is_same = table.dtype is segment.dtype and not entry.plus
            if is_same and int(table.numels.max()) * item_bytes >= min_bytes:
                element_ranges = sorted(
                    _contiguous_ranges(find_hits(table, segment.box, segment.shape, 0, segment.box.numel))
                )
                yield from (
                    (offset + a * item_bytes, offset + b * item_bytes)
                    for a, b in element_ranges
                    if (b - a) * item_bytes >= min_bytes
                )


def _contiguous_ranges(hits: Sequence[Hit]) -> Iterator[tuple[int, int]]:
    """The elements of the destination that each hit fills, where they are contiguous there and in its piece."""
    for hit in hits:
        if isinstance(hit, FlatHit):
            yield hit.destination_start, hit.destination_start + hit.stop - hit.start
        elif is_row_major(hit.extents, hit.strides) and is_row_major(hit.extents, hit.destination_strides):
            yield hit.destination_start, hit.destination_start + prod(hit.extents)


def _floor_to_element(file: FileLayout, stop: int) -> int:
    """The last position at or before ``stop`` that splits no element and no checksum."""
    index = bisect_right(file.offsets, stop) - 1
    segment = file.segments[index] if index < len(file.segments) else None
    match segment:
        case Payload():
            return stop - (stop - file.offsets[index]) % segment.dtype.item_bytes
        case Crc32():
            return file.offsets[index]
        case _:
            return stop
