"""From a plan to files: every byte where the layout says, every checksum as zlib computes it, and clean failures."""

import resource
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt_tools
from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Crc32, FileLayout, Layout, Literal, Padding, Payload, Segment
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.errors import IncompleteError, StoreError
from ckpt_tools.planning.plan import Plan
from ckpt_tools.stores.destination import StoreDestination
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Buffer, FileWriter, FillableStore, Store
from ckpt_tools.testing import strategies
from ckpt_tools.testing.stored import StoredTensor, stored_tensors
from ckpt_tools.transfer.execute import RunHistory, TaskReceipt, TransferResult, execute_plan
from ckpt_tools.transfer.runners import Item, Result
from ckpt_tools.transfer.runners.threads import ThreadRunner


@dataclass(frozen=True)
class Noted(RunHistory):
    """Keeps what was done."""

    is_journaling: bool = True
    noted: list[TaskReceipt] = field(default_factory=list)

    def note_task_done(self, receipt: TaskReceipt) -> None:
        self.noted.append(receipt)


def run(
    plan: Plan,
    source: Store,
    target: Store,
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
    history: RunHistory | None = None,
) -> TransferResult:
    runner = ThreadRunner(plan.num_workers)
    return execute_plan(plan, source, StoreDestination(target), runner=runner, on_bytes=on_bytes, history=history)


def plan_of(
    tensors: dict[StateKey, TensorEntry], *files: FileLayout, task_bytes: int = 64, num_workers: int = 2
) -> Plan:
    return Plan(Manifest("test", tensors), Layout(files), task_bytes, num_workers)


