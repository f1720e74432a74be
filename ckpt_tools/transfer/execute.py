"""Run a plan: read, place, cast, checksum, write.

    tasks -> runner -> TaskWorker: copied by the destination's service, or else
                |        fill steps -> post checksums of parts -> fill in checksums -> write the part
                v                              |                        ^
            TaskReceipt -> journal             '----> ChecksumBoard ----'

A task assembles its range in one buffer, fills in the checksums that lie in it, and writes it with one call. It depends
only on its inputs and the checksums of earlier bytes, so it may run in any process, and twice. Tasks are handed out in
order, so that the earliest one that is not done never waits for a checksum. Once all tasks of a file are done the file
is finished. Publishing is the caller's.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from ckpt_tools.core.layout import Crc32, FileLayout
from ckpt_tools.core.part_number import PartNumber
from ckpt_tools.core.part_rules import PartRules
from ckpt_tools.core.shards import ByteRange
from ckpt_tools.planning.plan import Plan
from ckpt_tools.planning.shares import find_share_starts, iter_checksums_across_shares, iter_share
from ckpt_tools.planning.tasks import (
    CopyRange,
    FillBytes,
    FillStep,
    FillZeros,
    GatherElements,
    TransferTask,
    iter_fill_steps,
    join_stored_ranges,
)
from ckpt_tools.stores.destination import Destination
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.buffers import PAGE_BYTES, allocate_page_aligned
from ckpt_tools.transfer.crc_board import ChecksumBoard, LocalChecksumBoard, PartCrc
from ckpt_tools.transfer.runners import TaskRunner
from ckpt_tools.transfer.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True)
class AssignedTask:
    """A task, and the destination's handle of its file. If ``is_journaled``, its receipt needs a checksum. Checksums of
    bytes before ``first_known_byte`` of the file, which another part writes, are left zero."""

    task: TransferTask
    handle: str
    is_journaled: bool
    first_known_byte: int = 0


@dataclass(frozen=True, slots=True)
class TaskReceipt:
    """A task that is done."""

    task: TransferTask
    crc: int | None
    """The CRC-32 of its bytes, for the journal; None if it is not journaled."""
    parts: tuple[PartCrc, ...]
    """For each range with a checksum in the file, the CRC-32 of the bytes that the task has of it."""
    part_tag: str
    """The destination's own, to find the part again."""
    bytes_read: int
    bytes_copied: int = 0
    """Bytes that the destination copied itself. They never passed here, so that ``crc`` is 0."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Bytes that a run moved; ``bytes_written`` does not include what an earlier run had written."""

    bytes_read: int
    bytes_written: int
    bytes_copied: int = 0
    """Part of ``bytes_written`` that the destination copied itself."""


class RunHistory:
    """Progress of an earlier run of the same plan, and notes of this run for a later one. This class keeps none."""

    __slots__ = ()

    @property
    def file_handles(self) -> Mapping[int, str]:
        """Files begun, by number."""
        return {}

    @property
    def is_journaling(self) -> bool:
        """True if the receipts of tasks that start now are recorded."""
        return False

    def iter_receipts(self) -> Iterable[TaskReceipt]:
        """Tasks that are done, each checked before it is given."""
        return ()

    def note_file_begun(self, file: int, handle: str) -> None:
        """Note that a file was begun."""

    def note_task_done(self, receipt: TaskReceipt) -> None:
        """Note that a task is done."""


