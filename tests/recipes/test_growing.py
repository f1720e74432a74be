"""``[[grow]]``: torch is the judge of a run that goes on with more rows, and numpy of their bits."""

import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import nn

import ckpt_tools
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry, make_computed_file_name
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.recipes.growing import MeanSlice, grow_entry
from ckpt_tools.recipes.manifest_builder import MAX_ITEM_BYTES, ZEROS_FILE
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.wrappers import overlay_literals
from ckpt_tools.testing.stored import StoredTensor, stored_tensors
from ckpt_tools.transfer.computing import add_generated_files
from ckpt_tools.transfer.tensor_reader import TensorReader
from fixtures.fsdp_state import load_app
from fixtures.models import build, loss_at
from fixtures.recipe import CASES, optimizer_of
from tests.support.manifests import read_bytes
from tests.support.sweep import extended

VOCABULARY = """
others = "same"
[[grow]]
name = "embed.weight"
size = 16
new = "mean"
[[grow]]
name = "head.weight"
size = 16
new = "mean"
[[grow]]
name = "head.bias"
size = 16
new = 2
"""


def grow(source: Path, rules: str, out: str = "out.safetensors", **options: Any) -> dict[str, NDArray[Any]]:
    recipe = source.parent / "r.toml"
    recipe.write_text(f'others = "same"\n{rules}')
    ckpt_tools.convert(source, source.parent / out, recipe=recipe, overwrite=True, **options)
    assert ckpt_tools.verify(source, source.parent / out, recipe=recipe, **options).equal
    return load_file(source.parent / out)


def rule(size: Any = 5, new: Any = '"mean"', name: str = "w", more: str = "") -> str:
    return f'[[grow]]\nname = "{name}"\nsize = {size}\nnew = {new}\n{more}\n'


@pytest.fixture
def source(tmp_path):
    arrays = {
        "w": np.array([[1, 2], [3, 6], [5, 1]], np.float32),
        "head.0.bias": np.array([1, 2, 6], bfloat16),
        "n": np.zeros((0, 2), np.float32),
        "steps": np.arange(3),
    }
    save_file(arrays, tmp_path / "src.safetensors")
    return tmp_path / "src.safetensors"


@pytest.mark.parametrize(
    ("rules", "name", "wanted"),
    [
        (rule(), "w", [[1, 2], [3, 6], [5, 1], [3, 3], [3, 3]]),
        (rule(4, '"zeros"'), "w", [[1, 2], [3, 6], [5, 1], [0, 0]]),
        (rule(5, 1), "w", [[1, 2], [3, 6], [5, 1], [3, 6], [3, 6]]),
        (rule(4, '"mean"', more="dim = 1"), "w", [[1, 2, 1.5, 1.5], [3, 6, 4.5, 4.5], [5, 1, 3, 3]]),
        (rule(3, 0, more="dim = 1"), "w", [[1, 2, 1], [3, 6, 3], [5, 1, 5]]),
        (rule('"A*2"', 0) + "[sizes]\nA = 2", "w", [[1, 2], [3, 6], [5, 1], [1, 2]]),
        (rule(4, name="head.{i}.bias"), "head.0.bias", [1, 2, 6, 3]),
        (rule(3), "w", [[1, 2], [3, 6], [5, 1]]),
    ],
)
def test_new_rows_are_zeros_the_mean_or_copies(source, rules, name, wanted):
    before = load_file(source)
    made = grow(source, rules)
    assert made.pop(name).tobytes() == np.array(wanted, before.pop(name).dtype).tobytes()
    assert {each: array.tobytes() for each, array in made.items()} == {n: a.tobytes() for n, a in before.items()}


