"""Trees of state: where model and optimizer are, what an optimizer's numbers are proven to mean, and a manifest that
keeps the places of things, so that a tree can be written back as it was."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorRef, TreePath
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.state_tree.param_numbers import NumberedGroup, match_numbers
from ckpt_tools.state_tree.parse import TreeLeaves, build_manifest
from ckpt_tools.state_tree.prefixes import TreePrefixes, find_prefixes
from tests.support.refusals import refusal_test

# Where model and optimizer are


def paths(*found: str) -> dict[str, TreePath]:
    """Trees by the parts of their paths, which slashes separate; numbers are positions."""
    return {
        name.replace("/", "."): tuple(int(part) if part.isdigit() else part for part in name.split("/"))
        for name in found
    }


def found(tree: dict[str, TreePath], model_key: str | None = None, optim_key: str | None = None) -> TreePrefixes:
    sizes = {name: 10 for name in tree if "param_groups" not in name and "epoch" not in name}
    return find_prefixes(tree, sizes, model_key=model_key, optim_key=optim_key)


STATEFUL = paths(
    *("app/model/a.weight", "app/model/a.bias", "app/epoch"),
    *("app/optim/state/a.weight/exp_avg", "app/optim/state/a.weight/step"),
    *("app/optim/param_groups/0/lr", "app/optim/param_groups/0/params"),
)


def test_keys_override():
    assert found(paths("model/w", "ema/w"), model_key="ema") == TreePrefixes(("ema",), None)
    assert found(TWO_OPTIMIZERS, optim_key="d").optim == ("d",)


TWO_OPTIMIZERS = paths("g/param_groups/0/lr", "d/param_groups/0/lr", "model/w")
test_refused = refusal_test(
    ("a key that leads nowhere", lambda _: found(STATEFUL, model_key="nets"), UsageError, "model_key='nets'"),
    ("two optimizers", lambda _: found(TWO_OPTIMIZERS), UnsupportedError, "optim_key="),
)


# Numbers of an optimizer

MODEL: dict[str, Shape] = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (3, 4), "b.bias": (3,)}
SAME: dict[str, Shape] = {"a": (4,), "b": (4,)}
IN_ORDER = [NumberedGroup((0, 1, 2, 3))]


def shapes_of(*names: str) -> dict[int, Shape]:
    return {number: MODEL[name] for number, name in enumerate(names)}


NUMBERS: dict[str, tuple[list[NumberedGroup], dict[int, Shape], dict[str, Shape], list[str] | None]] = {
    "no state, and as many numbers": (IN_ORDER, {}, MODEL, list(MODEL)),
    "no state, and fewer numbers": ([NumberedGroup((0, 1, 2))], {}, MODEL, None),
    "groups that interleave": ([NumberedGroup((0, 1)), NumberedGroup((2, 3))],
        shapes_of("a.weight", "b.weight", "a.bias", "b.bias"), MODEL,
        ["a.weight", "b.weight", "a.bias", "b.bias"]),
    "another order": (IN_ORDER, shapes_of("b.weight", "b.bias", "a.weight", "a.bias"), MODEL, None),
    "frozen, of the same shape": ([NumberedGroup((0,))], {0: (4,)}, SAME, None),
    "groups of the same shape": ([NumberedGroup((0,)), NumberedGroup((1,))], {0: (4,), 1: (4,)}, SAME, None),
    "names": ([NumberedGroup((0, 1), ("b.bias", "a.weight"))], {0: (3,), 1: (4, 3)}, MODEL, ["b.bias", "a.weight"]),
    "names of other shapes": ([NumberedGroup((0, 1), ("b.bias", "a.weight"))], {0: (4,), 1: (4, 3)}, MODEL, None),
    "an unknown name": ([NumberedGroup((0,), ("c",))], {}, MODEL, None),
    "fewer names than numbers": ([NumberedGroup((0, 1), ("a.bias",))], {}, MODEL, None),
    "a number twice": ([NumberedGroup((0,), ("a.bias",)), NumberedGroup((0,), ("b.bias",))], {}, MODEL, None),
    "state of no number": (IN_ORDER, {**shapes_of(*MODEL), 4: (3,)}, MODEL, None),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_mean_what_is_proven(case):
    groups, shapes, model, names = NUMBERS[case]
    assert match_numbers(groups, shapes, model) == (None if names is None else dict(enumerate(names)))


@given(st.lists(st.sampled_from([(2,), (3,), (2, 3)]), max_size=7), st.data())
def test_what_is_found_is_what_the_optimizer_had(shapes, data):
    """Whatever is trained, in whatever groups of the model's order: the truth or nothing."""
    model = {f"p{number}": shape for number, shape in enumerate(shapes)}
    owners = data.draw(st.lists(st.integers(-1, 1), min_size=len(shapes), max_size=len(shapes)))
    members = [[name for name, owner in zip(model, owners, strict=True) if owner == group] for group in (0, 1)]
    order = [name for group in members for name in group]
    groups = [NumberedGroup(tuple(order.index(name) for name in group)) for group in members]
    found = match_numbers(groups, {number: model[name] for number, name in enumerate(order)}, model)
    assert found in (None, dict(enumerate(order)))


