"""Computed tensors as files: read whole, in pieces, through boxes and casts, and from threads."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, Layout, Payload
from ckpt_tools.core.manifest import (
    ComputedTensor,
    Kind,
    Manifest,
    RegionwiseTensor,
    StateKey,
    TensorEntry,
    make_computed_file_name,
)
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.errors import IncompleteError
from ckpt_tools.planning.plan import Plan, make_plan
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.transfer.computing import add_generated_files
from ckpt_tools.transfer.journal import fingerprint_plan
from ckpt_tools.transfer.tensor_reader import TensorReader

ROWS, COLUMNS = 7, 10


@dataclass(frozen=True, slots=True, eq=False)
class _Outer(RegionwiseTensor):
    """Row i, column j: ``rows[i] * columns[j]``."""

    def get_operand_regions(self, box: Box) -> Sequence[Box]:
        return [Box(box.start[dim : dim + 1], box.stop[dim : dim + 1]) for dim in range(2)]

    def compute_box(self, box: Box, parts: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        np.multiply(parts[0][:, None], parts[1][None, :], out=out)


@pytest.fixture
def numbers():
    rng = np.random.default_rng(0)
    return rng.standard_normal(ROWS, np.float32), rng.standard_normal(COLUMNS, np.float32)


@pytest.fixture
def manifest(numbers):
    operands, at = [], 0
    for each in numbers:
        table = ShardTable.whole(each.shape, DType.FLOAT32, ByteRange("stored", at, at + each.nbytes))
        operands.append(TensorEntry(each.shape, DType.FLOAT32, Kind.PARAMETER, table))
        at += each.nbytes
    name = make_computed_file_name("w")
    made = _Outer((ROWS, COLUMNS), DType.FLOAT32, tuple(operands))
    entry = TensorEntry((ROWS, COLUMNS), DType.FLOAT32, Kind.PARAMETER, made.make_table(name))
    return Manifest("safetensors", {StateKey("w"): entry}, computed={name: made})


@pytest.fixture
def store(manifest, numbers):
    stored = MemoryStore()
    data = b"".join(each.tobytes() for each in numbers)
    stored.create("stored", len(data)).write_at(0, data)
    return add_generated_files(stored, manifest)


@pytest.mark.parametrize("piece", [1, 3, 64, 1 << 18])
def test_any_range_of_bytes_is_that_of_the_whole(store, numbers, manifest, piece, monkeypatch):
    monkeypatch.setattr("ckpt_tools.core.manifest.MAX_PIECE", piece)
    whole = np.outer(*numbers).tobytes()
    name = next(iter(manifest.computed))
    assert store.list()[name] == len(whole)
    assert (manifest.files, manifest.stored_files) == ({make_computed_file_name("w")}, {"stored"})
    for start, stop in [(0, len(whole)), (0, 0), (5, 9), (8, 200), (3, 277), (len(whole) - 4, len(whole))]:
        buffer = bytearray(stop - start)
        store.read_into(name, start, memoryview(buffer))
        assert buffer == whole[start:stop]
    with pytest.raises(IncompleteError, match="ends at byte 280"):
        store.read_into(name, 278, memoryview(bytearray(3)))


def test_boxes_and_casts_of_a_computed_tensor(store, numbers, manifest):
    import ml_dtypes

    entry = manifest.tensors[StateKey("w")].cast_to(DType.BFLOAT16)
    box = Box((1, 2), (6, 9))
    out = np.empty(box.shape, ml_dtypes.bfloat16)
    reader = TensorReader(store, 64)
    reader.read(entry, box, entry.shape, 0, box.numel, out.reshape(-1).view(np.uint8).data)
    wanted = np.outer(*numbers)[1:6, 2:9].astype(ml_dtypes.bfloat16)
    assert out.tobytes() == wanted.tobytes()


def test_threads_share_a_store(store, numbers, manifest):
    name, whole = next(iter(manifest.computed)), np.outer(*numbers).tobytes()

    def read(start: int) -> bool:
        buffer = bytearray(8)
        store.read_into(name, start, memoryview(buffer))
        return bytes(buffer) == whole[start : start + 8]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, list(range(len(whole) - 8)) * 3))


def test_the_fingerprint_of_a_run_covers_what_is_computed(manifest, store):
    """``--resume`` starts again where an operand lies elsewhere, or another number is computed with."""

    @dataclass(frozen=True, slots=True, eq=False)
    class Times(_Outer):
        factor: int = 1

    def of(made: ComputedTensor) -> str:
        plan = Plan(replace(manifest, computed={name: made}), Layout(()), 64, 1)
        return fingerprint_plan(plan, store)

    ((name, first),) = manifest.computed.items()
    rows, columns = first.operands
    same = Times(first.shape, first.dtype, (rows, columns))
    moved = replace(columns, shards=ShardTable.whole(columns.shape, columns.dtype, ByteRange("stored", 0, 4 * COLUMNS)))
    others = [replace(same, factor=2), replace(same, operands=(rows, moved)), replace(same, operands=(columns, rows))]
    assert of(same) == of(replace(same))
    assert len({of(same), *map(of, others)}) == 4


def test_a_plan_counts_what_is_read_and_the_memory_of_computing(manifest):
    payload = Payload(StateKey("w"), Box.whole((ROWS, COLUMNS)), (ROWS, COLUMNS), DType.FLOAT32)
    layout = Layout((FileLayout("out", (payload,)),))
    plan = make_plan(manifest, layout, memory_bytes=1 << 30, num_workers=2)
    assert plan.compute_figures().bytes_read == 4 * (ROWS + COLUMNS)
    other = make_plan(replace(manifest, computed={}), layout, memory_bytes=1 << 30, num_workers=2)
    (made,) = manifest.computed.values()
    assert plan.peak_memory_bytes - other.peak_memory_bytes >= 2 * made.working_bytes
