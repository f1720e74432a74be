"""Recipes that fit a checkpoint or a reference, found by names alone. Pure.

A recipe takes names if each has a line, and each line that needs a name has one; then it leads to other names
(``RecipeRoute``). Of this follows whose names a checkpoint has (``recognize_naming``), and by which recipes they may
become those of a reference (``iter_mappings``). Names are compared without their numbers, so that the 20,000 names of a
model are a few dozen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ckpt_tools.core import renaming
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.names import MODEL_PREFIX, collect_model_names, zero_numbers
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.messages.wording import join_names
from ckpt_tools.recipes.apply import apply_recipe
from ckpt_tools.recipes.groups import match_lines
from ckpt_tools.recipes.index import list_recipes
from ckpt_tools.recipes.like import UNCHANGED_NAMES, NameMapping, Reference
from ckpt_tools.recipes.recipe import Recipe, RecipeLine

HUB_NAMING = "hub"
"""The naming of files on the Hub, as recipes call it."""

TRANSFORMERS_NAMING = "transformers 5"
"""The naming of models in memory."""


@dataclass(frozen=True, slots=True)
class RecipeRoute:
    """A recipe that takes the names of a checkpoint: ``matched_lines`` are its lines that have one, ``target_names``
    the names that it makes, in which numbers are 0."""

    recipe: Recipe
    matched_lines: frozenset[RecipeLine]
    target_names: frozenset[str]

    def leads_to(self, reference_names: frozenset[str]) -> bool:
        """True if its names are those of the reference, except single tensors such as a tied head."""
        different = self.target_names ^ reference_names
        return not any(part.isdecimal() for name in different for part in name.split("."))


def find_routes(names: Collection[str], recipes: Iterable[Recipe]) -> Iterator[RecipeRoute]:
    """A route for each of ``recipes`` that takes ``names``, read from left to right or from right to left."""
    patterns = set(map(zero_numbers, names))
    for recipe in recipes:
        for each in (recipe, recipe.inverse()):
            found = (_find_route(form, patterns) for form in each.list_forms())
            # Where the names that it makes are stacked, both forms take the names; `apply_recipe` chooses.
            yield from islice((replace(route, recipe=each) for route in found if route is not None), 1)


def _find_route(recipe: Recipe, names: Collection[str]) -> RecipeRoute | None:
    """The route of ``recipe`` for ``names``; None if a line that is not optional has no name, or a name has no line and
    may not stay."""
    matched_patterns, target_names = set[tuple[int, int]](), set[str]()
    for name in names:
        line_matches = match_lines(name, recipe, names)
        matched_patterns |= {each[:2] for each in line_matches}
        for each in line_matches:
            for pattern in (pattern.name for pattern in each.line.right):
                target_names.add(pattern.fill_variables({v: each.values.get(v, "0") for v in pattern.variables}))
        if not line_matches and not recipe.does_drop(name):
            if not recipe.does_keep_unmatched:
                return None
            target_names.add(name)
    if not matched_patterns or not recipe.has_required_lines(matched_patterns):
        return None
    matched_lines = frozenset(recipe.lines[number] for number, _ in matched_patterns)
    return RecipeRoute(recipe, matched_lines, frozenset(target_names))


def are_known_names(names: Collection[str]) -> bool:
    """True if a recipe is made for such names."""
    return any(map(_is_specific, find_routes(names, list_recipes())))


def _is_specific(route: RecipeRoute) -> bool:
    """False if a recipe has no more of them than the name of one tensor, such as the head's, which many models have."""
    return any(pattern.name.variables for line in route.recipe.lines if not line.is_optional for pattern in line.left)


def find_model_types(config: Mapping[str, Any]) -> frozenset[str]:
    """Types of a model and its parts, by its ``config.json``."""
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    return frozenset(found for part in parts if isinstance(found := part.get("model_type"), str))


@dataclass(frozen=True, slots=True)
class Naming:
    """Whose names a checkpoint has, in words, and the recipes that lead to the hub's."""

    name: str
    model_types: str
    recipes_to_hub: tuple[str, ...]

    def __str__(self) -> str:
        shown = f"{self.name} ({self.model_types})" if self.model_types else self.name
        return f"{shown}; {self.recipe_advice}" if self.recipes_to_hub else shown

    @property
    def recipe_advice(self) -> str:
        """Advice on a recipe that gives the names of the hub."""
        if len(self.recipes_to_hub) == 1:
            return f"{format_option('recipe', self.recipes_to_hub[0])} gives those of the {HUB_NAMING}"
        return f"{self.reference_advice}, and so does a recipe: one of {join_names(self.recipes_to_hub)}"

    @property
    def is_live(self) -> bool:
        """Whether they are those of a model of transformers in memory, which its ``from_pretrained`` takes."""
        return self.name == TRANSFORMERS_NAMING

    @property
    def reference_advice(self) -> str:
        return f"{format_option('like', 'FOLDER')} gives those of the {HUB_NAMING}'s model in FOLDER"


