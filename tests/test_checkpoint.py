"""Lazy access: numpy's own answer, and no byte more than it takes."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import ckpt_tools
from ckpt_tools.checkpoint import Checkpoint
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.values import Opaque
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


@settings(deadline=None)
@given(INDICES)
def test_any_index_gives_what_numpy_gives(index):
    np.testing.assert_array_equal(opened()["w"][index], WHOLE[index])


ARRAYS = st.lists(st.integers(-7, 6), max_size=4) | nps.arrays(st.sampled_from([np.int8, np.int64, np.uint8]), (2, 3))
MASKS = nps.arrays(bool, st.sampled_from([(5,), (6,), (4,), (5, 6), (6, 4), (5, 6, 4)]))


@settings(deadline=None)
@given(st.lists(ARRAYS | MASKS | parts(4) | st.just(...), min_size=1, max_size=4).map(tuple) | ARRAYS | MASKS)
def test_arrays_and_masks_give_what_numpy_gives(index):
    try:
        wanted = WHOLE[index]
    except IndexError:
        with pytest.raises(IndexError):
            opened()["w"][index]
    else:
        np.testing.assert_array_equal(opened()["w"][index], wanted, strict=True)


@pytest.mark.parametrize(
    "index", [5, -6, (0, 0, 0, 0), (..., ...), None, True, 1.5, np.True_, [0.5], [5], "w", ([0, 1], [0, 1, 2])]
)
def test_other_indices_are_refused(index):
    with pytest.raises(IndexError):
        opened()["w"][index]


def test_only_the_bytes_asked_for_are_read(tmp_path):
    whole = np.arange(1000 * 100, dtype=np.float32).reshape(10, 100, 100)
    safetensors.numpy.save_file({"a": whole}, tmp_path / "m.safetensors")
    tensor = ckpt_tools.open(tmp_path / "m.safetensors")["a"]
    read = 0
    for index, size in (([7, 1, 2, -3, 1], 3 * 40_000), ((4, [90, 3]), 2 * 400), (np.s_[1, 10, 3:7], 16)):
        np.testing.assert_array_equal(tensor[index], whole[index])
        read += size
        assert tensor._reader.bytes_read == read


@pytest.mark.parametrize("kind", ["fsdp2", "zero3-fp16"])
def test_every_format_gives_the_frameworks_bits(kind, checkpoint):
    made = checkpoint(kind, "awkward", 3)
    truth, found = Truth.load(made.root), ckpt_tools.open(made.checkpoint)
    assert_same_bits(truth.best_weights(), {name: tensor[...] for name, tensor in found.items()})
    moments = truth.slot("exp_avg")
    assert_same_bits(moments, {name: found.state(name, "exp_avg")[...] for name in moments})


def test_a_name_that_is_not_there():
    """A near one is proposed."""
    with pytest.raises(KeyError, match="nothing"):
        opened()["nothing"]
    with pytest.raises(KeyError, match=r"there is no weight 'v'; did you mean 'w'\?"):
        opened()["v"]
    with pytest.raises(KeyError, match="there is no 'exp_avg' of 'w'; it has weight"):
        opened().state("w", "exp_avg")
    assert dict(opened()).keys() == {"w"} and "v" not in opened() and 3 not in opened()


def open_files() -> set[Path]:
    """Of this process. Others may be closed meanwhile, by Python's collector."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(descriptor.readlink())
    return found