def execute_plan(
    plan: Plan,
    source: Store,
    target: Destination,
    *,
    runner: TaskRunner,
    on_bytes: Callable[[int], None],
    history: RunHistory | None = None,
    board: ChecksumBoard | None = None,
    part: PartNumber | None = None,
    finished_parts: int = 1,
) -> TransferResult:
    """Fill every file of the plan's layout in ``target``; with ``part``, the share of it that this part has.

    ``on_bytes`` is called with the bytes of each task when they are written, or found written by an earlier run.
    ``board`` is shared by all workers of the runner; it has to be given if they are not threads of this process.
    ``finished_parts`` is how many parts have written what ``history`` has.

    Raises:
        CkptError: reading or writing failed; the target then holds unfinished files.
    """
    board, history = board or LocalChecksumBoard(), history or RunHistory()
    share_starts = find_share_starts(plan, finished_parts) if finished_parts > 1 and target.splits_files else {}
    output_files = _OutputFiles(plan, target, board, history, part, share_starts)
    worker = TaskWorker(plan, TensorReader(source, plan.scratch_bytes), target, board)
    bytes_read = bytes_written = bytes_copied = 0
    try:
        is_resumed = False
        for receipt in history.iter_receipts():
            is_resumed = True
            output_files.recover_task(receipt)
            on_bytes(receipt.task.num_bytes)
        # Closed before the files are: a task still under way would write into whatever has its descriptor by then.
        with closing(runner.run(worker, output_files.iter_pending_tasks())) as receipts:
            for receipt in receipts:
                output_files.record_task(receipt)
                bytes_read += receipt.bytes_read
                bytes_written += receipt.task.num_bytes
                bytes_copied += receipt.bytes_copied
                on_bytes(receipt.task.num_bytes)
        if part is None:
            assert output_files.num_finished == len(plan.layout.files), "every task was run"
        else:
            output_files.sync_partial_files()
        # Another run may have written almost all of a record with a wrong checksum.
        worker.tensor_reader.check_remaining_records(all_records=is_resumed or part is not None)
    finally:
        target.close_open_files()
    return TransferResult(bytes_read, bytes_written, bytes_copied)


@dataclass(slots=True)
class TaskWorker:
    """Runs a task. It may be sent to another process, where it starts with no buffer and no open file."""

    plan: Plan
    tensor_reader: TensorReader
    target: Destination
    board: ChecksumBoard
    _buffers: threading.local = field(default_factory=threading.local, repr=False)
    _covered_ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict, repr=False)
    _part_rules: PartRules = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._part_rules = self.target.part_rules

    def __call__(self, job: AssignedTask) -> TaskReceipt:
        try:
            return self._try_copy_on_server(job) or self._assemble_and_write(job)
        except BaseException as error:
            self.board.fail_waiting_workers(error)
            self.target.fail_waiting_writers(error)
            raise

    def _try_copy_on_server(self, job: AssignedTask) -> TaskReceipt | None:
        """Have the destination's service copy the bytes, if they are one range of one of its own files and no checksum
        covers them; else return None."""
        task = job.task
        if self._part_rules.service is None:
            return None
        file = self.plan.layout.files[task.file_index].load_layout()
        if any(_iter_overlaps(self._checksum_ranges(task.file_index, file), task)):
            return None
        bytes_read_before = self.tensor_reader.bytes_read_here
        stored_range = self._find_single_stored_range(list(iter_fill_steps(file, task)))
        if stored_range is None:
            return None
        source = self.tensor_reader.store.find_copy_source(stored_range.file)
        if source is None or not self._part_rules.allows_copy(source.service, task.num_bytes):
            return None
        part_tag = self.target.copy_part(
            file.path, job.handle, task.part_number, source, stored_range.start, stored_range.stop
        )
        bytes_read = self.tensor_reader.bytes_read_here - bytes_read_before
        return TaskReceipt(task, 0 if job.is_journaled else None, (), part_tag, bytes_read, task.num_bytes)

    def _find_single_stored_range(self, fill_steps: list[FillStep]) -> ByteRange | None:
        match fill_steps:
            case [GatherElements(_, payload, start, stop)]:
                entry = self.plan.manifest.tensors[payload.key].cast_to(payload.dtype)
                return self.tensor_reader.find_stored_range(entry, payload.box, payload.shape, start, stop)
        return None

    def _assemble_and_write(self, job: AssignedTask) -> TaskReceipt:
        task, bytes_read_before = job.task, self.tensor_reader.bytes_read_here
        file = self.plan.layout.files[task.file_index].load_layout()
        # As aligned as in the file, so that whole blocks can be written directly.
        buffer = self._output_buffer()[task.start % PAGE_BYTES :][: task.num_bytes]
        for step in join_stored_ranges(iter_fill_steps(file, task), self.plan.manifest.tensors):
            self._run_fill_step(step, buffer)
        parts = tuple(
            PartCrc(covers, start, stop, isal_zlib.crc32(buffer[start - task.start : stop - task.start].data))
            for covers, start, stop in _iter_overlaps(self._checksum_ranges(task.file_index, file), task)
        )
        self._fill_in_checksums(file, job, parts, buffer)
        part_tag = self.target.write_part(file.path, job.handle, task.part_number, task.start, buffer.data)
        crc = _crc_of_task(parts, task, buffer) if job.is_journaled else None
        return TaskReceipt(task, crc, parts, part_tag, self.tensor_reader.bytes_read_here - bytes_read_before)

    def _run_fill_step(self, step: FillStep, buffer: NDArray[np.uint8]) -> None:
        match step:
            case FillBytes(offset, data):
                buffer[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
            case FillZeros(offset, num_bytes):
                buffer[offset : offset + num_bytes] = 0
            case CopyRange(offset, at):
                self.tensor_reader.read_range(at, buffer[offset : offset + at.stop - at.start].data)
            case GatherElements(offset, payload, start, stop):
                entry = self.plan.manifest.tensors[payload.key].cast_to(payload.dtype)
                destination = buffer[offset : offset + (stop - start) * payload.dtype.item_bytes]
                self.tensor_reader.read(entry, payload.box, payload.shape, start, stop, destination.data)

    def _fill_in_checksums(
        self, file: FileLayout, job: AssignedTask, parts: tuple[PartCrc, ...], buffer: NDArray[np.uint8]
    ) -> None:
        """Fill in the checksums that lie in the task."""
        # Posted before anything is waited for: other workers may wait for these.
        task = job.task
        self.board.post_checksums(task.file_index, parts)
        for offset, segment in _iter_checksums(file, task):
            covers, start = (segment.start, segment.stop), offset - task.start
            if segment.start < min(job.first_known_byte, segment.stop):
                continue
            crc = self.board.wait_for_checksum(task.file_index, covers) if segment.start < segment.stop else 0
            buffer[start : start + segment.num_bytes] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)

    def _checksum_ranges(self, file_index: int, file: FileLayout) -> list[tuple[int, int]]:
        """The ranges of a file that checksums cover, sorted and without duplicates."""
        ranges_in_order = self._covered_ranges.get(file_index)
        if ranges_in_order is None:
            if len(self._covered_ranges) > 64:
                self._covered_ranges.clear()
            ranges = {(each.start, each.stop) for each in file.segments if isinstance(each, Crc32)}
            ranges_in_order = self._covered_ranges[file_index] = sorted(pair for pair in ranges if pair[0] < pair[1])
        return ranges_in_order

    def _output_buffer(self) -> NDArray[np.uint8]:
        if not hasattr(self._buffers, "output"):
            self._buffers.output = allocate_page_aligned(self.plan.task_bytes + PAGE_BYTES)
        output: NDArray[np.uint8] = self._buffers.output
        return output

    def __reduce__(self) -> tuple[object, ...]:
        return TaskWorker, (self.plan, self.tensor_reader, self.target, self.board)


