"""A line with `otherwise = true` takes the names that no other line has, in both directions."""

from __future__ import annotations

import pytest

from ckpt_tools.errors import UsageError
from ckpt_tools.recipes.groups import check_way_back, group_names, targets
from ckpt_tools.recipes.reading import parse_recipe
from ckpt_tools.recipes.recipe import Recipe

pytestmark = pytest.mark.quick

EXACT = '[[map]]\nleft = "model.norm"\nright = "backbone.norm_f"\n'
REST = '[[map]]\nleft = "model.{rest...}"\nright = "backbone.{rest...}"\n'
OTHERWISE = REST + "otherwise = true\n"


def recipe(*lines: str) -> Recipe:
    return parse_recipe("".join(lines), "r", "r.toml")


def renamed(names: list[str], by: Recipe) -> dict[str, str]:
    found = {}
    for group in group_names(names, by).groups:
        made = targets(group, {})
        check_way_back(group, made, by.inverse(), made.values())
        found[group.sources[0, ()]] = made[0, ()]
    return found


@pytest.mark.parametrize("lines", [(EXACT, OTHERWISE), (OTHERWISE, EXACT)], ids=["last", "first"])
def test_the_order_of_lines_does_not_count(lines):
    forth = {"model.norm": "backbone.norm_f", "model.x": "backbone.x", "model.a.b": "backbone.a.b"}
    assert renamed(list(forth), recipe(*lines)) == forth
    assert renamed(list(forth.values()), recipe(*lines).inverse()) == {new: old for old, new in forth.items()}


def test_two_plain_lines_for_one_name_are_refused():
    with pytest.raises(UsageError, match=r"two names of the recipe r match model\.norm"):
        group_names(["model.norm", "model.x"], recipe(EXACT, REST))


def test_two_such_lines_for_one_name_are_refused():
    more = '[[map]]\nleft = "{all...}"\nright = "b.{all...}"\notherwise = true\n'
    with pytest.raises(UsageError, match=r"two names of the recipe r match model\.x"):
        group_names(["model.x"], recipe(OTHERWISE, more))


def test_a_name_that_another_line_leads_to_is_refused():
    """Read backwards, backbone.norm_f is model.norm and not model.norm_f."""
    with pytest.raises(UsageError, match=r"model\.norm_f becomes backbone\.norm_f, .* \(by backbone\.norm_f\)"):
        renamed(["model.x", "model.norm", "model.norm_f"], recipe(EXACT, OTHERWISE))


@pytest.mark.parametrize(
    ("more", "why"),
    [("otherwise = 1\n", "otherwise = 1 is neither true nor false"), ("", "gives shapes; only a line of names")],
    ids=["not a flag", "with shapes"],
)
def test_it_is_for_lines_of_names(more, why):
    line = OTHERWISE.replace("otherwise = true\n", more) if more else EXACT
    if not more:
        line = '[[map]]\nleft = { a = "H F" }\nright = { b = "F H" }\notherwise = true\n'
    with pytest.raises(UsageError, match=why):
        recipe(line)