def vector(data: bytes, dtype: DType = DType.UINT8) -> TensorEntry:
    """A 1-d tensor whose one shard is the whole of the file ``source``."""
    table = ShardTable.whole((len(data) // dtype.item_bytes,), dtype, ByteRange("source", 0, len(data)))
    return TensorEntry(table.shape, dtype, Kind.PARAMETER, table)


def whole(key: StateKey, entry: TensorEntry, dtype: DType | None = None) -> Payload:
    return Payload(key, Box.whole(entry.shape), entry.shape, dtype or entry.dtype)


W = StateKey("w")
DATA = bytes(np.random.default_rng(0).bytes(1000))


class TestBytes:
    def test_every_kind_of_segment(self):
        entry = vector(DATA)
        file = FileLayout(
            "sub/out",
            (
                Literal(b"head"),
                Padding(3),
                Payload(W, Box((100,), (700,)), (1000,), DType.UINT8),
                Crc32(7, 607),
                Literal(b"middle" * 30),
                Padding(100),
                Crc32(611, 791),
                Crc32(7, 607),
                Crc32(0, 0),
            ),
        )
        target = MemoryStore()
        result = run(plan_of({W: entry}, file), MemoryStore({"source": bytearray(DATA)}), target)
        crc = zlib.crc32(DATA[100:700]).to_bytes(4, "little")
        expected = (
            b"head\0\0\0"
            + DATA[100:700]
            + crc
            + b"middle" * 30
            + bytes(100)
            + zlib.crc32(b"middle" * 30).to_bytes(4, "little")
            + crc
            + bytes(4)
        )
        assert bytes(target.files["sub/out"]) == expected
        assert result == TransferResult(bytes_read=600, bytes_written=len(expected))

    def test_files_of_no_bytes_and_of_a_few(self, tmp_path):
        files = [FileLayout(f"{n % 7}/{n}", (Literal(b"x" * (n % 3)), Padding(0))) for n in range(300)]
        run(plan_of({}, *files), MemoryStore(), LocalStore(tmp_path))
        found = {
            path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
        }
        assert found == {file.path: b"x" * file.size_bytes for file in files}
        assert run(plan_of({}), MemoryStore(), MemoryStore()) == TransferResult(0, 0)

    def test_a_payload_in_another_type_is_cast_and_its_checksum_is_of_what_was_written(self):
        values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
        cast = values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        data = values.numpy().tobytes()
        entry = vector(data, DType.FLOAT32)
        file = FileLayout("out", (Literal(b"odd"), whole(W, entry, DType.BFLOAT16), Crc32(3, 10_003)))
        target = MemoryStore()
        result = run(plan_of({W: entry}, file, task_bytes=999), MemoryStore({"source": bytearray(data)}), target)
        assert bytes(target.files["out"]) == b"odd" + cast + zlib.crc32(cast).to_bytes(4, "little")
        assert result == TransferResult(bytes_read=20_000, bytes_written=10_007)

    def test_progress_is_told_of_every_byte_once(self):
        entry, told = vector(DATA), []
        files = [FileLayout("a", (whole(W, entry),)), FileLayout("b", (Padding(77),))]
        run(plan_of({W: entry}, *files), MemoryStore({"source": bytearray(DATA)}), MemoryStore(), on_bytes=told.append)
        assert sum(told) == 1077 and max(told) <= 64


@st.composite
def outputs(draw: st.DrawFn, tensors: dict[StateKey, StoredTensor]) -> tuple[list[FileLayout], dict[str, bytes]]:
    """Files of payloads, literals, padding and checksums, and the bytes they have to have."""
    files, expected = [], {}
    for number in range(draw(st.integers(0, 3))):
        segments: list[Segment] = []
        data = b""
        covered = 0
        for _ in range(draw(st.integers(0, 5))):
            kind = draw(st.sampled_from(["payload", "payload", "literal", "padding", "checksum"]))
            if kind == "payload":
                key = draw(st.sampled_from(sorted(tensors)))
                payload, elements = draw(payloads(key, tensors[key]))
                segments.append(payload)
                data += elements
            elif kind == "checksum":
                start, stop = draw(strategies.intervals(len(data) - covered))
                segments.append(Crc32(covered + start, covered + stop))
                data += zlib.crc32(data[covered + start : covered + stop]).to_bytes(4, "little")
                covered = len(data)
            else:
                literal = draw(st.binary(max_size=30)) if kind == "literal" else bytes(draw(st.integers(0, 30)))
                segments.append(Literal(literal) if kind == "literal" else Padding(len(literal)))
                data += literal
        files.append(FileLayout(f"{number}", tuple(segments)))
        expected[f"{number}"] = data
    return files, expected


@st.composite
def payloads(draw: st.DrawFn, key: StateKey, stored: StoredTensor) -> tuple[Payload, bytes]:
    geometry: Shape = draw(st.sampled_from([stored.entry.shape, (prod(stored.entry.shape),)]))
    box = draw(strategies.boxes(geometry))
    index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return Payload(key, box, geometry, stored.entry.dtype), stored.elements.reshape(geometry)[index].tobytes()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(16, 80), st.integers(1, 3))
def test_any_layout_of_any_checkpoint(data, task_bytes, num_workers):
    stored = {StateKey(f"{n}"): data.draw(stored_tensors(prefix=f"{n}-")) for n in range(2)}
    files, expected = data.draw(outputs(stored))
    source = MemoryStore({name: bytearray(d) for tensor in stored.values() for name, d in tensor.files.items()})
    entries = {key: tensor.entry for key, tensor in stored.items()}
    target, history = MemoryStore(), Noted()
    run(plan_of(entries, *files, task_bytes=task_bytes, num_workers=num_workers), source, target, history=history)
    assert {path: bytes(found) for path, found in target.files.items()} == expected
    for receipt in history.noted:
        task = receipt.task
        assert receipt.crc == zlib.crc32(expected[files[task.file_index].path][task.start : task.stop])


@dataclass(slots=True)
class Counted(MemoryStore):
    """A store that knows the ranges that were read of it."""

    ranges: list[tuple[int, int]] = field(default_factory=list)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self.ranges.append((start, start + len(buffer)))
        MemoryStore.read_into(self, path, start, buffer)


def neighbours(gaps: dict[int, int], numels: list[int]) -> tuple[dict[StateKey, TensorEntry], bytearray]:
    """Tensors of different elements in one file, with ``gaps`` bytes before some, by their numbers."""
    stored, entries = bytearray(b"head"), {}
    for number, numel in enumerate(numels):
        stored += bytes(gaps.get(number, 0))
        at = ByteRange("source", len(stored), len(stored) + 4 * numel)
        stored += np.arange(1000 * number, 1000 * number + numel, dtype=np.float32).tobytes()
        table = ShardTable.whole((numel,), DType.FLOAT32, at)
        entries[StateKey(f"{number}")] = TensorEntry((numel,), DType.FLOAT32, Kind.PARAMETER, table)
    return entries, stored


@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(16, 90))
def test_neighbours_in_any_order_are_written_as_they_are(data, numels, task_bytes):
    numbers = st.integers(0, len(numels) - 1)
    entries, stored = neighbours(data.draw(st.dictionaries(numbers, st.just(4), max_size=2)), numels)
    changed = {StateKey(f"{number}") for number in data.draw(st.sets(numbers, max_size=2))}
    entries |= {key: replace(entries[key], plus=1) for key in changed}
    order = data.draw(st.one_of(st.just(list(entries)), st.lists(st.sampled_from(list(entries)), max_size=20)))
    file, target = FileLayout("out", tuple(whole(key, entries[key]) for key in order)), MemoryStore()
    run(plan_of(entries, file, task_bytes=task_bytes), MemoryStore({"source": stored}), target)
    expected = [
        np.arange(1000 * int(key.fqn), 1000 * int(key.fqn) + entries[key].numel, dtype=np.float32) + (key in changed)
        for key in order
    ]
    assert bytes(target.files["out"]) == b"".join(each.astype(np.float32).tobytes() for each in expected)