def test_the_size_is_that_of_the_config_that_is_written(source):
    config = source.parent / "config"
    config.mkdir()
    (config / "config.json").write_text('{"model_type": "m", "text_config": {"vocab_size": 4}}')
    folder, options = source.parent / "hub", {"to": "safetensors", "config": config}
    recipe = source.parent / "r.toml"
    recipe.write_text('others = "same"\n' + rule('"config.vocab_size"'))
    report = ckpt_tools.convert(source, folder, recipe=recipe, **options)
    assert '"vocab_size": 4' in (folder / "config.json").read_text()
    (note,) = [note for note in report.plan.notes if note.what.startswith("w, ")]
    assert (note.what, note.count) == ("w, rows 3 to 3", 1)
    assert note.why == "grown by the recipe: the mean of the old ones, and zeros in optimizer state"
    recipe.write_text('others = "same"\n' + rule(6))
    (note,) = [
        each
        for each in ckpt_tools.plan(source, folder.with_name("n"), recipe=recipe, **options).notes
        if each.count == 3
    ]
    assert note.why.endswith("; config.json is not changed for them: vocab_size 4")
    recipe.write_text('others = "same"\n' + rule('"config.vocab_size"'))
    with pytest.raises(UsageError, match=r"the size config\.vocab_size is not known; name a folder with config.json"):
        ckpt_tools.plan(source, source.parent / "x.safetensors", recipe=recipe)


@pytest.mark.parametrize(
    ("rules", "error", "said"),
    [
        (rule(2), UsageError, "has 3 slices along dim 0, more than 2; --like|has 3 slices along dim 0, more than 2"),
        (rule(5, 3), UsageError, "of its 3 slices along dim 0, none is new = 3"),
        (rule(5, name="n"), UsageError, "of its 0 slices along dim 0, none is new = mean"),
        (rule(5, more="dim = 2"), UsageError, "it has no dim 2, but 2 dims"),
        (rule(5, name="x"), UsageError, "of x matches no tensor"),
        (rule('"V"'), UsageError, "the size V is not known"),
        (rule('"3/2"'), UsageError, "is not a whole number"),
        (rule("1.5"), UsageError, "size = 1.5 is neither a number nor text"),
        (rule(5, -1), UsageError, "new = -1 is neither 'zeros', 'mean' nor the number of a row"),
        (rule(5, "true"), UsageError, "new = True is neither"),
        (rule(5, more="dim = -1"), UsageError, "dim = -1 is not the number of a dim"),
        (rule(5, more="rows = 2"), UsageError, "grow]] has no key 'rows'"),
        ('[grow]\nname = "w"', UsageError, "grow is not a list of tables; write"),
        (rule(5, '"zeros"', name="steps"), UnsupportedError, "cannot add to steps"),
    ],
)
def test_rules_that_do_not_fit_are_refused(source, rules, error, said):
    with pytest.raises(error, match=said):
        grow(source, rules)


def test_a_recipe_that_grows_has_no_way_back(source):
    with pytest.raises(UsageError, match="the recipe r copies or grows tensors, and has no way back"):
        grow(source, rule(), inverse=True)


def test_what_a_line_adds_to_or_what_is_quantized_does_not_grow(source, tmp_path):
    with pytest.raises(UnsupportedError, match="cannot add to v: it is quantized, computed by the recipe"):
        grow(source, '[[map]]\nleft = "w"\nright = "v"\nadd = 1\n' + rule(name="v"))
    arrays = {"l.weight": np.ones((4, 4), np.int8), "l.weight_scale": np.ones(4, np.float32)}
    save_file(arrays, tmp_path / "int8.safetensors")
    for name in arrays:
        with pytest.raises(UnsupportedError, match=f"cannot add to {name}: it is quantized"):
            grow(tmp_path / "int8.safetensors", rule(name=name))


