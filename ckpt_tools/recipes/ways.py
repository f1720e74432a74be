"""Candidates of mappings from the names of a checkpoint to those of a reference. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.core import renaming
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.names import MODEL_PREFIX, collect_model_names, zero_numbers
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.recipes.apply import apply_recipe
from ckpt_tools.recipes.families import HUB_NAMING, RecipeRoute, find_model_types, find_routes
from ckpt_tools.recipes.index import list_recipes
from ckpt_tools.recipes.like import UNCHANGED_NAMES, NameMapping
from ckpt_tools.recipes.recipe import Recipe
from ckpt_tools.recipes.reference import Reference


def iter_mappings(manifest: Manifest, reference: Reference, *, has_recipe: bool) -> Iterator[Sequence[NameMapping]]:
    """Sets of mappings to the names of ``reference``, the likelier ones first: no change, the prefix of a wrapper taken
    off, and a recipe after either of these, unless the user named one. A ``config.json`` alone tells no names: then
    only recipes of its model that lead to the hub's names are candidates."""
    unwrap_mappings, model_types = list(_iter_unwrap_mappings(manifest)), find_model_types(reference.config)
    # Of several that do the same, the one for most models is named.
    recipes = sorted(list_recipes(), key=lambda recipe: -len(recipe.models))
    model_recipes = [recipe for recipe in recipes if model_types & {*recipe.models}]
    if has_recipe:
        yield unwrap_mappings
    elif not reference.tensors:
        combinations = _iter_recipes_after(unwrap_mappings, model_recipes, manifest)
        yield [_make_mapping(each, reference) for each in combinations if each.route.recipe.right == HUB_NAMING]
    else:
        # Lines of the model's own recipes may have no tensor: what is missing is known from the reference.
        lenient_recipes = [recipe.with_optional_lines() for recipe in model_recipes]
        other_recipes = [recipe for recipe in recipes if not model_types & {*recipe.models}]
        reference_names = frozenset(map(zero_numbers, reference.tensors))
        likely: list[NameMapping] = []
        unlikely: list[NameMapping] = []
        for each in _iter_recipes_after(unwrap_mappings, lenient_recipes, manifest):
            is_likely = _is_route_to(each.route, reference_names)
            (likely if is_likely else unlikely).append(_make_mapping(each, reference))
        yield [*unwrap_mappings, *likely]
        combinations = _iter_recipes_after(unwrap_mappings, other_recipes, manifest)
        yield [_make_mapping(each, reference) for each in combinations if _is_route_to(each.route, reference_names)]
        yield unlikely


class _MappingThenRecipe(NamedTuple):
    """A mapping, and a recipe that takes the names that it leads to."""

    mapping: NameMapping
    route: RecipeRoute


def _iter_recipes_after(
    mappings: Collection[NameMapping], recipes: Iterable[Recipe], manifest: Manifest
) -> Iterator[_MappingThenRecipe]:
    """Recipes that take the names after one of ``mappings``; of those with the same effect, the first."""
    recipes = list(recipes)
    for mapping in mappings:
        seen = set[object]()
        for route in find_routes(collect_model_names(mapping.apply(manifest)[0]), recipes):
            effect = frozenset(replace(line, is_optional=True) for line in route.matched_lines), route.target_names
            if effect not in seen:
                seen.add(effect)
                yield _MappingThenRecipe(mapping, route)


def _is_route_to(route: RecipeRoute, reference_names: frozenset[str]) -> bool:
    """True if its names are those of the reference, except single tensors such as a tied head."""
    different = route.target_names ^ reference_names
    return not any(part.isdecimal() for name in different for part in name.split("."))


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


def _make_mapping(combination: _MappingThenRecipe, reference: Reference) -> NameMapping:
    mapping, recipe = combination.mapping, combination.route.recipe

    def apply_both(manifest: Manifest) -> TransformResult:
        bare, notes = mapping.apply(manifest)
        made, more = apply_recipe(bare, recipe, reference.config)
        return made, (*notes, *more)

    option = format_option("recipe", recipe.name) + (f" {format_option('inverse', True)}" if recipe.is_inverse else "")
    is_of_model = bool(find_model_types(reference.config) & {*recipe.models})
    return NameMapping(
        f"{mapping.description} and {option}" if mapping.description else option, apply_both, is_of_model
    )
