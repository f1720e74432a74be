"""The ways to other names that may be those of a reference. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.core import transforms
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.names import MODEL_PREFIX, collect_model_names, zero_numbers
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.recipes.apply import apply_recipe
from ckpt_tools.recipes.families import HUB, Route, model_types, routes
from ckpt_tools.recipes.index import list_recipes
from ckpt_tools.recipes.like import AS_IT_IS, Way
from ckpt_tools.recipes.recipe import Recipe
from ckpt_tools.recipes.reference import Reference


def ways(manifest: Manifest, reference: Reference, *, has_recipe: bool) -> Iterator[Sequence[Way]]:
    """The ways to the names of ``reference``, the likelier ones first: none, without the prefix of a wrapper, and each
    of these after a recipe, unless the user named one. A ``config.json`` alone tells no names: then only recipes of its
    model that lead to the hub's are tried."""
    bare, types = list(_bare(manifest)), model_types(reference.config)
    # Of several that do the same, the one for most models is named.
    recipes = sorted(list_recipes(), key=lambda recipe: -len(recipe.models))
    of_model = [recipe for recipe in recipes if types & {*recipe.models}]
    if has_recipe:
        yield bare
    elif not reference.tensors:
        found = _after_each(bare, of_model, manifest)
        yield [_way(each, reference) for each in found if each.route.recipe.right == HUB]
    else:
        lenient, wanted = (
            list(_after_each(bare, map(_lenient, of_model), manifest)),
            frozenset(map(zero_numbers, reference.tensors)),
        )
        others = [recipe for recipe in recipes if not types & {*recipe.models}]
        yield [*bare, *(_way(each, reference) for each in lenient if _leads_to(each.route, wanted))]
        found = _after_each(bare, others, manifest)
        yield [_way(each, reference) for each in found if _leads_to(each.route, wanted)]
        yield [_way(each, reference) for each in lenient if not _leads_to(each.route, wanted)]


class _After(NamedTuple):
    """A recipe after a way."""

    way: Way
    route: Route


def _after_each(bare: Collection[Way], recipes: Iterable[Recipe], manifest: Manifest) -> Iterator[_After]:
    """Recipes that take the names after a way; of those that do the same, one."""
    recipes = list(recipes)
    for way in bare:
        seen = set[object]()
        for route in routes(collect_model_names(way.step(manifest)[0]), recipes):
            same = frozenset(replace(line, optional=True) for line in route.lines), route.made
            if same not in seen:
                seen.add(same)
                yield _After(way, route)


def _leads_to(route: Route, wanted: frozenset[str]) -> bool:
    """True if its names are those of the reference, except single tensors such as a tied head."""
    different = route.made ^ wanted
    return not any(part.isdecimal() for name in different for part in name.split("."))


def _lenient(recipe: Recipe) -> Recipe:
    """The recipe without the demand that each line has a tensor: what is missing is known from the reference."""
    lines, stacked = (tuple(replace(line, optional=True) for line in each) for each in (recipe.lines, recipe.stacked))
    return replace(recipe, lines=lines, stacked=stacked)


def _bare(manifest: Manifest) -> Iterator[Way]:
    yield AS_IT_IS
    bare, _ = transforms.strip_wrappers(manifest)
    names = collect_model_names(bare)
    if names != collect_model_names(manifest):
        yield Way("the prefixes of wrappers taken off", transforms.strip_wrappers)
    if names and all(name.startswith(MODEL_PREFIX) for name in names):
        yield Way(
            f"{MODEL_PREFIX} taken off",
            lambda manifest: transforms.strip_prefix(transforms.strip_wrappers(manifest)[0], MODEL_PREFIX),
        )


def _way(after: _After, reference: Reference) -> Way:
    way, recipe = after.way, after.route.recipe

    def step(manifest: Manifest) -> TransformResult:
        bare, notes = way.step(manifest)
        made, more = apply_recipe(bare, recipe, reference.config)
        return made, (*notes, *more)

    named = format_option("recipe", recipe.name) + (f" {format_option('inverse', True)}" if recipe.is_inverse else "")
    is_of_model = bool(model_types(reference.config) & {*recipe.models})
    return Way(f"{way.what} and {named}" if way.what else named, step, is_of_model)