def test_state_that_does_not_begin_as_zeros_is_refused_by_name(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Rprop(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    with pytest.raises(UnsupportedError, match="prev of weight is not known to begin as a zero for each element"):
        grow(tmp_path / "run.pt", rule(name="weight"), to="safetensors", state="all")
    assert grow(tmp_path / "run.pt", rule(name="weight"), state="model")["weight"].shape == (5, 2)


def test_tied_names_grow_once_and_alike(tmp_path):
    shared = torch.arange(6.0).reshape(3, 2)
    torch.save({"embed": shared, "head": shared}, tmp_path / "src.pt")
    for names in (["embed"], ["head"], ["embed", "head"]):
        (tmp_path / "r.toml").write_text('others = "same"\n' + "".join(rule(4, name=name) for name in names))
        ckpt_tools.convert(tmp_path / "src.pt", tmp_path / "out.pt", recipe=tmp_path / "r.toml", overwrite=True)
        made = torch.load(tmp_path / "out.pt")
        assert made["embed"].untyped_storage().data_ptr() == made["head"].untyped_storage().data_ptr()
        assert torch.equal(made["head"], torch.cat([shared, torch.tensor([[2.0, 3.0]])]))
    with pytest.raises(UsageError, match=r"head is tied to embed, and each has a .*grow.* that differs"):
        grow(tmp_path / "src.pt", rule(4, name="embed") + rule(5, name="head"))


def has_rows(tensor: StoredTensor) -> bool:
    return tensor.elements.ndim > 0


@settings(max_examples=60)
@given(stored_tensors().filter(has_rows), st.data())
def test_grown_tensors_are_those_of_numpy(tensor, data):
    """In any sharding, along any dim, by zeros and by copies."""
    array, dim = tensor.elements, data.draw(st.integers(0, tensor.elements.ndim - 1))
    before, more = array.shape[dim], data.draw(st.integers(0, 5))
    row = data.draw(st.none() | st.integers(0, before - 1)) if before and more else None
    zeros = np.zeros_like(array, shape=(*array.shape[:dim], more, *array.shape[dim + 1 :]))
    new = zeros if row is None else np.repeat(array.take([row], dim), more, dim)
    made = grow_entry(tensor.entry, dim, before + more, None if row is None else (tensor.entry, row))
    wanted = np.concatenate([array, new], dim)
    assert made.shape == wanted.shape
    store = MemoryStore({file: bytearray(data) for file, data in tensor.files.items()})
    assert read_bytes(overlay_literals(store, {ZEROS_FILE: bytes(MAX_ITEM_BYTES)}), made) == wanted.tobytes()


NUMPY = {DType.FLOAT64: np.float64, DType.FLOAT32: np.float32, DType.FLOAT16: np.float16, DType.BFLOAT16: bfloat16}


def with_mean(array: NDArray[Any], dtype: DType, dim: int, store: MemoryStore) -> tuple[Manifest, TensorEntry]:
    """A manifest of the mean alone."""
    store.files["w"] = bytearray(array.tobytes())
    table = ShardTable.whole(array.shape, dtype, ByteRange("w", 0, array.nbytes))
    mean = MeanSlice.of(TensorEntry(array.shape, dtype, Kind.PARAMETER, table), dtype, dim)
    name = make_computed_file_name("mean")
    entry = TensorEntry(mean.shape, dtype, Kind.PARAMETER, mean.make_table(name))
    return Manifest("test", {StateKey("w"): entry}, computed={name: mean}), entry


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize(("shape", "dim"), [((1000, 37), 0), ((37, 1000), 1), ((5000,), 0), ((3, 200, 4), 1)])
def test_the_mean_is_that_of_float64_however_it_is_cut(shape, dim, dtype, monkeypatch):
    array = np.random.default_rng(1).standard_normal(shape).astype(NUMPY[dtype])
    exact = array.astype(np.longdouble).mean(axis=dim, keepdims=True)
    found = set()
    for piece in (7, 1 << 10, 1 << 18):
        monkeypatch.setattr("ckpt_tools.core.manifest.MAX_PIECE", piece)
        monkeypatch.setattr("ckpt_tools.recipes.growing.MAX_PIECE", piece)
        store = MemoryStore()
        manifest, entry = with_mean(array, dtype, dim, store)
        found.add(read_bytes(add_generated_files(store, manifest), entry))
    if dtype is DType.FLOAT64:
        assert all(np.allclose(np.frombuffer(each), exact.reshape(-1), rtol=0, atol=1e-15) for each in found)
    else:
        assert found == {exact.astype(np.float32).astype(NUMPY[dtype]).tobytes()}


class CountingStore(MemoryStore):
    reads = 0

    def read_into(self, path: str, start: int, out: memoryview) -> None:
        self.reads += 1
        super().read_into(path, start, out)


def test_the_mean_is_computed_once_and_in_little_memory():
    """Of a tensor of 32 MiB."""
    array = np.ones((1 << 16, 128), np.float32)
    store = CountingStore()
    manifest, entry = with_mean(array, DType.FLOAT32, 0, store)
    reader, out = TensorReader(add_generated_files(store, manifest), 1 << 20), bytearray(entry.num_bytes // 2)
    tracemalloc.start()
    for start in (0, 64, 0):
        reader.read(entry, Box.whole(entry.shape), entry.shape, start, start + 64, memoryview(out))
        assert np.frombuffer(out, np.float32).tolist() == [1.0] * 64
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20
    assert store.reads < 1.5 * (array.nbytes >> 20)


def grown_model(dtype: torch.dtype, **options: Any) -> nn.Module:
    """The model of the case `awkward`, with three tokens more."""
    model = build("awkward", dtype=dtype, seed=5, **options)
    model.embed = nn.Embedding(16, model.embed.weight.shape[1], dtype=dtype)
    model.head = nn.Linear(model.embed.weight.shape[1], 16, dtype=dtype)
    model.head.weight = model.embed.weight
    return model


@pytest.mark.parametrize(
    ("kind", "ranks", "world_size"),
    [("fsdp2", 2, 3), ("fsdp2-bf16", 2, 1), *extended(("fsdp2", 4, 1), ("fsdp2", 1, 2), ("fsdp2", 3, 5))],
)
def test_torch_goes_on_with_a_grown_model_and_its_moments(checkpoint, kind, ranks, world_size, tmp_path):
    made = checkpoint(kind, "awkward", ranks)
    (tmp_path / "r.toml").write_text(VOCABULARY)
    ckpt_tools.convert(made.checkpoint, tmp_path / "out", to="dcp", world_size=world_size, recipe=tmp_path / "r.toml")
    assert ckpt_tools.verify(made.checkpoint, tmp_path / "out", recipe=tmp_path / "r.toml").equal
    weights, slots = made.state().weights, made.state().optimizer
    model = grown_model(weights["embed.weight"].dtype)
    optimizer = optimizer_of(CASES["awkward"], model)
    with warnings.catch_warnings(action="ignore"):
        load_app(str(tmp_path / "out"), model, optimizer)
    old = weights["embed.weight"]
    mean = old.double().mean(0).float().to(old.dtype)
    assert torch.equal(model.embed.weight.data.view(torch.uint8), torch.cat([old, *[mean[None]] * 3]).view(torch.uint8))
    bias = weights["head.bias"]
    assert torch.equal(model.head.bias.data, torch.cat([bias, bias[2:3].repeat(3)]))
    for name, parameter in (("embed.weight", model.embed.weight), ("head.bias", model.head.bias)):
        for slot in ("exp_avg", "exp_avg_sq"):
            moment, before = optimizer.state[parameter][slot], slots[name, slot]
            assert torch.equal(moment, torch.cat([before, torch.zeros(3, *before.shape[1:], dtype=before.dtype)]))
        assert optimizer.state[parameter]["step"] == slots[name, "step"]
    loss_at("awkward", model, 9).backward()
    optimizer.step()
    assert not torch.equal(model.embed.weight[13:], mean[None].repeat(3, 1))


@pytest.mark.parametrize(
    ("kind", "to"), [("zero2-bf16", "zero3"), *extended(("zero3-bf16", "zero1"), ("zero1-bf16", "zero2"))]
)
def test_a_bf16_weight_is_its_grown_master_rounded(checkpoint, kind, to, tmp_path):
    made = checkpoint(kind, "awkward", 2)
    (tmp_path / "r.toml").write_text(VOCABULARY)
    ckpt_tools.convert(made.checkpoint, tmp_path / "out", to=to, world_size=3, recipe=tmp_path / "r.toml")
    found, before = ckpt_tools.open(tmp_path / "out"), made.state().optimizer
    master, moment, weight = (found.state("embed.weight", slot).torch() for slot in ("master", "exp_avg", "weight"))
    old = before["embed.weight", "master"]
    assert torch.equal(master, torch.cat([old, *[old.double().mean(0).float()[None]] * 3]))
    assert torch.equal(weight, master.bfloat16())
    assert torch.equal(moment, torch.cat([before["embed.weight", "exp_avg"], torch.zeros(3, old.shape[1])]))
