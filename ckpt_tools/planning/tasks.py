"""A task fills one range of one output file; its steps say with what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckpt_tools.core.layout import Crc32, FileLayout, Literal, Padding, Payload
from ckpt_tools.core.manifest import StateKey, TensorEntry
from ckpt_tools.core.shards import ByteRange


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


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Bytes of a stored file, as they are, at ``offset`` of a task."""

    offset: int
    at: ByteRange


FillStep = FillBytes | FillZeros | GatherElements | CopyRange


def iter_fill_steps(file: FileLayout, task: TransferTask) -> Iterator[FillStep]:
    """Contents of a task, in order; each byte is covered exactly once."""
    index = max(0, bisect_right(file.offsets, task.start) - 1)
    while index < len(file.segments) and file.offsets[index] < task.stop:
        segment, offset = file.segments[index], file.offsets[index]
        lo, hi = max(task.start, offset) - offset, min(task.stop, file.offsets[index + 1]) - offset
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


def join_stored_ranges(steps: Iterable[FillStep], tensors: Mapping[StateKey, TensorEntry]) -> Iterator[FillStep]:
    """The same steps, with one ``CopyRange`` for all tensors that follow one another in a stored file as they do in the
    task: a read of each of 100,000 small experts would take longer than their bytes."""
    # Bytes [start, stop) of ``file``, if it has a name, belong at ``offset``.
    file, start, stop, offset = "", 0, 0, 0
    for step in steps:
        at = _find_stored_bytes(step, tensors[step.payload.key]) if isinstance(step, GatherElements) else None
        if at is not None and at.file == file and at.start == stop and step.offset == offset + stop - start:
            stop = at.stop
            continue
        if file:
            yield CopyRange(offset, ByteRange(file, start, stop))
        if at is None:
            file = ""
            yield step
        else:
            file, start, stop, offset = at.file, at.start, at.stop, step.offset
    if file:
        yield CopyRange(offset, ByteRange(file, start, stop))


def _find_stored_bytes(step: GatherElements, entry: TensorEntry) -> ByteRange | None:
    """The bytes of a step that wants elements of a whole tensor as they are stored, in their order."""
    payload, at = step.payload, entry.shards.whole_range
    if at is None or not payload.is_whole or entry.shards.dtype is not payload.dtype or entry.plus:
        return None
    item_bytes = payload.dtype.item_bytes
    return ByteRange(at.file, at.start + step.start * item_bytes, at.start + step.stop * item_bytes)
