"""A task fills one range of one output file; its steps say with what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tools.core.layout import Crc32, FileLayout, Literal, Padding, Payload


@dataclass(frozen=True, slots=True)
class Task:
    """Bytes ``[start, stop)`` of the layout's file number ``file``, the part ``number`` of it, counted from 0."""

    file: int
    number: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Fill:
    """Known bytes at ``offset`` of a task."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Zeros:
    """Padding, or bytes that are known later, at ``offset`` of a task."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Elements ``[start, stop)`` of a payload, to be assembled at byte ``offset`` of a task."""

    offset: int
    payload: Payload
    start: int
    stop: int


Step = Fill | Zeros | Gather


def steps(file: FileLayout, task: Task) -> Iterator[Step]:
    """Contents of a task, in order; each byte is covered exactly once."""
    index = max(0, bisect_right(file.offsets, task.start) - 1)
    while index < len(file.segments) and file.offsets[index] < task.stop:
        segment, offset = file.segments[index], file.offsets[index]
        lo, hi = max(task.start, offset) - offset, min(task.stop, offset + segment.num_bytes) - offset
        at = offset + lo - task.start
        if lo < hi:
            match segment:
                case Literal():
                    yield Fill(at, segment.data[lo:hi])
                case Padding() | Crc32():
                    yield Zeros(at, hi - lo)
                case Payload():
                    yield _gather(segment, at, lo, hi)
        index += 1


def _gather(payload: Payload, at: int, lo: int, hi: int) -> Gather:
    item = payload.dtype.item_bytes
    assert lo % item == 0 and hi % item == 0, "a task splits no element"
    return Gather(at, payload, lo // item, hi // item)