@dataclass(slots=True)
class _OutputFiles:
    """The files being written: begun when their first task is handed out, finished when their last is done."""

    plan: Plan
    target: Destination
    board: ChecksumBoard
    history: RunHistory
    part: PartNumber | None
    share_starts: Mapping[int, Sequence[int]]
    """Where the parts begin that wrote the files."""
    num_finished: int = 0
    _handles: dict[int, str] = field(default_factory=dict)
    _bytes_missing: dict[int, int] = field(default_factory=dict)
    _part_tags: dict[int, dict[int, str]] = field(default_factory=dict)
    _recovered: set[tuple[int, int]] = field(default_factory=set)

    def iter_pending_tasks(self) -> Iterator[AssignedTask]:
        """Tasks that are not done, in order; runners take one at a time. Raises StoreError where they do not fit."""
        known_handles = self.history.file_handles
        if self.part is None:  # the files of a part may be there, made by another part
            new_files = (file for number, file in enumerate(self.plan.layout.files) if number not in known_handles)
            self.target.check_free_space(sum(file.size_bytes for file in new_files))
        share = iter_share(self.plan, self.part or PartNumber(1, 1), splits_files=self.target.splits_files)
        pending = (each for each in share if (each.task.file_index, each.task.part_number) not in self._recovered)
        while batch := list(islice(pending, self.target.files_begun_at_once)):
            self._begin_files(dict.fromkeys(each.task.file_index for each in batch))
            for task, first_byte in ((each.task, each.first_byte) for each in batch):
                yield AssignedTask(task, self._handle_of(task.file_index), self.history.is_journaling, first_byte)

    def _begin_files(self, numbers: Iterable[int]) -> None:
        """Begin those of the files that neither this run nor an earlier one has begun."""
        new_numbers = [each for each in numbers if each not in self._handles and each not in self.history.file_handles]
        files = (self.plan.layout.files[number] for number in new_numbers)
        handles = self.target.begin_files({file.path: file.size_bytes for file in files})
        for number, handle in zip(new_numbers, handles, strict=True):
            self._handles[number] = handle
            self.history.note_file_begun(number, handle)

    def _handle_of(self, file_index: int) -> str:
        return self._handles.get(file_index) or self.history.file_handles.get(file_index, "")

    def recover_task(self, receipt: TaskReceipt) -> None:
        self._recovered.add((receipt.task.file_index, receipt.task.part_number))
        self.board.post_checksums(receipt.task.file_index, receipt.parts)
        self._count_task(receipt)

    def record_task(self, receipt: TaskReceipt) -> None:
        self.history.note_task_done(receipt)
        self._count_task(receipt)

    def _count_task(self, receipt: TaskReceipt) -> None:
        task, file_index = receipt.task, receipt.task.file_index
        file = self.plan.layout.files[file_index]
        part_tags = self._part_tags.setdefault(file_index, {})
        part_tags[task.part_number] = receipt.part_tag
        bytes_missing = self._bytes_missing.get(file_index, file.size_bytes) - task.num_bytes
        self._bytes_missing[file_index] = bytes_missing
        if bytes_missing == 0:
            self._fill_in_checksums_across_parts(file_index)
            tags_in_order = [part_tags[part] for part in sorted(part_tags)]
            self.target.finish_file(file.path, self._handle_of(file_index), tags_in_order)
            self.board.forget_file(file_index)
            del self._part_tags[file_index], self._bytes_missing[file_index]
            self.num_finished += 1

    def _fill_in_checksums_across_parts(self, file_index: int) -> None:
        """Write the checksums of bytes that another part wrote than the one that left room for the checksum."""
        share_starts = self.share_starts.get(file_index, ())
        if len(share_starts) < 2:
            return
        file, handle = self.plan.layout.files[file_index].load_layout(), self._handle_of(file_index)
        for position, segment in iter_checksums_across_shares(file, share_starts):
            crc = self.board.wait_for_checksum(file_index, (segment.start, segment.stop))
            self.target.write_part(file.path, handle, 0, position, crc.to_bytes(4, "little"))

    def sync_partial_files(self) -> None:
        """Close files that other parts complete."""
        for file_index in list(self._part_tags):
            self.target.finish_file(self.plan.layout.files[file_index].path, self._handle_of(file_index), ())


