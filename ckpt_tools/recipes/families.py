"""Names of known families of models: which recipes take them, and what names these lead to. Pure.

Names are compared without their numbers, so that the 20,000 names of a model are a few dozen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ckpt_tools.core.names import zero_numbers
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.wording import join_names
from ckpt_tools.recipes.groups import matches, whole_lines
from ckpt_tools.recipes.index import list_recipes
from ckpt_tools.recipes.recipe import Line, Recipe

HUB = "hub"
"""The naming of files on the Hub, as recipes call it."""

LIVE = "transformers 5"
"""The naming of models in memory."""


@dataclass(frozen=True, slots=True)
class Route:
    """A recipe that takes the names of a checkpoint, by the ``lines`` that have one; ``made`` are the names that it
    makes. Numbers are 0 in them."""

    recipe: Recipe
    lines: frozenset[Line]
    made: frozenset[str]


def routes(names: Collection[str], recipes: Iterable[Recipe]) -> Iterator[Route]:
    """Those of ``recipes`` that take these names, read from left to right or from right to left."""
    patterns = set(map(zero_numbers, names))
    for recipe in recipes:
        for each in (recipe, recipe.inverse()):
            found = (_route(form, patterns) for form in each.forms())
            # Where the names that it makes are stacked, both forms take the names; `apply_recipe` chooses.
            yield from islice((replace(route, recipe=each) for route in found if route is not None), 1)


def _route(recipe: Recipe, names: Collection[str]) -> Route | None:
    """None if a line that is not optional has no name, or a name has no line and may not stay."""
    there, made = set[tuple[int, int]](), set[str]()
    for name in names:
        found = matches(name, recipe, names)
        there |= {(number, which) for number, which, _ in found}
        for number, _, values in found:
            for name_after in (pattern.name for pattern in recipe.lines[number].right):
                made.add(name_after.filled({each: values.get(each, "0") for each in name_after.variables}))
        is_dropped = any(pattern.match(name) is not None for pattern in recipe.drops[0])
        if not found and not is_dropped:
            if not recipe.keeps_others:
                return None
            made.add(name)
    lines = frozenset(recipe.lines[number] for number, _ in there)
    lacking = next(recipe.lacking(whole_lines(recipe, there)), None)
    return None if lacking is not None or not lines else Route(recipe, lines, frozenset(made))


def is_known(names: Collection[str]) -> bool:
    """True if a recipe is made for such names."""
    return any(map(_tells_family, routes(names, list_recipes())))


def _tells_family(route: Route) -> bool:
    """False if a recipe has no more of them than the name of one tensor, such as the head's, which many models have."""
    return any(pattern.name.variables for line in route.recipe.lines if not line.optional for pattern in line.left)


def model_types(config: Mapping[str, Any]) -> frozenset[str]:
    """Types of a model and its parts, by its ``config.json``."""
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    return frozenset(found for part in parts if isinstance(found := part.get("model_type"), str))


@dataclass(frozen=True, slots=True)
class Naming:
    """Whose names a checkpoint has, in words, and the recipes that lead to the hub's."""

    left: str
    of_model: str
    to_hub: tuple[str, ...]

    def __str__(self) -> str:
        shown = f"{self.left} ({self.of_model})" if self.of_model else self.left
        return f"{shown}; {self.way}" if self.to_hub else shown

    @property
    def way(self) -> str:
        """How the names of the hub are got."""
        if len(self.to_hub) == 1:
            return f"{format_option('recipe', self.to_hub[0])} gives those of the {HUB}"
        return f"{self.like}, and so does a recipe: one of {join_names(self.to_hub)}"

    @property
    def is_live(self) -> bool:
        """Whether they are those of a model of transformers in memory, which its ``from_pretrained`` takes."""
        return self.left == LIVE

    @property
    def like(self) -> str:
        return f"{format_option('like', 'FOLDER')} gives those of the {HUB}'s model in FOLDER"


def naming(names: Collection[str], config: Mapping[str, Any], recipes: Iterable[Recipe]) -> Naming | None:
    """The naming that a checkpoint has; None if none of ``recipes`` tells."""
    types = model_types(config)
    found = [
        route
        for route in routes(names, recipes)
        if (not types.isdisjoint(route.recipe.models) if types else _tells_family(route))
    ]
    # One that takes them both ways changes shapes alone, which names do not tell.
    times = Counter(each.recipe.name for each in found)
    told = [each.recipe for each in found if times[each.recipe.name] == 1]
    told.sort(key=lambda recipe: -len(recipe.models))
    if len({recipe.left for recipe in told}) != 1:
        return None
    of_model = ", ".join(sorted(types & {*told[0].models}))
    to_hub = tuple(recipe.name for recipe in told if recipe.right == HUB and not recipe.is_inverse)
    return Naming(told[0].left, of_model, to_hub)
