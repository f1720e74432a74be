"""Lines for layers that are stacked, for any number of axes, beside other names, of other spellings, and counted; names
that no other line has; and tied tensors, whose names are both given, or which are refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import ParamGroup
from ckpt_tools.errors import DifferenceError, UnsupportedError, UsageError
from ckpt_tools.recipes.apply import apply_recipe
from ckpt_tools.recipes.groups import check_round_trip, group_names, list_target_names
from ckpt_tools.recipes.reading import parse_recipe
from ckpt_tools.recipes.recipe import Recipe
from tests.recipes.test_apply import Arrays, key, mapped, numbers, stored
from tests.support.refusals import refusal_test

STACKED = """
stacked = { left = ["layers.{layer}."] }
[[map]]
left = "embed"
right = "e"
[[map]]
left = "layers.{layer}.norm"
right = "l.{layer}.n"
[[map]]
left = { "layers.{layer}.qkv" = "(q:Q k:K) H" }
right = { "l.{layer}.q" = "q H", "l.{layer}.k" = "k H" }
[[map]]
left = { "layers.{layer}.experts" = "{expert} F H" }
right = { "l.{layer}.experts.{expert}" = "H F" }
optional = true
[sizes]
Q = "config.q"
"""


def bits(arrays: Arrays) -> dict[Any, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def there_and_back(text: str, arrays: Arrays, config: Any = None, *, inverse: bool = False, **more: Any) -> Arrays:
    """What the recipe makes of the arrays, of which the way back makes them again, bit for bit."""
    _, found = mapped(text, arrays, config, inverse=inverse, **more)
    _, back = mapped(text, found, config, inverse=not inverse)
    assert bits(back) == bits(arrays)
    return found


def parsed(text: str) -> Callable[[Path], object]:
    return lambda _: parse_recipe(text, "r", "r.toml")


def mapping(text: str, arrays: Arrays, config: Any = None, **more: Any) -> Callable[[Path], object]:
    return lambda _: mapped(text, arrays, config, **more)


def single(layers: int, experts: range | None = None) -> Arrays:
    """The right side, whose layers in ``experts`` have two experts."""
    found: Arrays = {key("e"): numbers(5)}
    for layer in range(layers):
        found |= {
            key(f"l.{layer}.n"): numbers(3, seed=layer),
            key(f"l.{layer}.q"): numbers(4, 3, seed=10 + layer),
            key(f"l.{layer}.k"): numbers(2, 3, seed=20 + layer),
        }
        for expert in range(2) if layer in (experts or ()) else ():
            found[key(f"l.{layer}.experts.{expert}")] = numbers(3, 6, seed=100 + 2 * layer + expert)
    return found


def test_alike_layers_become_one_tensor_and_are_taken_apart_again():
    arrays = single(3, range(3))
    found = there_and_back(STACKED, arrays, {"q": 4}, inverse=True)
    assert {str(name) for name in found} == {"embed", "layers.norm", "layers.qkv", "layers.experts"}
    assert found[key("layers.qkv")].shape == (3, 6, 3)
    assert found[key("layers.qkv")][1].tobytes() == arrays[key("l.1.q")].tobytes() + arrays[key("l.1.k")].tobytes()
    assert found[key("layers.experts")][2, 1].tobytes() == arrays[key("l.2.experts.1")].T.tobytes()


def test_layers_that_differ_stay_single():
    found = there_and_back(STACKED, single(3, range(1, 3)), {"q": 4}, inverse=True)
    assert {str(name) for name in found} >= {"layers.0.norm", "layers.2.qkv", "layers.1.experts"}


BESIDE_LAYERS = """
stacked = { left = ["layers.{layer}."] }
[[map]]
left = "layers.{layer}.norm"
right = "l.{layer}.n"
beside = { left = "embed" }
[[map]]
left = "embed"
right = "e"
optional = true
"""


def test_a_name_beside_stacked_layers_may_be_of_none():
    arrays = {key("embed"): numbers(5), key("layers.norm"): numbers(2, 3)}
    found = there_and_back(BESIDE_LAYERS, arrays)
    assert {str(name) for name in found} == {"e", "l.0.n", "l.1.n"}
    with pytest.raises(UsageError, match=r"layers\.norm"):
        mapped(BESIDE_LAYERS, {key("layers.norm"): numbers(2, 3)})


OF_EACH_INDEX = """
[[map]]
left = { w = "{n}*(a b) H" }
right = { "a.{n}" = "a:A H", "b.{n}" = "b:B H" }
[sizes]
A = "config.a"
B = "config.b"
"""


def test_sizes_of_the_other_side_are_those_of_each_index():
    array = numbers(6, 2)
    found = there_and_back(OF_EACH_INDEX, {key("w"): array}, {"a": 2, "b": 1})
    assert found[key("a.1")].tobytes() == array[3:5].tobytes()
    assert found[key("b.1")].tobytes() == array[5:].tobytes()


REST_OF_AXES = '[[map]]\nleft = { "a" = "{n} ..." }\nright = { "b.{n}" = "..." }\n'


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 3, 4, 5)])
def test_the_rest_is_as_many_axes_as_the_tensor_has(shape):
    array = numbers(*shape)
    found = there_and_back(REST_OF_AXES, {key("a"): array})
    assert [found[key(f"b.{n}")].tobytes() for n in range(2)] == [array[n].tobytes() for n in range(2)]
    assert found[key("b.0")].shape == shape[1:]


BESIDE = """
[[map]]
left = "{layer}.norm"
right = "{layer}.post"
beside = { right = "{layer}.mlp" }
optional = true
[[map]]
left = "{layer}.pre_norm"
right = "{layer}.post"
beside = { right = "{layer}.router" }
optional = true
[[map]]
left = "{layer}.mlp"
right = "{layer}.mlp"
optional = true
[[map]]
left = "{layer}.router"
right = "{layer}.router"
optional = true
"""


def test_a_name_beside_it_chooses_the_line():
    arrays = {key("0.norm"): numbers(2), key("0.mlp"): numbers(3), key("1.pre_norm"): numbers(4)}
    found = there_and_back(BESIDE, {**arrays, key("1.router"): numbers(5)})
    assert {str(name) for name in found} == {"0.post", "0.mlp", "1.post", "1.router"}


ONE_WAY = """
[[map]]
left = "new.{layer}"
right = "n.{layer}"
[[map]]
left = "old.{layer}"
right = "n.{layer}"
one_way = true
"""


def test_another_spelling_is_read_and_not_written():
    for name in ("old", "new"):
        _, found = mapped(ONE_WAY, {key(f"{name}.0"): numbers(2)})
        assert [str(each) for each in found] == ["n.0"]
        _, back = mapped(ONE_WAY, found, inverse=True)
        assert [str(each) for each in back] == ["new.0"]


COUNTED = """
[sizes]
L = "config.num_hidden_layers"
[[map]]
left = "layers.{layer}.w"
right = "h.{layer}.w"
[[map]]
left = "mtp.{i}.layer.w"
right = "h.{i+L}.w"
optional = true
[[map]]
left = "mtp.{i}.proj"
right = "h.{i+L}.proj"
optional = true
"""


COUNTED_NAMES = ("layers.0.w", "layers.1.w", "mtp.0.layer.w")
BY_NUMBER = {key(name): numbers(2, seed=n) for n, name in enumerate(COUNTED_NAMES)}


def test_numbers_count_from_a_size():
    found = there_and_back(COUNTED, BY_NUMBER, {"num_hidden_layers": 2})
    assert [str(name) for name in found] == ["h.0.w", "h.1.w", "h.2.w"]


def test_tied_names_may_take_the_same_new_shape():
    text = (
        '[sizes]\nV = "config.vocab_size"\n[[map]]\nleft = { a = "(V pad) H" }\nright = { x = "V H" }\n'
        '[[map]]\nleft = { b = "(V pad) H" }\nright = { y = "V H" }\n'
    )
    manifest, _ = stored({key("a"): numbers(8, 4)})
    tied = type(manifest)("test", manifest.tensors, aliases={"b": "a"})
    made, _ = apply_recipe(tied, parse_recipe(text, "r", "r.toml"), {"vocab_size": 5})
    assert made.aliases == {"y": "x"}


OF_STATE = """
[sizes]
Q = "config.q"
[[map]]
left = "q"
right = "hq"
[[map]]
left = "k"
right = "hk"
[[map]]
left = { "qk" = "(q:Q k:K) H" }
right = { "hq" = "q H", "hk" = "k H" }
of_state = true
"""


OF_WEIGHTS = {key("q"): numbers(4, 3), key("k"): numbers(2, 3, seed=1)}
STATE = {key("qk", slot): numbers(6, 3, seed=n) for n, slot in enumerate(("exp_avg", "exp_avg_sq"), 2)}


def test_state_of_other_names_joins_the_weights_and_is_parted_from_them_again():
    _, found = mapped(OF_STATE, {**OF_WEIGHTS, **STATE}, {"q": 4}, groups=(ParamGroup(("qk",), {}),))
    slots = [f"{name} ({slot})" for name in ("hq", "hk") for slot in ("exp_avg", "exp_avg_sq")]
    assert {str(name) for name in found} == {"hq", "hk", *slots}
    assert found[key("hk", "exp_avg")].tobytes() == STATE[key("qk", "exp_avg")][4:].tobytes()
    manifest, back = mapped(OF_STATE, found, {"q": 4}, inverse=True, groups=(ParamGroup(("hq", "hk"), {}),))
    assert bits(back) == bits({**OF_WEIGHTS, **STATE})
    assert manifest.groups[0].params == ("qk",)


def test_state_under_the_names_of_the_weights_is_read_too_and_weights_alone_need_none():
    arrays = {**OF_WEIGHTS, key("q", "exp_avg"): numbers(4, 3, seed=5), key("k", "exp_avg"): numbers(2, 3, seed=6)}
    _, found = mapped(OF_STATE, arrays, {"q": 4})
    assert found[key("hq", "exp_avg")].tobytes() == arrays[key("q", "exp_avg")].tobytes()
    there_and_back(OF_STATE, OF_WEIGHTS, {"q": 4})


AGAIN = """
[sizes]
L = "config.num_hidden_layers"
[[again]]
left = ["layers.{layer}.", "mtp.{i}.inner."]
right = ["h.{layer}.", "h.{i+L}."]
[[map]]
left = "embed"
right = "e"
[[map]]
left = { "layers.{layer}.w13" = "(gate:F up:F)" }
right = { "h.{layer}.w1" = "gate", "h.{layer}.w3" = "up" }
[[map]]
left = "layers.{layer}.norm"
right = "h.{layer}.n"
beside = { right = "h.{layer}.w1" }
"""


def test_lines_count_again_in_other_places_where_they_are():
    places = ("layers.0.", "mtp.0.inner.")
    arrays = {key(f"{prefix}w13"): numbers(4, seed=n) for n, prefix in enumerate(places)}
    arrays |= {key(f"{prefix}norm"): numbers(2, seed=n) for n, prefix in enumerate(places)}
    arrays[key("embed")] = numbers(3)
    found = there_and_back(AGAIN, arrays, {"num_hidden_layers": 1})
    assert {str(name) for name in found} == {"e", "h.0.w1", "h.0.w3", "h.0.n", "h.1.w1", "h.1.w3", "h.1.n"}
    assert found[key("h.1.w3")].tobytes() == arrays[key("mtp.0.inner.w13")][2:].tobytes()
    without = {name: array for name, array in arrays.items() if "mtp" not in name.fqn}
    _, found = mapped(AGAIN, without, {"num_hidden_layers": 1})
    assert {str(name) for name in found} == {"e", "h.0.w1", "h.0.w3", "h.0.n"}


@pytest.mark.parametrize("has_head", [False, True])
def test_a_left_side_without_ties_gets_no_tied_name(has_head):
    text = (
        'left_ties = false\ntied = { head = "embed" }\n'
        '[[map]]\nleft = "e"\nright = "embed"\n[[map]]\nleft = "h"\nright = "head"\noptional = true\n'
    )
    arrays = {key("embed"): numbers(3, 2)} | ({key("head"): numbers(3, 2)} if has_head else {})
    manifest, _ = stored(arrays)
    made, _ = apply_recipe(manifest, parse_recipe(text, "r", "r.toml").inverse(), {"tie_word_embeddings": True})
    assert [str(name) for name in made.tensors] == ["e"] and not made.aliases
    # Both are compared before anything is written.
    assert len(made.must_equal) == has_head
    back, _ = apply_recipe(made, parse_recipe(text, "r", "r.toml"), {"tie_word_embeddings": True})
    assert back.aliases == {"head": "embed"}


COPIES = """
copies = { "h.{layer}.embed" = "e" }
[[map]]
left = "embed"
right = "e"
"""


def test_copies_are_left_out_and_not_given_back():
    arrays = {key("e"): numbers(3, seed=1), key("h.4.embed"): numbers(3, seed=1)}
    _, found = mapped(COPIES, arrays, inverse=True)
    assert [str(name) for name in found] == ["embed"]
    _, back = mapped(COPIES, found)
    assert [str(name) for name in back] == ["e"]


AGAIN_LEFT = '["layers.{layer}.", "mtp.{i}.inner."]'

test_what_is_refused = refusal_test(
    ("a numbered name beside a stacked one", parsed(STACKED.replace('"layers.{layer}.qkv" = "(q:Q k:K) H"',
        '"layers.{layer}.q" = "q H", "keys.{layer}" = "k H"')), UsageError,
        r"keys\.\{layer\} stands beside stacked tensors and is not stacked"),
    ("a stacked prefix without a variable", parsed(STACKED.replace('["layers.{layer}."]', '["layers."]')), UsageError,
        r"stacked.left = 'layers\.' is not text such as"),
    ("a rest before other axes", parsed(REST_OF_AXES.replace("{n} ...", "... {n}")), UsageError,
        r"has \.\.\. before other axes"),
    ("an axis of a number", mapping(REST_OF_AXES, {key("a"): np.float32(1).reshape(())}), UsageError,
        "have different numbers of axes"),
    ("a variable beside", parsed(BESIDE.replace('{layer}.router" }', '{expert}.router" }')), UsageError,
        r"beside has \{expert\}, which \{layer\}.post does not have"),
    ("no size for a number", mapping(COUNTED, BY_NUMBER), UsageError,
        r"mtp.0.layer.w is numbered from L on .* name the folder of config.json"),
    # It would be read as a layer of the other kind.
    ("a layer beyond the size", mapping(COUNTED, {key(f"layers.{n}.w"): numbers(2) for n in range(3)},
        {"num_hidden_layers": 2}), UsageError, "would not read in the same way on the way back"),
    ("state of both names", mapping(OF_STATE, {**OF_WEIGHTS, **STATE, key("q", "exp_avg"): numbers(4, 3)}, {"q": 4}),
        UsageError, r"makes hq \(exp_avg\) of q and of qk; names must stay distinct"),
    ("one place", parsed(AGAIN.replace(AGAIN_LEFT, '["layers.{layer}."]')), UsageError,
        r"left = \['layers.\{layer\}.'\] under \[\[again\]\] is not a list of two"),
    ("a copy that differs", mapping(COPIES, {key("e"): numbers(3), key("h.4.embed"): numbers(3, seed=1)}, inverse=True),
        DifferenceError, r"h\.4\.embed and e, which it repeats"),
)  # fmt: skip


# Names that no other line has


EXACT = '[[map]]\nleft = "model.norm"\nright = "backbone.norm_f"\n'
REST = '[[map]]\nleft = "model.{rest...}"\nright = "backbone.{rest...}"\n'
OTHERWISE = REST + "otherwise = true\n"


def recipe(*lines: str) -> Recipe:
    return parse_recipe("".join(lines), "r", "r.toml")


def renamed(names: list[str], by: Recipe) -> dict[str, str]:
    found = {}
    for group in group_names(names, by).groups:
        made = list_target_names(group, {})
        check_round_trip(replace(group, target_names=made), by.inverse(), made.values())
        found[group.source_names[0, ()]] = made[0, ()]
    return found


@pytest.mark.parametrize("lines", [(EXACT, OTHERWISE), (OTHERWISE, EXACT)], ids=["last", "first"])
def test_the_order_of_lines_does_not_count(lines):
    forth = {"model.norm": "backbone.norm_f", "model.x": "backbone.x", "model.a.b": "backbone.a.b"}
    assert renamed(list(forth), recipe(*lines)) == forth
    assert renamed(list(forth.values()), recipe(*lines).inverse()) == {new: old for old, new in forth.items()}


ALL = '[[map]]\nleft = "{all...}"\nright = "b.{all...}"\notherwise = true\n'
SHAPED = '[[map]]\nleft = { a = "H F" }\nright = { b = "F H" }\notherwise = true\n'

test_lines_otherwise_that_are_refused = refusal_test(
    ("two plain lines for one name", lambda _: group_names(["model.norm", "model.x"], recipe(EXACT, REST)), UsageError,
        r"two names of the recipe r match model\.norm"),
    ("two such lines for one name", lambda _: group_names(["model.x"], recipe(OTHERWISE, ALL)), UsageError,
        r"two names of the recipe r match model\.x"),
    # Read backwards, backbone.norm_f is model.norm and not model.norm_f.
    ("what another line leads to",
        lambda _: renamed(["model.x", "model.norm", "model.norm_f"], recipe(EXACT, OTHERWISE)), UsageError,
        r"model\.norm_f becomes backbone\.norm_f, .* \(by backbone\.norm_f\)"),
    ("not a flag", lambda _: recipe(REST + "otherwise = 1\n"), UsageError, "otherwise = 1 is neither true nor false"),
    ("with shapes", lambda _: recipe(SHAPED), UsageError, "gives shapes; only a line of names"),
)  # fmt: skip


# Tied tensors of the source


HEAD = 'about = "a"\nleft = "a"\nright = "b"\n'


def line(left: str, right: str, more: str = "") -> str:
    return f"[[map]]\nleft = {left}\nright = {right}\n{more}\n"


def convert(folder: Path, recipe: str) -> None:
    """``a`` and ``b`` of a torch file, which share a storage, in the names of a recipe."""
    tied = torch.arange(6.0).reshape(3, 2)
    torch.save({"a": tied, "b": tied}, folder / "tied.pt")
    (folder / "mine.toml").write_text(HEAD + recipe)
    ckpt_tools.convert(folder / "tied.pt", folder / "out.pt", recipe=folder / "mine.toml")


def test_both_get_new_names(tmp_path):
    convert(tmp_path, line('"a"', '"x"') + line('"b"', '"y"'))
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() == {"x", "y"}
    assert found["x"].data_ptr() == found["y"].data_ptr()
    assert torch.equal(found["y"], torch.arange(6.0).reshape(3, 2))


def test_a_tied_name_that_is_dropped_is_gone(tmp_path):
    convert(tmp_path, 'drop = { left = ["b"] }\n' + line('"a"', '"x"'))
    assert torch.load(tmp_path / "out.pt").keys() == {"x"}


BROKEN = {
    "a new shape of the owner": line('{ a = "V H" }', '{ x = "H V" }') + line('"b"', '"y"'),
    "a new shape of the tied name": line('"a"', '"x"') + line('{ b = "V H" }', '{ y = "H V" }'),
    "both in one": line('{ a = "a:V H", b = "b:V H" }', '{ x = "(a:V b:V) H" }'),
    "a number added to the owner": line('"a"', '"x"', "add = 1") + line('"b"', '"y"'),
    "a number added to the owner, and the other kept": 'others = "same"\n' + line('"a"', '"x"', "add = 1"),
    "a dtype of the owner": line('"a"', '"x"', 'dtype = { right = "bfloat16" }') + line('"b"', '"y"'),
    "the owner dropped": 'drop = { left = ["a"] }\n' + line('"b"', '"y"'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_tie_that_would_break_is_refused(case, tmp_path):
    with pytest.raises(UnsupportedError, match="b is tied to"):
        convert(tmp_path, BROKEN[case])
    assert not (tmp_path / "out.pt").exists()
