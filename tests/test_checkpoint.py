"""Lazy access: numpy's own answer, and no byte more than it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import ckpt_tools
from ckpt_tools.checkpoint import Checkpoint
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.stores.memory import MemoryStore
from tests.support.truth import Truth, assert_same_bits

WHOLE = np.arange(5 * 6 * 4, dtype=np.int32).reshape(5, 6, 4)


def opened() -> Checkpoint:
    """``WHOLE`` in two files, cut in the middle dim."""
    left, right = np.ascontiguousarray(WHOLE[:, :2]), np.ascontiguousarray(WHOLE[:, 2:])
    store = MemoryStore({"l": bytearray(left.tobytes()), "r": bytearray(right.tobytes())})
    shards = [
        Shard(Box((0, 0, 0), (5, 2, 4)), ByteRange("l", 0, left.nbytes)),
        Shard(Box((0, 2, 0), (5, 6, 4)), ByteRange("r", 0, right.nbytes)),
    ]
    entry = TensorEntry((5, 6, 4), DType.INT32, Kind.PARAMETER, ShardTable.build((5, 6, 4), DType.INT32, shards))
    return Checkpoint.of(store, Manifest("test", {StateKey("w"): entry}))


def parts(size: int) -> st.SearchStrategy[Any]:
    return st.one_of(st.integers(-size, size - 1), st.slices(size))


INDICES = st.one_of(
    st.just(...),
    st.tuples(parts(5)),
    st.tuples(parts(5), parts(6)),
    st.tuples(parts(5), parts(6), parts(4)),
    st.tuples(parts(5), st.just(...), parts(4)),
)


@given(INDICES)
def test_any_index_gives_what_numpy_gives(index: Any) -> None:
    np.testing.assert_array_equal(opened()["w"][index], WHOLE[index])


@pytest.mark.parametrize("index", [5, -6, (0, 0, 0, 0), (..., ...), [0, 1], None, True, 1.5])
def test_other_indices_are_refused(index: Any) -> None:
    with pytest.raises(IndexError):
        opened()["w"][index]


def test_only_the_bytes_asked_for_are_read(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.zeros((1000, 1000), np.float32)}, tmp_path / "m.safetensors")
    checkpoint = ckpt_tools.open(tmp_path / "m.safetensors")
    checkpoint["a"][10, 3:7]
    assert checkpoint.bytes_read == 16


@pytest.mark.parametrize("kind", ["fsdp2", "zero1-bf16", "zero3-fp32", "zero3-fp16"])
def test_every_format_gives_the_frameworks_bits(kind: str, checkpoint: Any) -> None:
    made = checkpoint(kind, "awkward", 3)
    truth, found = Truth.load(made.root), ckpt_tools.open(made.checkpoint)
    assert_same_bits(truth.best_weights(), {name: tensor[...] for name, tensor in found.items()})
    moments = truth.slot("exp_avg")
    assert_same_bits(moments, {name: found.state(name, "exp_avg")[...] for name in moments})


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="nothing"):
        opened()["nothing"]
