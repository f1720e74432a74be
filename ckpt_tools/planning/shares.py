"""Tasks of one part of a conversion: about the same number of bytes for each, in order.

    files   |------- a -------|---- b ----|------ c ------|      one after the other
    parts   [=====1=====][=====2=====][=====3=====]

Where a file cannot be shared, as an upload, a part has whole files: those with their middle in its share.

Every part comes to the same plan, so that none has to be told its share. A task belongs to the part in which it begins.
A checksum of bytes that another part writes is left zero, and filled in by the part that ends last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.core.layout import Crc32, FileLayout
from ckpt_tools.core.part_number import PartNumber
from ckpt_tools.planning.plan import Plan
from ckpt_tools.planning.tasks import TransferTask


@dataclass(frozen=True, slots=True)
class ShareTask:
    """A task of a share, and the position of the first byte that the share has of the task's file."""

    task: TransferTask
    first_byte: int


def iter_share(plan: Plan, part: PartNumber, *, splits_files: bool) -> Iterator[ShareTask]:
    """The tasks of ``part``, in order."""
    numbered_tasks = _iter_numbered_tasks(plan, part.count, splits_files)
    return (share_task for number, share_task in numbered_tasks if number == part.number)


def count_share_bytes(plan: Plan, part: PartNumber, *, splits_files: bool) -> int:
    return sum(share_task.task.num_bytes for share_task in iter_share(plan, part, splits_files=splits_files))


def find_share_starts(plan: Plan, count: int) -> Mapping[int, Sequence[int]]:
    """By the number of a file, the first bytes of its parts, in order."""
    share_starts: defaultdict[int, list[int]] = defaultdict(list)
    for _, share_task in _iter_numbered_tasks(plan, count, splits_files=True):
        if share_task.task.start == share_task.first_byte:
            share_starts[share_task.task.file_index].append(share_task.first_byte)
    return share_starts


def iter_checksums_across_shares(file: FileLayout, share_starts: Sequence[int]) -> Iterator[tuple[int, Crc32]]:
    """The checksums of ``file``, each with its position, of bytes that another part writes than the one that writes the
    checksum."""
    for position, segment in zip(file.offsets, file.segments, strict=False):
        if isinstance(segment, Crc32) and segment.start < segment.stop:
            first_byte = share_starts[bisect_right(share_starts, position) - 1]
            if segment.start < first_byte:
                yield position, segment


def _iter_numbered_tasks(plan: Plan, count: int, splits_files: bool) -> Iterator[tuple[int, ShareTask]]:
    """Every task with the number of its part."""
    total_bytes, file_start, file_index, number, first_byte = max(1, plan.layout.size_bytes), 0, 0, 1, 0
    for task in plan.iter_tasks():
        while file_index < task.file_index:
            file_start += plan.layout.files[file_index].size_bytes
            file_index, first_byte = file_index + 1, 0
        position = task.start if splits_files else plan.layout.files[file_index].size_bytes // 2
        task_number = min(count, (file_start + position) * count // total_bytes + 1)
        if task_number != number:
            number, first_byte = task_number, task.start
        yield number, ShareTask(task, first_byte)
