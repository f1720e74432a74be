"""Run a plan: read, place, cast, checksum, write.

A task assembles its range in one buffer, fills in the checksums that lie in it, and writes it with one call. It depends
only on its inputs and the checksums of earlier bytes, so it may run in any process, and twice. Once all tasks of
a file are done the file is finished. Publishing is the caller's.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from ckpt_tools.core.layout import Crc32, FileLayout
from ckpt_tools.core.shards import ByteRange
from ckpt_tools.planning.plan import Plan
from ckpt_tools.planning.tasks import Fill, Gather, Step, Task, Zeros, steps
from ckpt_tools.stores.destination import CopyingRules, Destination
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.buffers import page_aligned
from ckpt_tools.transfer.crc_board import Board, LocalBoard, PartCrc
from ckpt_tools.transfer.runners.base import Runner
from ckpt_tools.transfer.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True)
class PlacedTask:
    """A task, and the file that it fills a part of. ``is_noted`` says that its receipt will be, with a checksum."""

    task: Task
    handle: str
    is_noted: bool


@dataclass(frozen=True, slots=True)
class Receipt:
    """A task that is done: the CRC-32 of its bytes, if it is to be noted, and of their parts in longer ranges, and the
    destination's part tag."""

    task: Task
    crc: int | None
    parts: tuple[PartCrc, ...]
    part_tag: str
    bytes_read: int
    bytes_copied: int = 0
    """Moved by the destination itself, and never seen here: then ``crc`` is 0."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Bytes that a run moved; ``bytes_written`` does not include what an earlier run had written."""

    bytes_read: int
    bytes_written: int
    bytes_copied: int = 0
    """Part of ``bytes_written`` that the destination copied itself."""


class History:
    """Progress of an earlier run of the same plan, and notes of this run for a later one. Here: nothing."""

    __slots__ = ()

    @property
    def handles(self) -> Mapping[int, str]:
        """Files begun, by number."""
        return {}

    @property
    def is_journaling(self) -> bool:
        """True if tasks that are started now will be noted."""
        return False

    def receipts(self) -> Iterable[Receipt]:
        """Tasks that are done, each checked before it is given."""
        return ()

    def begun(self, file: int, handle: str) -> None:
        """Note that a file was begun."""

    def done(self, receipt: Receipt) -> None:
        """Note that a task is done."""


def execute(
    plan: Plan,
    source: Store,
    target: Destination,
    *,
    runner: Runner,
    on_bytes: Callable[[int], None],
    history: History | None = None,
    board: Board | None = None,
) -> TransferResult:
    """Fill every file of the plan's layout in ``target``; ``on_bytes`` hears of each task's bytes when they are
    written, or found to have been.

    ``board`` is one that all of the runner's workers share, where they are not threads of this process.

    Raises:
        CkptError: reading or writing failed; the target then holds unfinished files.
    """
    board, history = board or LocalBoard(), history or History()
    files = _Files(plan, target, board, history)
    work = Worker(plan, TensorReader(source, plan.scratch_bytes), target, board)
    bytes_read = bytes_written = bytes_copied = 0
    try:
        is_resumed = False
        for receipt in history.receipts():
            is_resumed = True
            files.recover(receipt)
            on_bytes(receipt.task.num_bytes)
        # Closed before the files are: a task still under way would write into whatever has its descriptor by then.
        with closing(runner.run(work, files.jobs())) as receipts:
            for receipt in receipts:
                files.settle(receipt)
                bytes_read += receipt.bytes_read
                bytes_written += receipt.task.num_bytes
                bytes_copied += receipt.bytes_copied
                on_bytes(receipt.task.num_bytes)
        assert files.num_finished == len(plan.layout.files), "every task was run"
        # The earlier run may have written almost all of a record with a wrong checksum.
        work.tensor_reader.finish(every=is_resumed)
    finally:
        target.abandon()
    return TransferResult(bytes_read, bytes_written, bytes_copied)


