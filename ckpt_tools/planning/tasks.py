"""A task fills one range of one output file; its steps say with what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tools.core.layout import Crc32, FileLayout, Literal, Padding, Payload


@dataclass(frozen=True, slots=True)
class TransferTask:
    """Bytes ``[start, stop)`` of the layout's file ``file_index``: its part ``part_number``, counted from 0."""

    file_index: int
    part_number: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FillBytes:
    """Known bytes at ``offset`` of a task."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class FillZeros:
    """Padding, or bytes that are known later, at ``offset`` of a task."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GatherElements:
    """Elements ``[start, stop)`` of a payload, to be assembled at byte ``offset`` of a task."""

    offset: int
    payload: Payload
    start: int
    stop: int


FillStep = FillBytes | FillZeros | GatherElements


def iter_fill_steps(file: FileLayout, task: TransferTask) -> Iterator[FillStep]:
    """Contents of a task, in order; each byte is covered exactly once."""
    index = max(0, bisect_right(file.offsets, task.start) - 1)
    while index < len(file.segments) and file.offsets[index] < task.stop:
        segment, offset = file.segments[index], file.offsets[index]
        lo, hi = max(task.start, offset) - offset, min(task.stop, offset + segment.num_bytes) - offset
        task_offset = offset + lo - task.start
        if lo < hi:
            match segment:
                case Literal():
                    yield FillBytes(task_offset, segment.data[lo:hi])
                case Padding() | Crc32():
                    yield FillZeros(task_offset, hi - lo)
                case Payload():
                    item_bytes = segment.dtype.item_bytes
                    assert lo % item_bytes == 0 and hi % item_bytes == 0, "a task splits no element"
                    yield GatherElements(task_offset, segment, lo // item_bytes, hi // item_bytes)
        index += 1
