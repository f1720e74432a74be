"""Lazy access: numpy's own answer, and no byte more than it takes."""

from __future__ import annotations

from contextlib import suppress
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


def test_a_near_name_is_proposed() -> None:
    with pytest.raises(KeyError, match=r"there is no weight 'v'; did you mean 'w'\?"):
        opened()["v"]
    with pytest.raises(KeyError, match="there is no 'exp_avg' of 'w'; it has weight"):
        opened().state("w", "exp_avg")


def test_it_is_a_mapping(tmp_path: Path, checkpoint: Any) -> None:
    found = ckpt_tools.open(checkpoint("zero3-fp32", "awkward", 2).checkpoint)
    assert len(found) == len(list(found)) == len(dict(found))
    assert all(name in found for name in found)
    assert "head.weight" in found and "nothing" not in found and 3 not in found
    assert found.get("nothing") is None


def open_files() -> set[Path]:
    """Of this process. Others may be closed meanwhile, by Python's collector."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(descriptor.readlink())
    return found


def test_a_closed_checkpoint_reads_nothing(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    with ckpt_tools.open(tmp_path / "m.safetensors") as found:
        tensor = found["a"]
        read = tensor.numpy()
        assert tmp_path / "m.safetensors" in open_files()
    assert tmp_path / "m.safetensors" not in open_files()
    np.testing.assert_array_equal(read, np.ones(3))
    with pytest.raises(ValueError, match="closed"):
        tensor.numpy()


def test_shown_short(checkpoint: Any) -> None:
    found = ckpt_tools.open(checkpoint("zero3-bf16", "awkward", 2).checkpoint)
    assert repr(found) == f"Checkpoint(zero3, {len(found)} weights, step=4)"
    assert repr(found.model_copy("embed.weight")) == "LazyTensor('embed.weight', shape=(13, 7), dtype=bfloat16)"
    assert repr(found["embed.weight"]) == "LazyTensor('embed.weight (master)', shape=(13, 7), dtype=float32)"
    page = found._repr_html_()
    assert len(page) < 20_000 and "<td>embed.weight</td>" in page


def test_names_of_a_checkpoint_are_no_html(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"<script>x": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    assert "<script>" not in ckpt_tools.open(tmp_path / "m.safetensors")._repr_html_()


def test_a_new_array_cannot_be_the_old_one() -> None:
    tensor = opened()["w"]
    np.testing.assert_array_equal(np.asarray(tensor), WHOLE)
    np.testing.assert_array_equal(np.array(tensor, copy=True), WHOLE)
    assert np.asarray(tensor, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(tensor, copy=False)


TORCH_DTYPES = [dtype.value for dtype in DType]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_gets_every_dtype_bit_for_bit(name: str, tmp_path: Path) -> None:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    raw = (torch.arange(6 * dtype.itemsize) % (2 if name == "bool" else 256)).to(torch.uint8)
    original = raw.view(dtype).reshape(2, 3)
    torch.save({"w": original, "none": original[:0], "one": original[0, 0].clone()}, tmp_path / "m.pt")
    found = ckpt_tools.open(tmp_path / "m.pt")
    for key, wanted in (("w", original), ("none", original[:0]), ("one", original[0, 0].clone())):
        got = found[key].torch()
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got.reshape(-1).view(torch.uint8).tolist() == wanted.reshape(-1).view(torch.uint8).tolist()
    part = found["w"].torch(np.s_[1, ::-1])
    assert part.view(torch.uint8).tolist() == raw.reshape(2, 3, -1)[1].flip(0).reshape(-1).tolist()
    assert found["w"].dtype_name == name


def test_a_tensor_shares_the_memory_that_was_read() -> None:
    from ckpt_tools.torch.arrays import tensor_of

    elements = np.arange(6, dtype=np.uint16)
    tensor_of(elements, DType.BFLOAT16).zero_()
    assert not elements.any()
