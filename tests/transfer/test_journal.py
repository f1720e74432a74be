"""A journal: what is noted was written, what is recovered was checked, and of another plan nothing is."""

import math
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import pytest

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Crc32, FileLayout, Layout, Literal, Payload
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.part_rules import PartRules
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.errors import StoreError, UsageError
from ckpt_tools.planning.plan import Plan
from ckpt_tools.stores.destination import StoreDestination
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Buffer
from ckpt_tools.transfer import journal as journal_module
from ckpt_tools.transfer.execute import TaskReceipt, TransferResult, execute_plan
from ckpt_tools.transfer.journal import JournalPolicy, TransferJournal, fingerprint_plan
from ckpt_tools.transfer.runners.threads import ThreadRunner

W = StateKey("w")
DATA = np.random.default_rng(0).bytes(1000)
TASK_BYTES = 64


@dataclass
class MemoryLog:
    """Bytes that outlive a run, and how they came."""

    data: bytes = b""
    appends: list[bytes] = field(default_factory=list)
    fails: bool = False
    before_append: Callable[[bytes], None] = lambda data: None

    def read(self) -> bytes:
        return self.data

    def append(self, data: bytes) -> None:
        self.before_append(data)
        if self.fails:
            self.data += data[: len(data) // 2]
            raise StoreError("writing failed: No space left on device")
        self.appends.append(data)
        self.data += data

    def clear(self) -> None:
        self.data = b""


@dataclass(slots=True)
class Breaking(StoreDestination):
    """A destination that fails once ``room`` parts were written."""

    room: float = math.inf

    def write_part(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        self.room -= 1
        if self.room < 0:
            raise StoreError("writing failed: No space left on device", path=path)
        return StoreDestination.write_part(self, path, handle, number, offset, data)


def vector(file: str = "source") -> TensorEntry:
    table = ShardTable.whole((len(DATA),), DType.UINT8, ByteRange(file, 0, len(DATA)))
    return TensorEntry(table.shape, DType.UINT8, Kind.PARAMETER, table)


def plan_of(entry: TensorEntry, *, literal: bytes = b"index", task_bytes: int = TASK_BYTES) -> Plan:
    payload = Payload(W, Box.whole(entry.shape), entry.shape, entry.dtype)
    files = (
        FileLayout("a", (payload,)),
        FileLayout("b", (payload, Crc32(0, 1000))),
        FileLayout("empty", ()),
        FileLayout("c", (Literal(literal),)),
    )
    return Plan(Manifest("test", {W: entry}), Layout(files), task_bytes, 1)


PLAN = plan_of(vector())
SIZE = 1000 + 1004 + 5
SOURCE = MemoryStore({"source": bytearray(DATA)})


@pytest.fixture(autouse=True)
def _told_at_once(monkeypatch):
    """Every task is noted where it is done."""
    monkeypatch.setattr(journal_module, "MAX_SHARE", math.inf)
    monkeypatch.setattr(journal_module, "QUIET_SECONDS", 0.0)


def run(
    log: MemoryLog, target: MemoryStore, plan: Plan = PLAN, *, resume: bool = True, room: float = math.inf
) -> tuple[TransferResult, TransferJournal]:
    destination, runner = Breaking(target, room=room), ThreadRunner(1)
    policy = JournalPolicy(keeps_output=resume)
    journal = policy.open(log, plan, SOURCE, destination, runner)
    done = execute_plan(plan, SOURCE, destination, runner=runner, on_bytes=lambda number: None, history=journal)
    return done, journal


def broken(room: int) -> tuple[MemoryLog, MemoryStore]:
    """What a run leaves that fails after so many parts."""
    log, target = MemoryLog(), MemoryStore()
    with pytest.raises(StoreError):
        run(log, target, resume=False, room=room)
    return log, target


def check(target: MemoryStore) -> None:
    expected = {"a": DATA, "b": DATA + zlib.crc32(DATA).to_bytes(4, "little"), "empty": b"", "c": b"index"}
    assert {path: bytes(data) for path, data in target.files.items()} == expected


@pytest.mark.parametrize("room", range(0, 34, 3))
def test_a_run_is_continued_where_it_failed(room):
    log, target = broken(room)
    done, journal = run(log, target)
    check(target)
    assert journal.bytes_recovered + done.bytes_written == SIZE
    assert journal.bytes_recovered >= TASK_BYTES * (room - 3), "but for two shorter parts, all that were written"


def test_a_run_starts_where_nothing_is_and_is_not_done_again():
    log, target = MemoryLog(), MemoryStore()
    for written, recovered in ((SIZE, 0), (0, SIZE)):
        done, journal = run(log, target)
        assert (done.bytes_written, journal.bytes_recovered) == (written, recovered)
        check(target)
    assert done.bytes_read == 0


def test_a_run_that_fails_early_leaves_no_note(monkeypatch):
    monkeypatch.setattr(journal_module, "QUIET_SECONDS", math.inf)
    log, target = broken(20)
    assert log.data == b""
    done, journal = run(log, target)
    assert (done.bytes_written, journal.bytes_recovered) == (SIZE, 0)
    check(target)


def test_what_was_done_early_is_done_again_and_the_rest_is_not(monkeypatch):
    asked = count()
    with monkeypatch.context() as early:
        early.setattr(TransferJournal, "is_journaling", property(lambda journal: next(asked) >= 5))
        log, target = broken(20)
    _, journal = run(log, target)
    assert TASK_BYTES * 10 < journal.bytes_recovered <= TASK_BYTES * 15
    check(target)


@pytest.mark.parametrize("cut", [1, 5, 20, 60, 300, "all but a part of the first line"])
def test_a_line_that_was_cut_off_is_none(cut):
    log, target = broken(20)
    log.data = log.data[: -cut if isinstance(cut, int) else 30]
    done, journal = run(log, target)
    check(target)
    assert journal.bytes_recovered + done.bytes_written == SIZE
    assert (journal.bytes_recovered == 0) == (not isinstance(cut, int))
    _, again = run(log, target)
    assert again.bytes_recovered == SIZE, "what is noted after such a line is read"


@pytest.mark.parametrize("at", range(0, 1100, 97))
def test_a_line_that_was_changed_is_none(at):
    """The checksums of parts in it are not those of bytes that can be read again."""
    log, target = broken(20)
    start = log.data.index(b"\n", 60)
    data = bytearray(log.data)
    data[start + at] ^= 1
    log.data = bytes(data)
    run(log, target)
    check(target)


def test_what_is_not_there_any_more_is_written_again():
    log, target = broken(20)
    target.files["a"][200] ^= 1
    done, journal = run(log, target)
    check(target)
    assert done.bytes_written + journal.bytes_recovered == SIZE
    _, again = run(log, target)
    assert again.bytes_recovered == SIZE, "a task noted twice counts once"


def test_a_file_that_is_gone_or_is_to_hold_other_bytes_is_begun_again():
    log, target = broken(20)
    del target.files["a"]
    _, journal = run(log, target)
    assert 0 < journal.bytes_recovered < 1000
    check(target)
    done, journal = run(log, target, plan_of(vector(), literal=b"INDEX"))
    assert (target.files["c"], done.bytes_written, journal.bytes_recovered) == (b"INDEX", 5, SIZE - 5)


OTHER_PLANS = {
    "another file of the source": plan_of(vector("other")),
    "other tasks": plan_of(vector(), task_bytes=128),
    "other files": replace(PLAN, layout=Layout(PLAN.layout.files[:2])),
    "another name": replace(PLAN, manifest=Manifest("test", {StateKey("v"): vector(), W: vector()})),
    "another literal of the source": replace(PLAN, manifest=replace(PLAN.manifest, literals={"x": b"1"})),
}


@pytest.mark.parametrize("plan", OTHER_PLANS.values(), ids=OTHER_PLANS)
def test_one_of_another_plan_is_refused_and_kept(plan):
    log, target = broken(20)
    before = log.data
    with pytest.raises(UsageError, match="another source, other options") as caught:
        run(log, target, plan)
    assert (caught.value.exit_code, log.data) == (2, before)


def test_one_of_another_cut_is_of_another_plan_and_a_source_written_again_another(tmp_path):
    plan = plan_of(vector(), task_bytes=400)
    rules = (PartRules(0, most, least) for least, most in [(100, 9), (101, 9), (100, 8)])
    plans = [plan, *(replace(plan, copy_rules=each) for each in rules)]
    assert len({fingerprint_plan(each, SOURCE) for each in plans}) == 4
    (tmp_path / "source").write_bytes(DATA)
    first = fingerprint_plan(PLAN, LocalStore(tmp_path))
    assert fingerprint_plan(PLAN, LocalStore(tmp_path)) == first
    os.utime(tmp_path / "source", ns=(1, 1))
    assert fingerprint_plan(PLAN, LocalStore(tmp_path)) != first


def test_nothing_is_noted_before_it_is_written():
    log, target = MemoryLog(), MemoryStore()

    def look(data: bytes) -> None:
        for receipt in receipts_of(data, target):
            path, task = PLAN.layout.files[receipt.task.file_index].path, receipt.task
            assert zlib.crc32(target.files[path][task.start : task.stop]) == receipt.crc

    log.before_append = look
    run(log, target)
    assert len(list(receipts_of(log.data, target))) == 16 + 16 + 1 + 1


def receipts_of(data: bytes, target: MemoryStore) -> Iterator[TaskReceipt]:
    """What a journal notes as done, all of it."""
    journal = TransferJournal(MemoryLog(), PLAN, StoreDestination(target), ThreadRunner(1), _earlier_lines=data)
    journal._file_handles = dict.fromkeys(range(4), "")
    return iter(list(journal._iter_noted_receipts()))


def test_a_log_that_takes_long_is_told_rarely(monkeypatch):
    monkeypatch.setattr(journal_module, "MAX_SHARE", 1e-9)
    log, target = MemoryLog(), MemoryStore()
    _, journal = run(log, target)
    assert len(log.appends) == 1
    journal.flush_entries()
    assert len(log.appends) == 2
    _, again = run(log, target)
    assert again.bytes_recovered == SIZE


def test_a_log_that_fails_fails_nothing_else_and_is_tried_again():
    log, target = MemoryLog(fails=True), MemoryStore()
    _, journal = run(log, target)
    check(target)
    log.fails = False
    journal.flush_entries()
    _, again = run(log, target)
    assert again.bytes_recovered == SIZE


def test_the_fingerprint_covers_the_file_of_every_tensor():
    """Tables of one file make their list of files when they are asked for it."""
    names = [f"{number}.bin" for number in range(50)]
    tables = [ShardTable.whole((2,), DType.FLOAT32, ByteRange(name, 0, 8)) for name in names]
    entries = [TensorEntry((2,), DType.FLOAT32, Kind.PARAMETER, table) for table in tables]
    tensors = [(StateKey(name), entry) for name, entry in zip(names, entries, strict=True)]
    assert journal_module._add_tensors_to_digest(journal_module._ValueDigest(), tensors) == sorted(names)