# Manifests of trees

NO_TIES: Mapping[str, str] = {}
STATE = "app/optim/state/w/"


def read(tensors: str, objects: Mapping[str, Any], ties: Mapping[str, str] = NO_TIES) -> Manifest:
    """Of tensors of two float32 elements, by paths with blanks between."""
    table = ShardTable.build((2,), DType.FLOAT32, [Shard(Box.whole((2,)), ByteRange("a.bin", 0, 8))])
    leaf = TensorLeaf((2,), DType.FLOAT32, table)
    leaves = TreeLeaves(
        paths(*tensors.split(), *objects, *ties),
        dict.fromkeys(paths(*tensors.split()), leaf),
        dict(zip(paths(*objects), objects.values(), strict=True)),
    )
    tied = {alias.replace("/", "."): owner.replace("/", ".") for alias, owner in ties.items()}
    return build_manifest(leaves, format_name="dcp", model_key=None, optim_key=None, ties=tied)


WEIGHT, GROUP = "app/model/w", {"app/optim/param_groups/0/params": ["w"]}
MOMENT = f"{WEIGHT} {STATE}exp_avg"


def test_entries_of_one_name_at_two_places_stay_apart():
    manifest = read(f"{WEIGHT} {STATE}m", {**GROUP, "app/step": 3, "step": 4})
    assert manifest.tree is not None
    homes = {manifest.extra[name]: path for name, path in manifest.tree.extras.items()}
    assert homes == {3: ("app", "step"), 4: ("step",)} and len(manifest.extra) == 2


def test_positions_make_lists_and_other_numbers_names():
    """Dicts that were one object stay as they are."""
    objects = {"app/gaps/1/a": 1, "app/gaps/3/a": 3, "app/loaders/0/at": 7, "app/table": {0: "a", 1: "b"}}
    manifest = read(f"{WEIGHT} app/rng/0 app/rng/1", objects)
    rng = [TensorRef(StateKey(f"app.rng.{position}", "extra")) for position in (0, 1)]
    gaps = {"1": {"a": 1}, "3": {"a": 3}}
    assert manifest.extra == {"rng": rng, "gaps": gaps, "loaders": [{"at": 7}], "table": {0: "a", 1: "b"}}


@pytest.mark.parametrize(
    ("number", "dtype", "data"),
    [(7, DType.INT64, b"\7\0\0\0\0\0\0\0"), (0.5, DType.FLOAT64, b"\0\0\0\0\0\0\xe0?"), (True, DType.BOOL, b"\1")],
)  # fmt: skip
def test_state_that_is_a_number_is_a_tensor_in_a_literal_file(number, dtype, data):
    manifest = read(WEIGHT, {**GROUP, f"{STATE}step": number})
    entry = manifest.tensors[StateKey("w", "step")]
    assert (entry.shape, entry.dtype) == ((), dtype)
    assert manifest.literals[entry.shards.files[0]] == data


def test_state_that_is_neither_tensor_nor_number_is_a_value_of_its_parameter():
    """A list is one value, whose tensors have keys by their places."""
    manifest = read(f"{WEIGHT} {STATE}GG/0", {**GROUP, f"{STATE}momentum_buffer": None, f"{STATE}GG/1": None})
    key = StateKey("w", "GG.0")
    assert manifest.values == {StateKey("w", "momentum_buffer"): None, StateKey("w", "GG"): [TensorRef(key), None]}
    assert not manifest.extra
    assert manifest.tensors[key].kind is Kind.STATE


def test_a_hyperparameter_that_is_a_tensor_is_referred_to():
    manifest = read(f"{WEIGHT} app/optim/param_groups/0/lr", GROUP)
    key = StateKey("param_groups.0", "lr")
    assert manifest.groups == (ParamGroup(("w",), {"lr": TensorRef(key)}),)
    assert key in manifest.tensors


def test_ties_of_weights_are_aliases_and_others_are_tensors_of_their_own():
    manifest = read(MOMENT, GROUP, {"app/model/head": WEIGHT, "app/snapshot": WEIGHT})
    key = StateKey("app.snapshot", "extra")
    assert manifest.aliases == {"head": "w"}
    assert manifest.extra == {"snapshot": TensorRef(key)}
    assert key in manifest.tensors
