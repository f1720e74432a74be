"""Where model and optimizer are found in the trees that people save."""

import pytest

from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.formats.state_dict.parse import Extra, Option, State, Tree, TreePath, Weight, find_tree, role_of


def paths(*found: TreePath) -> dict[str, TreePath]:
    return {".".join(map(str, path)): path for path in found}


def tensors(tree: dict[str, TreePath]) -> dict[str, int]:
    return {name: 10 for name, path in tree.items() if "param_groups" not in name and "epoch" not in name and path}


def found(tree: dict[str, TreePath], **keys: str | None) -> Tree:
    given = {"model_key": None, "optim_key": None, **keys}
    return find_tree(tree, tensors(tree), model_key=given["model_key"], optim_key=given["optim_key"])


STATEFUL = paths(
    ("app", "model", "a.weight"),
    ("app", "model", "a.bias"),
    ("app", "optim", "state", "a.weight", "exp_avg"),
    ("app", "optim", "state", "a.weight", "step"),
    ("app", "optim", "param_groups", 0, "lr"),
    ("app", "optim", "param_groups", 0, "params"),
    ("app", "epoch"),
)


def test_a_stateful_under_app():
    assert found(STATEFUL) == Tree(("app", "model"), ("app", "optim"))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("app", "model", "a.weight"), Weight("a.weight")),
        (("app", "model", "a", "weight"), Weight("a.weight")),
        (("app", "optim", "state", "a.weight", "exp_avg"), State("a.weight", "exp_avg")),
        (("app", "optim", "state", "a.weight", "shampoo", 0), State("a.weight", "shampoo.0")),
        (("app", "optim", "param_groups", 1, "lr"), Option(1, "lr")),
        (("app", "epoch"), Extra(("app", "epoch"))),
    ],
)
def test_places(path, expected):
    assert role_of(path, Tree(("app", "model"), ("app", "optim")), is_tensor=True) == expected


def test_an_object_beside_the_weights_is_no_weight():
    path = ("app", "model", "layer._extra_state")
    assert role_of(path, Tree(("app", "model"), None), is_tensor=False) == Extra(path)


def test_model_and_optimizer_side_by_side():
    tree = paths(
        ("model", "w"), ("optimizer", "state", "w", "exp_avg"), ("optimizer", "param_groups", 0, "lr"), ("ema", "w2")
    )
    assert found(tree) == Tree(("model",), ("optimizer",))


def test_the_optimizer_tells_the_model_from_its_average():
    tree = paths(("ema", "w.avg"), ("net", "w"), ("opt", "state", "w", "exp_avg"), ("opt", "param_groups", 0, "lr"))
    assert found(tree) == Tree(("net",), ("opt",))


def test_a_flat_model_alone():
    tree = paths(("a.weight",), ("b.weight",))
    assert found(tree) == Tree((), None)
    assert role_of(("a.weight",), found(tree), is_tensor=True) == Weight("a.weight")


def test_torchtitan_flattens_optimizer_and_model():
    tree = paths(
        ("layers.0.w",),
        ("optimizer", "state.layers.0.w.exp_avg"),
        ("optimizer", "param_groups.layers.0.w.lr"),
        ("train_state", "step"),
    )
    assert found(tree) == Tree((), ("optimizer",))
    assert role_of(("optimizer", "state.layers.0.w.exp_avg"), found(tree), is_tensor=True) == State(
        "layers.0.w", "exp_avg"
    )
    assert role_of(("optimizer", "param_groups.layers.0.w.lr"), found(tree), is_tensor=False) == Option(
        "layers.0.w", "lr"
    )
    assert role_of(("train_state", "step"), found(tree), is_tensor=True) == Extra(("train_state", "step"))


def test_keys_override():
    tree = paths(("model", "w"), ("ema", "w"))
    assert found(tree, model_key="ema") == Tree(("ema",), None)


def test_a_key_that_leads_nowhere():
    with pytest.raises(UsageError, match="model_key='nets'"):
        found(STATEFUL, model_key="nets")


def test_two_optimizers_need_a_choice():
    tree = paths(("g", "param_groups", 0, "lr"), ("d", "param_groups", 0, "lr"), ("model", "w"))
    with pytest.raises(UnsupportedError, match="optim_key="):
        found(tree)
    assert found(tree, optim_key="d").optim == ("d",)