def test_a_closed_checkpoint_reads_nothing(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    with ckpt_tools.open(tmp_path / "m.safetensors") as found:
        tensor = found["a"]
        read = tensor.numpy()
        assert tmp_path / "m.safetensors" in open_files()
    assert tmp_path / "m.safetensors" not in open_files()
    np.testing.assert_array_equal(read, np.ones(3))
    with pytest.raises(ValueError, match="closed"):
        tensor.numpy()


def test_shown_short_and_names_are_no_html(checkpoint, tmp_path):
    found = ckpt_tools.open(checkpoint("zero3-bf16", "awkward", 2).checkpoint)
    assert repr(found) == f"Checkpoint(zero3, {len(found)} weights, step=4)"
    assert repr(found.model_copy("embed.weight")) == "LazyTensor('embed.weight', shape=(13, 7), dtype=bfloat16)"
    assert repr(found["embed.weight"]) == "LazyTensor('embed.weight (master)', shape=(13, 7), dtype=float32)"
    page = found._repr_html_()
    assert len(page) < 20_000 and "<td>embed.weight</td>" in page
    safetensors.numpy.save_file({"<script>x": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    assert "<script>" not in ckpt_tools.open(tmp_path / "m.safetensors")._repr_html_()


def test_a_view_of_a_stored_tensor_cannot_be_had():
    tensor = opened()["w"]
    np.testing.assert_array_equal(np.asarray(tensor), WHOLE)
    np.testing.assert_array_equal(np.array(tensor, copy=True), WHOLE)
    assert np.asarray(tensor, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(tensor, copy=False)
    for made in (torch.utils.dlpack.from_dlpack, np.from_dlpack):
        with pytest.raises(BufferError, match="copy=False"):
            made(tensor, copy=False)


TORCH_DTYPES = [dtype.value for dtype in DType if dtype.is_torch_dtype]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_gets_every_dtype_bit_for_bit(name, tmp_path):
    """By the method, and by its own functions."""
    dtype: torch.dtype = getattr(torch, name)
    raw = (torch.arange(6 * dtype.itemsize) % (2 if name == "bool" else 256)).to(torch.uint8)
    original = raw.view(dtype).reshape(2, 3)
    state = {"w": original, "none": original[:0], "empty": original[:, :0], "one": original[0, 0].clone()}
    state["strided"] = original.T
    torch.save(state, tmp_path / "m.pt")
    found = ckpt_tools.open(tmp_path / "m.pt")
    assert found["w"].dtype_name == name
    functions = (torch.as_tensor, torch.tensor, torch.utils.dlpack.from_dlpack, torch.asarray)
    for key, wanted in state.items():
        bits = wanted.contiguous().reshape(-1).view(torch.uint8).tolist()
        for made in (lambda tensor: tensor.torch(), *functions):
            got = made(found[key])
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), (key, made)
            assert got.reshape(-1).view(torch.uint8).tolist() == bits, (key, made)
    part = found["w"].torch(np.s_[1, ::-1])
    assert part.view(torch.uint8).tolist() == raw.reshape(2, 3, -1)[1].flip(0).reshape(-1).tolist()


def test_torch_takes_the_state_of_an_optimizer_and_rows_by_a_tensor(checkpoint):
    rows = torch.tensor([4, 0, -1])
    assert torch.equal(opened()["w"].torch(rows), torch.from_numpy(WHOLE)[rows])
    found = ckpt_tools.open(checkpoint("fsdp2", "awkward", 3).checkpoint)
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        tensor = found.state("embed.weight", slot)
        assert torch.equal(torch.as_tensor(tensor), tensor.torch())
        assert torch.as_tensor(tensor, dtype=torch.float64).dtype is torch.float64


def test_torchs_own_functions_are_as_fast_as_the_method(tmp_path):
    torch.save({"w": torch.ones(4096, 4096, dtype=torch.bfloat16)}, tmp_path / "m.pt")
    tensor = ckpt_tools.open(tmp_path / "m.pt")["w"]

    def seconds(work: Callable[[], object]) -> float:
        def once() -> float:
            started = time.process_time()
            work()
            return time.process_time() - started

        return min(once() for _ in range(5))

    method = seconds(tensor.torch)
    for made in (torch.as_tensor, torch.tensor, torch.utils.dlpack.from_dlpack, list):
        assert seconds(partial(made, tensor)) < 5 * method + 0.02, made


def test_iterating_gives_what_numpy_gives(monkeypatch):
    monkeypatch.setattr("ckpt_tools.checkpoint.SCRATCH_BYTES", 2 * WHOLE[0].nbytes)
    assert [row.tolist() for row in opened()["w"]] == WHOLE.tolist()
    assert opened()["w"].numpy().tolist() == np.from_dlpack(opened()["w"]).tolist()


def test_a_scalar_is_an_array_without_dims(tmp_path):
    safetensors.numpy.save_file({"a": np.ones((), np.float32)}, tmp_path / "m.safetensors")
    tensor = ckpt_tools.open(tmp_path / "m.safetensors")["a"]
    for found in (tensor.numpy(), tensor[...], tensor[()], np.asarray(tensor)):
        assert isinstance(found, np.ndarray) and found.shape == () and found == 1
    with pytest.raises(TypeError, match="0-d"):
        list(tensor)


def test_what_numpy_does_not_have_is_refused_with_the_way_to_read_it(tmp_path):
    torch.save({"w": torch.zeros(3, dtype=torch.complex32)}, tmp_path / "m.pt")
    tensor = ckpt_tools.open(tmp_path / "m.pt")["w"]
    for taken in (np.asarray, np.array, list, lambda tensor: tensor[0]):
        with pytest.raises(ckpt_tools.UnsupportedError, match=r"numpy has no complex32; read it with \.torch\(\)"):
            taken(tensor)


def test_what_is_beside_the_tensors(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    rng = torch.arange(5, dtype=torch.uint8)
    own = {"epoch": 7, "seen": np.float64(2), "rng": {"cpu": rng}, "strange": Exception("x")}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **own}, tmp_path / "m.pt")
    (tmp_path / "config.json").write_text('{"model_type": "none", "layers": 1}')
    with ckpt_tools.open(tmp_path / "m.pt") as found:
        (group,) = found.groups
        assert group.params == ("weight", "bias")
        assert group.options["lr"] == 0.25 and group.options["betas"] == (0.9, 0.999)
        assert found.extras.keys() == own.keys()
        assert (found.extras["epoch"], type(found.extras["seen"])) == (7, np.float64)
        assert torch.equal(found.extras["rng"]["cpu"].torch(), rng)
        assert isinstance(found.extras["strange"], Opaque)
        assert found.bytes_read == rng.nbytes
        assert found.config == {"model_type": "none", "layers": 1}
    (tmp_path / "config.json").unlink()
    assert found.config == {"model_type": "none", "layers": 1}
    assert ckpt_tools.open(tmp_path / "m.pt").config == {}