@pytest.mark.parametrize(
    ("gaps", "order", "ranges"),
    [
        ({}, "01234", [(4, 84)]),
        ({2: 4}, "01234", [(4, 36), (40, 88)]),
        ({}, "34012", [(52, 84), (4, 52)]),
        ({}, "0022", [(4, 20), (4, 20), (36, 52), (36, 52)]),
    ],
)
def test_neighbours_are_one_read(gaps, order, ranges):
    entries, stored = neighbours(gaps, [4] * 5)
    source = Counted({"source": stored})
    file = FileLayout("out", tuple(whole(StateKey(each), entries[StateKey(each)]) for each in order))
    result = run(plan_of(entries, file, task_bytes=1000, num_workers=1), source, MemoryStore())
    assert source.ranges == [(0, 4), *ranges], "the first read asks whether it is a zip"
    assert result.bytes_read == 4 * 4 * len(order)


@dataclass(slots=True)
class Watched(FillableStore):
    """A store that fails on demand, and knows what it handed out."""

    fails: str = ""
    inner: MemoryStore = field(default_factory=MemoryStore)
    open: list[str] = field(default_factory=list)
    url: str = "watched://"

    def list(self) -> dict[str, int]:
        return dict(self.inner.list())

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        if self.fails == "read" and start >= 500:
            raise StoreError("reading failed: Input/output error", path=path)
        self.inner.read_into(path, start, buffer)

    def reopen(self, path: str) -> FileWriter:
        raise AssertionError("files are written where they were begun")

    def create(self, path: str, size_bytes: int) -> FileWriter:
        if self.fails == "create" and path == "b":
            raise StoreError("creating failed: No space left on device", path=path)
        self.open.append(path)
        return WatchedWriter(self, path, self.inner.create(path, size_bytes))


