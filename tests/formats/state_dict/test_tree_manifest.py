"""Trees of state as manifests: what is kept of the places of things, so that a tree can be written back as it was."""

from typing import Any

import pytest

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, StateTree, TensorRef, TreePath
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.formats.state_dict.leaf import TensorLeaf
from ckpt_tools.formats.state_dict.parse import Leaves, manifest_of


def leaf(file: str = "a.bin") -> TensorLeaf:
    """Two float32 elements of a file."""
    table = ShardTable.build((2,), DType.FLOAT32, [Shard(Box.whole((2,)), ByteRange(file, 0, 8))])
    return TensorLeaf((2,), DType.FLOAT32, table)


def read(
    tensors: list[TreePath], objects: dict[TreePath, Any], ties: dict[TreePath, TreePath] | None = None
) -> Manifest:
    def name(path: TreePath) -> str:
        return ".".join(map(str, path))

    tied = {name(alias): name(owner) for alias, owner in (ties or {}).items()}
    leaves = Leaves(
        {name(path): path for path in [*tensors, *objects, *(ties or {})]},
        {name(path): leaf() for path in tensors},
        {name(path): value for path, value in objects.items()},
    )
    return manifest_of(leaves, format_name="dcp", model_key=None, optim_key=None, ties=tied)


WEIGHT: list[TreePath] = [("app", "model", "w")]
GROUP: dict[TreePath, Any] = {("app", "optim", "param_groups", 0, "params"): ["w"]}


def test_the_tree_says_where_everything_was():
    manifest = read(
        [*WEIGHT, ("app", "optim", "state", "w", "exp_avg")],
        {**GROUP, ("app", "epoch"): 3, ("app", "sched", "last_epoch"): 4, ("loader", "position"): 5},
    )
    homes: dict[str, TreePath] = {"epoch": ("app", "epoch"), "sched": ("app", "sched"), "loader": ("loader",)}
    assert manifest.tree == StateTree(("app", "model"), ("app", "optim"), False, homes)
    assert manifest.extra == {"epoch": 3, "sched": {"last_epoch": 4}, "loader": {"position": 5}}


def test_entries_of_one_name_at_two_places_stay_apart():
    manifest = read([*WEIGHT, ("app", "optim", "state", "w", "m")], {**GROUP, ("app", "step"): 3, ("step",): 4})
    assert sorted(manifest.extra.values()) == [3, 4]
    assert manifest.tree is not None
    assert {manifest.extra[name]: path for name, path in manifest.tree.extras.items()} == {
        3: ("app", "step"),
        4: ("step",),
    }


def test_a_flattened_optimizer():
    manifest = read(
        [("w",), ("optimizer", "state.w.exp_avg")],
        {("optimizer", "param_groups.w.lr"): 0.5},
    )
    assert manifest.tree == StateTree((), ("optimizer",), True, {})
    assert manifest.groups == (ParamGroup(("w",), {"lr": 0.5}),)


def test_positions_make_lists_and_other_numbers_names():
    manifest = read(
        [*WEIGHT, ("app", "rng", 0), ("app", "rng", 1)],
        {("app", "gaps", 1, "a"): 1, ("app", "gaps", 3, "a"): 3, ("app", "loaders", 0, "at"): 7},
    )
    rng = [TensorRef(StateKey(f"app.rng.{position}", "extra")) for position in (0, 1)]
    assert manifest.extra == {"rng": rng, "gaps": {"1": {"a": 1}, "3": {"a": 3}}, "loaders": [{"at": 7}]}


def test_dicts_that_were_one_object_stay_as_they_are():
    manifest = read(WEIGHT, {("app", "table"): {0: "a", 1: "b"}})
    assert manifest.extra == {"table": {0: "a", 1: "b"}}


@pytest.mark.parametrize(
    ("number", "dtype", "data"),
    [
        (7, DType.INT64, b"\7\0\0\0\0\0\0\0"),
        (0.5, DType.FLOAT64, b"\0\0\0\0\0\0\xe0?"),
        (True, DType.BOOL, b"\1"),
    ],
)
def test_state_that_is_a_number_is_a_tensor_in_a_literal_file(number, dtype, data):
    manifest = read(WEIGHT, {**GROUP, ("app", "optim", "state", "w", "step"): number})
    entry = manifest.tensors[StateKey("w", "step")]
    assert (entry.shape, entry.dtype) == ((), dtype)
    assert manifest.literals[entry.shards.files[0]] == data


def test_state_that_is_neither_tensor_nor_number_is_a_value_of_its_parameter():
    manifest = read(WEIGHT, {**GROUP, ("app", "optim", "state", "w", "momentum_buffer"): None})
    assert manifest.values == {StateKey("w", "momentum_buffer"): None}
    assert not manifest.extra


def test_state_that_is_a_list_is_one_value_whose_tensors_have_keys_by_their_places():
    path = ("app", "optim", "state", "w", "GG")
    manifest = read([*WEIGHT, (*path, 0)], {**GROUP, (*path, 1): None})
    key = StateKey("w", "GG.0")
    assert manifest.values == {StateKey("w", "GG"): [TensorRef(key), None]}
    assert manifest.tensors[key].kind is Kind.STATE


def test_a_hyperparameter_that_is_a_tensor_is_referred_to():
    manifest = read([*WEIGHT, ("app", "optim", "param_groups", 0, "lr")], GROUP)
    key = StateKey("param_groups.0", "lr")
    assert manifest.groups == (ParamGroup(("w",), {"lr": TensorRef(key)}),)
    assert key in manifest.tensors


def test_ties_of_weights_are_aliases_and_others_are_tensors_of_their_own():
    manifest = read(
        [*WEIGHT, ("app", "optim", "state", "w", "exp_avg")],
        GROUP,
        {("app", "model", "head"): ("app", "model", "w"), ("app", "snapshot"): ("app", "model", "w")},
    )
    key = StateKey("app.snapshot", "extra")
    assert manifest.aliases == {"head": "w"}
    assert manifest.extra == {"snapshot": TensorRef(key)}
    assert key in manifest.tensors
