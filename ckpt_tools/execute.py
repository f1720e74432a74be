"""Run a plan: read, place, cast, checksum, write.

A task assembles its range in one buffer and writes it with one call. It returns the CRC-32 of the parts of its range
that a checksum covers; once all tasks of a file are done these are combined, the checksums are written in their
places, and the file is closed. Publishing is the caller's.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from ckpt_tools.assemble import Assembler
from ckpt_tools.errors import CkptError
from ckpt_tools.layout import Crc32, FileLayout, Layout
from ckpt_tools.planning import Fill, Gather, Plan, Task, Zeros, steps
from ckpt_tools.runners.base import Runner
from ckpt_tools.stores.base import FileWriter, Store


@dataclass(frozen=True, slots=True)
class PartCrc:
    """The CRC-32 of bytes ``[start, stop)`` of a file, a part of the range ``covers``."""

    covers: tuple[int, int]
    start: int
    stop: int
    value: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """A task that is done."""

    task: Task
    crcs: tuple[PartCrc, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run moved, in bytes."""

    bytes_read: int
    bytes_written: int


def execute(
    plan: Plan,
    source: Store,
    target: Store,
    *,
    runner: Runner,
    fsync: bool,
    on_bytes: Callable[[int], None],
) -> Outcome:
    """Fill every file of the plan's layout in ``target``; ``on_bytes`` hears of each task's bytes when they are
    written.

    Raises:
        CkptError: reading or writing failed; the target then holds unfinished files.
    """
    work = _Work(plan, Assembler(source, plan.task_bytes), _Outputs(plan.layout, target, fsync))
    try:
        # Closed before the files are: a task still under way would write into whatever has its descriptor by then.
        with closing(runner.run(work, plan.tasks())) as receipts:
            for receipt in receipts:
                work.outputs.settle(receipt)
                on_bytes(receipt.task.num_bytes)
        assert work.outputs.num_complete == len(plan.layout.files), "every task was run"
    finally:
        work.outputs.abandon()
    return Outcome(work.assembler.bytes_read, plan.bytes_written)


@dataclass(slots=True)
class _Work:
    """What a worker does with a task."""

    plan: Plan
    assembler: Assembler
    outputs: _Outputs
    _buffers: threading.local = field(default_factory=threading.local)

    def __call__(self, task: Task) -> Receipt:
        file = self.plan.layout.files[task.file]
        buffer = self._buffer()[: task.num_bytes]
        for step in steps(file, task):
            self._fill(step, buffer)
        self.outputs.writer(task.file).write_at(task.start, buffer.data)
        return Receipt(task, tuple(_part_crcs(self.outputs.covered(task.file), task, buffer)))

    def _fill(self, step: Fill | Zeros | Gather, buffer: NDArray[np.uint8]) -> None:
        match step:
            case Fill(offset, data):
                buffer[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
            case Zeros(offset, num_bytes):
                buffer[offset : offset + num_bytes] = 0
            case Gather(offset, payload, start, stop):
                entry = self.plan.manifest.tensors[payload.key].cast(payload.dtype)
                room = buffer[offset : offset + (stop - start) * payload.dtype.item_bytes]
                self.assembler.read(entry, payload.box, payload.shape, start, stop, room.data)

    def _buffer(self) -> NDArray[np.uint8]:
        if not hasattr(self._buffers, "output"):
            self._buffers.output = np.empty(self.plan.task_bytes, np.uint8)
        output: NDArray[np.uint8] = self._buffers.output
        return output


@dataclass(slots=True)
class _Outputs:
    """The files being written: opened by the first task that needs one, closed when the last is settled."""

    layout: Layout
    target: Store
    fsync: bool
    _writers: dict[int, FileWriter] = field(default_factory=dict)
    _covered: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _written: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    _crcs: defaultdict[int, list[PartCrc]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    num_complete: int = 0

    def writer(self, number: int) -> FileWriter:
        with self._lock:
            if number not in self._writers:
                file = self.layout.files[number]
                self._writers[number] = self.target.create(file.path, file.size_bytes)
            return self._writers[number]

    def covered(self, number: int) -> list[tuple[int, int]]:
        """The ranges of a file that checksums cover, in order."""
        found = self._covered.get(number)
        if found is None:
            found = self._covered[number] = _covered_ranges(self.layout.files[number])
        return found

    def settle(self, receipt: Receipt) -> None:
        """Take note of a task; the last one of a file completes it."""
        number = receipt.task.file
        self._written[number] += receipt.task.num_bytes
        self._crcs[number].extend(receipt.crcs)
        if self._written[number] == self.layout.files[number].size_bytes:
            self._complete(number)

    def _complete(self, number: int) -> None:
        writer, file = self._writers[number], self.layout.files[number]
        values = _combined(self._crcs.pop(number, []))
        for offset, segment in zip(file.offsets, file.segments, strict=False):
            if isinstance(segment, Crc32):
                value = values.get((segment.start, segment.stop), 0)
                writer.write_at(offset, value.to_bytes(4, "little"))
        del self._writers[number]
        del self._written[number]
        self._covered.pop(number, None)
        writer.close(fsync=self.fsync)
        self.num_complete += 1

    def abandon(self) -> None:
        """Close what a failed run left open, whose own errors matter no more."""
        for writer in self._writers.values():
            with suppress(CkptError):
                writer.close(fsync=False)
        self._writers.clear()


def _covered_ranges(file: FileLayout) -> list[tuple[int, int]]:
    ranges = {(segment.start, segment.stop) for segment in file.segments if isinstance(segment, Crc32)}
    return sorted(pair for pair in ranges if pair[0] < pair[1])


def _part_crcs(covered: list[tuple[int, int]], task: Task, buffer: NDArray[np.uint8]) -> list[PartCrc]:
    """Checksums of what ``buffer`` holds of each covered range; the ranges do not overlap."""
    parts = []
    first = max(0, bisect_left(covered, (task.start, task.start)) - 1)
    for lower, upper in covered[first:]:
        if lower >= task.stop:
            break
        start, stop = max(lower, task.start), min(upper, task.stop)
        if start < stop:
            value = isal_zlib.crc32(buffer[start - task.start : stop - task.start].data)
            parts.append(PartCrc((lower, upper), start, stop, value))
    return parts


def _combined(parts: list[PartCrc]) -> dict[tuple[int, int], int]:
    """The checksum of every covered range from those of its parts."""
    by_range: defaultdict[tuple[int, int], list[PartCrc]] = defaultdict(list)
    for part in sorted(parts, key=lambda part: part.start):
        by_range[part.covers].append(part)
    return {
        covers: reduce(lambda crc, part: isal_zlib.crc32_combine(crc, part.value, part.stop - part.start), found, 0)
        for covers, found in by_range.items()
    }