@dataclass(slots=True)
class WatchedWriter:
    store: Watched
    path: str
    inner: FileWriter

    def write_at(self, offset: int, data: Buffer) -> None:
        assert self.path in self.store.open, "a write after the file was closed"
        if self.store.fails == "write" and offset >= 500:
            raise StoreError("writing failed: No space left on device", path=self.path)
        self.inner.write_at(offset, data)

    def close(self) -> None:
        self.store.open.remove(self.path)
        if self.store.fails == "close":
            raise StoreError("writing failed: Disk quota exceeded", path=self.path)
        self.inner.close()

    def abandon(self) -> None:
        self.store.open.remove(self.path)
        self.inner.abandon()


class TestFailures:
    @pytest.fixture(autouse=True)
    def _no_thread_is_left(self):
        before = set(threading.enumerate())
        yield
        assert set(threading.enumerate()) <= before

    entry = vector(DATA)
    plan = plan_of(
        {W: entry},
        FileLayout("a", (whole(W, entry),)),
        FileLayout("b", (whole(W, entry), Crc32(0, 1000))),
        FileLayout("c", (Literal(b"index"),)),
    )

    @pytest.mark.parametrize("fails", ["read", "create", "write", "close"])
    def test_one_of_the_store_is_raised_and_every_file_closed_and_the_last_not_begun(self, fails):
        """It is the one that makes the checkpoint valid."""
        store = Watched(fails)
        store.inner.files["source"] = bytearray(DATA)
        with pytest.raises(StoreError, match=r"(reading|creating|writing) failed"):
            run(self.plan, store, store)
        assert store.open == []
        assert "c" not in store.inner.files

    def test_a_source_that_is_cut_off(self):
        with pytest.raises(IncompleteError, match="source: it ends at byte 999"):
            run(self.plan, MemoryStore({"source": bytearray(DATA[:-1])}), MemoryStore())

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_one_of_the_caller_ends_the_work_before_files_are_closed(self, error):
        """A thread still writing would write into whatever file has its descriptor by then."""
        store = Watched()
        store.inner.files["source"] = bytearray(DATA)

        def interrupted(num_bytes: int) -> None:
            raise error

        for _ in range(20):
            with pytest.raises(error):
                run(self.plan, store, store, on_bytes=interrupted)
            assert store.open == []
            assert not any(thread.name.startswith("ckpt-tools") for thread in threading.enumerate())

    def test_a_runner_that_leaves_out_a_task_is_not_believed(self):
        class Lazy:
            def run(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
                yield from map(work, list(items)[:-1])

        source, target = MemoryStore({"source": bytearray(DATA)}), StoreDestination(MemoryStore())
        with pytest.raises(AssertionError, match="every task was run"):
            execute_plan(self.plan, source, target, runner=Lazy(), on_bytes=lambda _: None)


def test_no_tensor_is_read_twice(tmp_path):
    torch.save({f"t{n}": torch.arange(n * 1000) for n in range(1, 40)}, tmp_path / "a.pt")
    report = ckpt_tools.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert report.bytes_read == report.plan.bytes_read == 8 * 1000 * sum(range(40))


def test_few_files_are_open_at_a_time_however_slowly_they_are_closed(tmp_path):
    """Three hundred files with 40 descriptors, while each takes a millisecond to be closed."""
    program = """
        import sys, time
        from pathlib import Path
        from ckpt_tools.transfer.execute import execute_plan
        from ckpt_tools.core.layout import FileLayout, Layout, Literal
        from ckpt_tools.core.manifest import Manifest
        from ckpt_tools.planning.plan import Plan
        from ckpt_tools.transfer.runners.threads import ThreadRunner
        from ckpt_tools.stores.destination import StoreDestination
        from ckpt_tools.stores.local.store import LocalStore
        files = [FileLayout(f"{n}", (Literal(b"x"),)) for n in range(300)]
        plan = Plan(Manifest("test", {}), Layout(files), 64, 2)
        source = LocalStore(Path(sys.argv[1]))
        target, pause = StoreDestination(source), lambda _: time.sleep(0.001)
        execute_plan(plan, source, target, runner=ThreadRunner(2), on_bytes=pause)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))  # noqa: E731
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.iterdir())) == 300