def _iter_checksums(file: FileLayout, task: TransferTask) -> Iterator[tuple[int, Crc32]]:
    """The checksum fields that lie in the task, each with its offset in the file."""
    index = bisect_left(file.offsets, task.start)
    while index < len(file.segments) and file.offsets[index] < task.stop:
        segment = file.segments[index]
        if isinstance(segment, Crc32):
            yield file.offsets[index], segment
        index += 1


def _crc_of_task(parts: tuple[PartCrc, ...], task: TransferTask, buffer: NDArray[np.uint8]) -> int:
    """The CRC-32 of a whole task."""
    # The parts' checksums are combined, crc(a + b) = combine(crc(a), crc(b), len(b)), and not computed again, which
    # would take 70 microseconds for 4 MiB.
    crc, position = 0, task.start
    for part in parts:
        crc = isal_zlib.crc32(buffer[position - task.start : part.start - task.start].data, crc)
        crc, position = isal_zlib.crc32_combine(crc, part.crc, part.stop - part.start), part.stop
    return isal_zlib.crc32(buffer[position - task.start :].data, crc)


def _iter_overlaps(covered: list[tuple[int, int]], task: TransferTask) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Each covered range that overlaps the task, and the start and stop of the overlap. Covered ranges do not overlap
    each other."""
    first = max(0, bisect_left(covered, (task.start, task.start)) - 1)
    for lower, upper in covered[first:]:
        if lower >= task.stop:
            break
        start, stop = max(lower, task.start), min(upper, task.stop)
        if start < stop:
            yield (lower, upper), start, stop