@dataclass(slots=True)
class Worker:
    """Runs a task. It may be sent to another process, where it starts with no buffer and no open file."""

    plan: Plan
    tensor_reader: TensorReader
    target: Destination
    board: Board
    _buffers: threading.local = field(default_factory=threading.local, repr=False)
    _covered: dict[int, list[tuple[int, int]]] = field(default_factory=dict, repr=False)
    _copying: CopyingRules | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._copying = self.target.copying

    def __call__(self, job: PlacedTask) -> Receipt:
        try:
            return self._copied(job) or self._assembled(job)
        except BaseException as error:
            self.board.fail(error)
            self.target.fail(error)
            raise

    def _copied(self, job: PlacedTask) -> Receipt | None:
        """The task, done by the destination where it is one range of bytes of a file of its own service, and nothing
        has to be known of them."""
        task, rules = job.task, self._copying
        if rules is None:
            return None
        file = self.plan.layout.files[task.file].load_layout()
        if any(_overlaps(self._ranges(task.file, file), task)):
            return None
        before = self.tensor_reader.bytes_read_here
        found = self._single(list(steps(file, task)))
        source = self.tensor_reader.locate(found.file) if found is not None else None
        if found is None or source is None or not rules.allow(source, task.num_bytes):
            return None
        part_tag = self.target.copy(file.path, job.handle, task.number, source, found.start, found.stop)
        bytes_read = self.tensor_reader.bytes_read_here - before
        return Receipt(task, 0 if job.is_noted else None, (), part_tag, bytes_read, task.num_bytes)

    def _single(self, found: list[Step]) -> ByteRange | None:
        match found:
            case [Gather(_, payload, start, stop)]:
                entry = self.plan.manifest.tensors[payload.key].cast_to(payload.dtype)
                return self.tensor_reader.as_stored_range(entry, payload.box, payload.shape, start, stop)
        return None

    def _assembled(self, job: PlacedTask) -> Receipt:
        task, before = job.task, self.tensor_reader.bytes_read_here
        file = self.plan.layout.files[task.file].load_layout()
        buffer = self._buffer()[: task.num_bytes]
        for step in steps(file, task):
            self._fill(step, buffer)
        parts = tuple(
            PartCrc(covers, start, stop, isal_zlib.crc32(buffer[start - task.start : stop - task.start].data))
            for covers, start, stop in _overlaps(self._ranges(task.file, file), task)
        )
        self._seal(file, task, parts, buffer)
        part_tag = self.target.write(file.path, job.handle, task.number, task.start, buffer.data)
        crc = _crc(parts, task, buffer) if job.is_noted else None
        return Receipt(task, crc, parts, part_tag, self.tensor_reader.bytes_read_here - before)

    def _fill(self, step: Step, buffer: NDArray[np.uint8]) -> None:
        match step:
            case Fill(offset, data):
                buffer[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
            case Zeros(offset, num_bytes):
                buffer[offset : offset + num_bytes] = 0
            case Gather(offset, payload, start, stop):
                entry = self.plan.manifest.tensors[payload.key].cast_to(payload.dtype)
                room = buffer[offset : offset + (stop - start) * payload.dtype.item_bytes]
                self.tensor_reader.read(entry, payload.box, payload.shape, start, stop, room.data)

    def _seal(self, file: FileLayout, task: Task, parts: tuple[PartCrc, ...], buffer: NDArray[np.uint8]) -> None:
        """Fill in the checksums that lie in the task; those that others need are told first."""
        self.board.post(task.file, parts)
        for offset, segment in _checksums(file, task):
            value = self.board.value(task.file, (segment.start, segment.stop)) if segment.start < segment.stop else 0
            at = offset - task.start
            buffer[at : at + segment.num_bytes] = np.frombuffer(value.to_bytes(4, "little"), np.uint8)

    def _ranges(self, number: int, file: FileLayout) -> list[tuple[int, int]]:
        """The ranges of a file that checksums cover, in order."""
        found = self._covered.get(number)
        if found is None:
            if len(self._covered) > 64:
                self._covered.clear()
            ranges = {(each.start, each.stop) for each in file.segments if isinstance(each, Crc32)}
            found = self._covered[number] = sorted(pair for pair in ranges if pair[0] < pair[1])
        return found

    def _buffer(self) -> NDArray[np.uint8]:
        if not hasattr(self._buffers, "output"):
            self._buffers.output = page_aligned(self.plan.task_bytes)
        output: NDArray[np.uint8] = self._buffers.output
        return output

    def __reduce__(self) -> tuple[object, ...]:
        return Worker, (self.plan, self.tensor_reader, self.target, self.board)


@dataclass(slots=True)
class _Files:
    """The files being written: begun when their first task is handed out, finished when their last is done."""

    plan: Plan
    target: Destination
    board: Board
    history: History
    num_finished: int = 0
    _handles: dict[int, str] = field(default_factory=dict)
    _missing: dict[int, int] = field(default_factory=dict)
    _part_tags: dict[int, dict[int, str]] = field(default_factory=dict)
    _recovered: set[tuple[int, int]] = field(default_factory=set)

    def jobs(self) -> Iterator[PlacedTask]:
        """Tasks that are not done, in order; runners take one at a time. Raises StoreError where they do not fit."""
        begun = self.history.handles
        self.target.check_room(
            sum(file.size_bytes for number, file in enumerate(self.plan.layout.files) if number not in begun)
        )
        for task in self.plan.tasks():
            if (task.file, task.number) not in self._recovered:
                yield PlacedTask(task, self._handle(task.file), self.history.is_journaling)

    def _handle(self, number: int) -> str:
        if number not in self._handles:
            handle = self.history.handles.get(number)
            if handle is None:
                file = self.plan.layout.files[number]
                handle = self.target.begin(file.path, file.size_bytes)
                self.history.begun(number, handle)
            self._handles[number] = handle
        return self._handles[number]

    def recover(self, receipt: Receipt) -> None:
        self._recovered.add((receipt.task.file, receipt.task.number))
        self.board.post(receipt.task.file, receipt.parts)
        self._count(receipt)

    def settle(self, receipt: Receipt) -> None:
        self.history.done(receipt)
        self._count(receipt)

    def _count(self, receipt: Receipt) -> None:
        number = receipt.task.file
        part_tags = self._part_tags.setdefault(number, {})
        part_tags[receipt.task.number] = receipt.part_tag
        missing = self._missing.get(number, self.plan.layout.files[number].size_bytes) - receipt.task.num_bytes
        self._missing[number] = missing
        if missing == 0:
            self._finish(number)

    def _finish(self, number: int) -> None:
        part_tags = self._part_tags.pop(number)
        in_order = [part_tags[part] for part in sorted(part_tags)]
        self.target.finish(self.plan.layout.files[number].path, self._handle(number), in_order)
        self.board.forget(number)
        del self._missing[number]
        self.num_finished += 1


def _checksums(file: FileLayout, task: Task) -> Iterator[tuple[int, Crc32]]:
    index = bisect_left(file.offsets, task.start)
    while index < len(file.segments) and file.offsets[index] < task.stop:
        segment = file.segments[index]
        if isinstance(segment, Crc32):
            yield file.offsets[index], segment
        index += 1


def _crc(parts: tuple[PartCrc, ...], task: Task, buffer: NDArray[np.uint8]) -> int:
    """The CRC-32 of a whole task. What its parts' say is not computed again: that is 70 microseconds for 4 MiB."""
    crc, end = 0, task.start
    for part in parts:
        crc = isal_zlib.crc32(buffer[end - task.start : part.start - task.start].data, crc)
        crc, end = isal_zlib.crc32_combine(crc, part.value, part.stop - part.start), part.stop
    return isal_zlib.crc32(buffer[end - task.start :].data, crc)


def _overlaps(covered: list[tuple[int, int]], task: Task) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Covered ranges, which do not overlap each other, and the bytes of each that lie in the task."""
    first = max(0, bisect_left(covered, (task.start, task.start)) - 1)
    for lower, upper in covered[first:]:
        if lower >= task.stop:
            break
        start, stop = max(lower, task.start), min(upper, task.stop)
        if start < stop:
            yield (lower, upper), start, stop