def recognize_naming(names: Collection[str], config: Mapping[str, Any], recipes: Iterable[Recipe]) -> Naming | None:
    """The naming that a checkpoint has; None if none of ``recipes`` tells."""
    types = find_model_types(config)
    matching_routes = [
        route
        for route in find_routes(names, recipes)
        if (not types.isdisjoint(route.recipe.models) if types else _is_specific(route))
    ]
    # One that takes them both ways changes shapes alone, which names do not tell.
    num_routes = Counter(each.recipe.name for each in matching_routes)
    one_way_recipes = [each.recipe for each in matching_routes if num_routes[each.recipe.name] == 1]
    one_way_recipes.sort(key=lambda each: -len(each.models))
    if len({each.left for each in one_way_recipes}) != 1:
        return None
    model_types = ", ".join(sorted(types & {*one_way_recipes[0].models}))
    recipes_to_hub = tuple(each.name for each in one_way_recipes if each.right == HUB_NAMING and not each.is_inverse)
    return Naming(one_way_recipes[0].left, model_types, recipes_to_hub)


def iter_mappings(manifest: Manifest, reference: Reference, *, has_recipe: bool) -> Iterator[Sequence[NameMapping]]:
    """Sets of mappings to the names of ``reference``, the likelier ones first: no change, the prefix of a wrapper taken
    off, and a recipe after either of these, unless the user named one. A ``config.json`` alone tells no names: then
    recipes of its model that lead to the hub's names are candidates, and no change if there are none."""
    model_types, reference_names = find_model_types(reference.config), frozenset(map(zero_numbers, reference.tensors))
    unwrap_mappings = list(_iter_unwrap_mappings(manifest))
    # Of several that do the same, the one for most models is named.
    recipes = sorted(list_recipes(), key=lambda recipe: -len(recipe.models))
    model_recipes = [recipe for recipe in recipes if model_types & {*recipe.models}]

    def find_mappings(recipes: Iterable[Recipe]) -> Iterator[tuple[RecipeRoute, NameMapping]]:
        """Recipes that take the names after an unwrapping; of those with the same effect, the first."""
        for unwrap in unwrap_mappings:
            seen = set[object]()
            for route in find_routes(collect_model_names(unwrap.apply(manifest)[0]), recipes):
                effect = frozenset(replace(line, is_optional=True) for line in route.matched_lines), route.target_names
                if effect not in seen:
                    seen.add(effect)
                    is_for_model = bool(model_types & {*route.recipe.models})
                    yield route, _make_mapping(unwrap, route.recipe, reference.config, is_for_model)

    if not reference.tensors:
        found = [] if has_recipe else list(find_mappings(model_recipes))
        yield [each for route, each in found if route.recipe.right == HUB_NAMING] or [UNCHANGED_NAMES]
        return
    if has_recipe:
        yield unwrap_mappings
        return
    # Lines of the model's own recipes may have no tensor: what is missing is known from the reference.
    of_model = list(find_mappings([recipe.with_optional_lines() for recipe in model_recipes]))
    yield [*unwrap_mappings, *(each for route, each in of_model if route.leads_to(reference_names))]
    of_others = find_mappings([recipe for recipe in recipes if not model_types & {*recipe.models}])
    yield [each for route, each in of_others if route.leads_to(reference_names)]
    yield [each for route, each in of_model if not route.leads_to(reference_names)]


def _iter_unwrap_mappings(manifest: Manifest) -> Iterator[NameMapping]:
    yield UNCHANGED_NAMES
    bare, _ = renaming.strip_wrappers(manifest)
    names = collect_model_names(bare)
    if names != collect_model_names(manifest):
        yield NameMapping("the prefixes of wrappers taken off", renaming.strip_wrappers)
    if names and all(name.startswith(MODEL_PREFIX) for name in names):
        yield NameMapping(
            f"{MODEL_PREFIX} taken off",
            lambda manifest: renaming.strip_prefix(renaming.strip_wrappers(manifest)[0], MODEL_PREFIX),
        )


def _make_mapping(unwrap: NameMapping, recipe: Recipe, config: Mapping[str, Any], is_for_model: bool) -> NameMapping:
    """``unwrap``, and then ``recipe``."""

    def apply_both(manifest: Manifest) -> TransformResult:
        bare, notes = unwrap.apply(manifest)
        made, more = apply_recipe(bare, recipe, config)
        return made, (*notes, *more)

    option = format_option("recipe", recipe.name) + (f" {format_option('inverse', True)}" if recipe.is_inverse else "")
    return NameMapping(f"{unwrap.description} and {option}" if unwrap.description else option, apply_both, is_for_model)
