"""Parts of a plan: every task in one of them, in order, of about the same number of bytes."""

from itertools import pairwise
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.layout import Crc32, FileLayout, Layout, Literal
from ckpt_tools.core.part_number import PartNumber
from ckpt_tools.planning.shares import count_share_bytes, find_share_starts, iter_checksums_across_shares, iter_share
from ckpt_tools.planning.tasks import TransferTask

RECORDS = st.lists(st.integers(0, 5_000), max_size=12)


def make_plan(files, task_bytes):
    """Files of records, each followed by its checksum, and all checksums again at the end, as a zip archive has."""
    layouts = []
    for number, records in enumerate(files):
        segments, covered, start = [], [], 0
        for size in records:
            covered.append(Crc32(start, start + size))
            segments += [Literal(bytes(size)), covered[-1]]
            start += size + 4
        layouts.append(FileLayout(f"file{number}", (*segments, *covered)))

    def iter_tasks():
        for number, file in enumerate(layouts):
            ends = [*range(task_bytes, file.size_bytes, task_bytes), file.size_bytes]
            for part_number, (start, stop) in enumerate(pairwise([0, *ends])):
                yield TransferTask(number, part_number, start, stop)

    return SimpleNamespace(layout=Layout(layouts), iter_tasks=iter_tasks)


@given(st.lists(RECORDS, min_size=1, max_size=4), st.integers(64, 3_000), st.integers(1, 9))
def test_the_shares_are_all_tasks_in_order(files, task_bytes, count):
    plan = make_plan(files, task_bytes)
    shares = [list(iter_share(plan, PartNumber(number, count), splits_files=True)) for number in range(1, count + 1)]
    assert [each.task for share in shares for each in share] == list(plan.iter_tasks())
    total = plan.layout.size_bytes
    for number, share in enumerate(shares, 1):
        assert count_share_bytes(plan, PartNumber(number, count), splits_files=True) <= total / count + task_bytes
        assert all(each.first_byte <= each.task.start for each in share)


@given(st.lists(RECORDS, min_size=1, max_size=4), st.integers(64, 3_000), st.integers(1, 9))
def test_every_checksum_is_written_once(files, task_bytes, count):
    """By the part of all bytes that it covers, or by the part that ends last."""
    plan = make_plan(files, task_bytes)
    share_starts = find_share_starts(plan, count)
    written_by_parts, expected = set(), set()
    for number in range(1, count + 1):
        for each in iter_share(plan, PartNumber(number, count), splits_files=True):
            file = plan.layout.files[each.task.file_index]
            for position, segment in zip(file.offsets, file.segments, strict=False):
                if isinstance(segment, Crc32) and each.task.start <= position < each.task.stop:
                    if segment.start < segment.stop:
                        expected.add((each.task.file_index, position))
                    if segment.start >= each.first_byte:
                        written_by_parts.add((each.task.file_index, position))
    written_last = {
        (number, position)
        for number, file in enumerate(plan.layout.files)
        for position, _ in iter_checksums_across_shares(file, share_starts.get(number, [0]))
    }
    assert not written_last & written_by_parts
    assert expected <= written_last | written_by_parts
    assert count > 1 or not written_last


@given(st.lists(RECORDS, min_size=1, max_size=9), st.integers(64, 3_000), st.integers(1, 9))
def test_whole_files_are_shared_where_none_may_be_split(files, task_bytes, count):
    plan = make_plan(files, task_bytes)
    shares = [list(iter_share(plan, PartNumber(number, count), splits_files=False)) for number in range(1, count + 1)]
    assert [each.task for share in shares for each in share] == list(plan.iter_tasks())
    owners = [{each.task.file_index for each in share} for share in shares]
    assert sum(map(len, owners)) == len(files)
    assert all(each.first_byte == 0 for share in shares for each in share)
