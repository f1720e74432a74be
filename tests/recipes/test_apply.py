"""What a recipe does beside moving boxes: arithmetic, padding, ties, steps, groups; and parts of DCP items."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from torch.distributed import checkpoint as dcp

import ckpt_tools
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.errors import DifferenceError, UnsupportedError
from ckpt_tools.recipes.apply import apply_recipe
from ckpt_tools.recipes.like import has_same_elements, resize_rows
from ckpt_tools.recipes.manifest_builder import MAX_ITEM_BYTES, ZEROS_FILE
from ckpt_tools.recipes.reading import parse_recipe
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.wrappers import overlay_literals
from ckpt_tools.testing.stored import StoredTensor, stored_tensors
from ckpt_tools.transfer.tensor_checks import check_required_equal
from tests.recipes.test_properties import read
from tests.support.manifests import read_bytes

DTYPES = {np.dtype(np.float32): DType.FLOAT32, np.dtype(bfloat16): DType.BFLOAT16}

Arrays = dict[StateKey, NDArray[Any]]


def stored(arrays: Arrays, groups: tuple[ParamGroup, ...] = ()) -> tuple[Manifest, MemoryStore]:
    tensors, files = {}, {}
    for key, array in arrays.items():
        dtype = DTYPES[array.dtype]
        files[str(key)] = bytearray(array.tobytes())
        table = ShardTable.whole(array.shape, dtype, ByteRange(str(key), 0, array.nbytes))
        kind = Kind.PARAMETER if key.slot == "weight" else Kind.STATE
        tensors[key] = TensorEntry(array.shape, dtype, kind, table)
    return Manifest("test", tensors, groups=groups), MemoryStore(files)


def mapped(
    text: str, arrays: Arrays, config: Any = None, *, inverse: bool = False, **more: Any
) -> tuple[Manifest, Arrays]:
    manifest, store = stored(arrays, **more)
    recipe = parse_recipe(text, "r", "r.toml")
    made, _ = apply_recipe(manifest, recipe.inverse() if inverse else recipe, config)
    store.files |= {name: bytearray(data) for name, data in made.literals.items()}
    numpy_of = {dtype: of for of, dtype in DTYPES.items()}
    check_required_equal(made, store)
    return made, {key: read(entry, store).view(numpy_of[entry.dtype]) for key, entry in made.tensors.items()}


def key(name: str, slot: str = "weight") -> StateKey:
    return StateKey(name, slot)


def numbers(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


NORM = '[[map]]\nleft = "a"\nright = "b"\nadd = 1\n'


class TestArithmetic:
    def test_it_is_computed_from_the_master_and_rounded_once(self):
        master = np.array([2**-9, -(2**-9), 1.5, -1.0, 3.0e-3], np.float32)
        arrays = {key("a"): master.astype(bfloat16), key("a", "master"): master, key("a", "exp_avg"): master}
        _, found = mapped(NORM, arrays)
        assert found[key("b")].tobytes() == (master + np.float32(1)).astype(bfloat16).tobytes()
        assert found[key("b", "master")].tobytes() == (master + np.float32(1)).tobytes()
        assert found[key("b", "exp_avg")].tobytes() == master.tobytes()

    def test_without_a_master_it_is_computed_in_float32(self):
        weight = numbers(7).astype(bfloat16)
        _, found = mapped(NORM, {key("a"): weight})
        assert found[key("b")].tobytes() == (weight.astype(np.float32) + np.float32(1)).astype(bfloat16).tobytes()

    def test_the_way_back_subtracts(self):
        _, found = mapped(NORM, {key("b"): np.array([1.25, 0.0], np.float32)}, inverse=True)
        assert found[key("a")].tolist() == [0.25, -1.0]

    def test_the_dtype_of_a_side_is_that_of_the_weight_alone(self):
        text = '[[map]]\nleft = "a"\nright = "b"\ndtype = { right = "float32" }\n'
        weight = numbers(3).astype(bfloat16)
        _, found = mapped(text, {key("a"): weight, key("a", "exp_avg"): weight})
        assert found[key("b")].dtype == np.float32
        assert found[key("b", "exp_avg")].dtype == bfloat16


PADDED = """
[sizes]
V = "config.vocab_size"
pad = "config.pad"
[[map]]
left = { w = "(V pad) H" }
right = { v = "V H" }
"""
SIZES = {"vocab_size": 5, "pad": 3}


class TestPadding:
    def test_it_is_left_out_and_given_as_zeros(self):
        weight = numbers(8, 4)
        arrays = {key("w"): weight, key("w", "exp_avg"): weight}
        made, found = mapped(PADDED, arrays, SIZES)
        assert found[key("v")].tobytes() == found[key("v", "exp_avg")].tobytes() == weight[:5].tobytes()
        _, back = mapped(PADDED, found, SIZES, inverse=True)
        expected = np.concatenate([weight[:5], np.zeros((3, 4), np.float32)])
        assert back[key("w")].tobytes() == back[key("w", "exp_avg")].tobytes() == expected.tobytes()
        assert made.literals == {}

    def test_without_the_number_of_padded_rows_it_is_solved_on_the_way_out(self):
        _, found = mapped(PADDED, {key("w"): numbers(8, 4)}, {"vocab_size": 5})
        assert found[key("v")].shape == (5, 4)


TIED = '[tied]\n"head" = "embed"\n[[map]]\nleft = "e"\nright = "embed"\n[[map]]\nleft = "h"\nright = "head"\n'


ARE_TIED = {"tie_word_embeddings": True}


class TestTies:
    def test_the_tied_name_is_left_out_and_given_again(self):
        weight = numbers(3, 2)
        made, found = mapped(TIED, {key("e"): weight, key("h"): weight}, ARE_TIED)
        assert list(found) == [key("embed")]
        assert made.aliases == {"head": "embed"}
        recipe = parse_recipe(TIED, "r", "r.toml").inverse()
        back, _ = apply_recipe(stored(found)[0], recipe, ARE_TIED)
        assert (list(back.tensors), back.aliases) == ([key("e")], {"h": "e"})

    @pytest.mark.parametrize(("config", "tied"), [
        ({"model_type": "m"}, True),
        ({"model_type": "m", "tie_word_embeddings": False}, False),
        ({"model_type": "other"}, False),
        ({"model_type": "other", "text_config": {"tie_word_embeddings": True}}, True),
        (None, False),
    ])  # fmt: skip
    def test_models_of_the_recipe_are_tied_without_a_key(self, config, tied):
        weight = numbers(3, 2)
        made, _ = mapped(f'tied_by_default = ["m"]\n{TIED}', {key("e"): weight, key("h"): weight}, config)
        assert made.aliases == ({"head": "embed"} if tied else {})


QKV = '[sizes]\nR = 2\nD = 2\n[[map]]\nleft = { f = "G*(q:R*D k:D v:D)" }\nright = { q = "q", k = "k", v = "v" }\n'


class TestState:
    def separate(self, *steps: float) -> Arrays:
        arrays: Arrays = {}
        for name, size, step in zip("qkv", (8, 4, 4), steps, strict=True):
            arrays[key(name)] = numbers(size)
            arrays[key(name, "step")] = np.array(step, np.float32)
        return arrays

    def test_steps_of_tensors_that_become_one_must_be_equal(self):
        made, found = mapped(QKV, self.separate(3, 3, 3), inverse=True)
        assert found[key("f", "step")].tolist() == 3
        assert len(made.must_equal) == 2
        with pytest.raises(DifferenceError, match="step of q and of v"):
            mapped(QKV, self.separate(3, 3, 4), inverse=True)

    def test_names_in_parameter_groups_stand_where_the_first_of_them_was(self):
        text = f'others = "same"\n{QKV}'
        arrays: Arrays = {key("a"): numbers(1), key("f"): numbers(16), key("b"): numbers(1)}
        made, found = mapped(text, arrays, groups=(ParamGroup(("a", "f", "b"), {}),))
        assert made.groups[0].params == ("a", "q", "k", "v", "b")
        back, _ = mapped(text, found, groups=made.groups, inverse=True)
        assert back.groups[0].params == ("a", "f", "b")


EXPERTS = """
[[map]]
left = { w = "{expert} (gate:F up:F) H" }
right = { "{expert}.gate" = "H gate", "{expert}.up" = "up H" }
"""


@pytest.mark.parametrize("is_transposed", [False, True])
def test_parts_of_items_of_a_dcp_are_read_as_they_are_stored(tmp_path, is_transposed):
    """An item of a DCP holds all experts. torch stores one of a transposed tensor with its strides."""
    values = torch.arange(3 * 8 * 5, dtype=torch.float32).reshape(3, 8, 5)
    stored_as = values.permute(2, 0, 1).contiguous().permute(1, 2, 0) if is_transposed else values
    assert stored_as.is_contiguous() is not is_transposed
    with warnings.catch_warnings(action="ignore"):
        dcp.state_dict_saver.save({"w": stored_as}, checkpoint_id=tmp_path / "source", no_dist=True)
    recipe = tmp_path / "r.toml"
    recipe.write_text(EXPERTS)
    ckpt_tools.convert(tmp_path / "source", tmp_path / "out.pt", recipe=recipe)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = {f"{e}.gate": values[e, :4].T for e in range(3)} | {f"{e}.up": values[e, 4:] for e in range(3)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    report = ckpt_tools.verify(tmp_path / "source", tmp_path / "out.pt", recipe=recipe)
    assert report.num_tensors == 6


def test_tensors_of_two_dtypes_in_one_line_keep_their_own():
    text = """
    [[map]]
    left = { one = "(a:2 b:2)", two = "(c:2 d:2)" }
    right = { a = "a", b = "b", c = "c", d = "d" }
    """
    one, two = numbers(4), numbers(4, seed=1).astype(bfloat16)
    _, found = mapped(text, {key("one"): one, key("two"): two})
    assert {name.fqn: array.dtype for name, array in found.items()} == {
        "a": one.dtype,
        "b": one.dtype,
        "c": two.dtype,
        "d": two.dtype,
    }
    assert found[key("d")].tobytes() == two[2:].tobytes()
    with pytest.raises(UnsupportedError, match="one would be made of a and c, which are stored in two ways"):
        mapped(text.replace("a:2 b:2", "a:2 c:2").replace("c:2 d:2", "b:2 d:2"), found, inverse=True)


def test_padding_stands_beside_items_of_a_dcp(tmp_path):
    values = torch.arange(1.0, 21.0).reshape(5, 4)
    with warnings.catch_warnings(action="ignore"):
        dcp.state_dict_saver.save({"v": values}, checkpoint_id=tmp_path / "source", no_dist=True)
    recipe = tmp_path / "r.toml"
    recipe.write_text(PADDED.replace('"config.vocab_size"', "5").replace('"config.pad"', "3"))
    ckpt_tools.convert(tmp_path / "source", tmp_path / "out", to="dcp", world_size=3, recipe=recipe, inverse=True)
    found = {"w": torch.full((8, 4), torch.nan)}
    with warnings.catch_warnings(action="ignore"):
        dcp.state_dict_loader.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(found["w"], torch.cat([values, torch.zeros(3, 4)]))


def has_rows(tensor: StoredTensor) -> bool:
    return bool(tensor.elements.shape) and tensor.elements.size > 0


@settings(max_examples=40)
@given(stored_tensors().filter(has_rows), st.integers(1, 12))
def test_rows_that_are_left_out_or_zeros_are_those_of_the_array(tensor, rows):
    """On tensors in any sharding; the judge is numpy on the whole array."""
    wanted = np.zeros((rows, *tensor.elements.shape[1:]), tensor.elements.dtype)
    kept = min(rows, len(tensor.elements))
    wanted[:kept] = tensor.elements[:kept]
    store = MemoryStore({file: bytearray(data) for file, data in tensor.files.items()})
    made = resize_rows(tensor.entry, rows)
    assert made.shape == wanted.shape
    assert read_bytes(overlay_literals(store, {ZEROS_FILE: bytes(MAX_ITEM_BYTES)}), made) == wanted.tobytes()
    assert has_same_elements(made.shards, resize_rows(tensor.entry, rows).shards)
    assert not has_same_elements(resize_rows(tensor.entry, rows + 1).shards, made.shards)
