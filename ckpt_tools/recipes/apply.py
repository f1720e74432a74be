"""Applies a recipe: from a manifest in one naming to a manifest in the other, with its ties. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from glob import escape
from typing import Any

from ckpt_tools.core.manifest import WEIGHT, Manifest, StateKey
from ckpt_tools.core.matching import is_selected
from ckpt_tools.core.names import collect_model_names
from ckpt_tools.core.quantized import map_companions
from ckpt_tools.core.ties import make_tied_pair, read_tie_flag
from ckpt_tools.core.transforms import TransformResult, reassign_owners, select_tensors
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.recipes.groups import (
    choose_form,
    group_names,
    is_known_name,
    match_lines,
)
from ckpt_tools.recipes.manifest_builder import ManifestBuilder
from ckpt_tools.recipes.recipe import Recipe
from ckpt_tools.recipes.sizes import evaluate_bindings


def apply_recipe(manifest: Manifest, recipe: Recipe, config: Mapping[str, Any] | None) -> TransformResult:
    """The manifest in the names and shapes of ``recipe``'s right side. Sizes come from ``config``, the content of
    ``config.json``, and from shapes. ``must_equal`` of the result has what only the bytes can tell.

    Raises:
        UsageError: the recipe does not fit the checkpoint. IncompleteError: a tensor that it needs is missing.
        UnsupportedError: a tensor cannot follow, such as optimizer state of another shape than its weight.
    """
    # Ties are those of the recipe's right side.
    source = apply_recipe_ties(manifest, recipe, config) if recipe.is_inverse else manifest
    env = evaluate_bindings(recipe.bindings, config)
    recipe = choose_form(recipe.with_sizes(env), _list_model_names(source))
    names = _list_model_names(source)
    weight_by_companion = _find_companions(source, recipe, names)
    names = [name for name in names if name not in weight_by_companion]
    without_weight = {name for name in names if StateKey(name) not in source.tensors} - source.aliases.keys()
    builder = ManifestBuilder(source, recipe, group_names(names, recipe, without_weight), env, weight_by_companion)
    mapped_manifest, notes = builder.build_manifest(), tuple(builder.iter_notes())
    return mapped_manifest if recipe.is_inverse else apply_recipe_ties(mapped_manifest, recipe, config), notes


def _find_companions(manifest: Manifest, recipe: Recipe, names: Collection[str]) -> Mapping[str, str]:
    """The tensors that quantized weights need and no line has, each with its weight: they follow it."""
    weight_by_companion, owners = map_companions(manifest), frozenset(manifest.aliases.values())
    all_names = frozenset(names)
    return {
        companion: weight
        for companion, weight in weight_by_companion.items()
        if companion not in owners and not match_lines(companion, recipe, all_names)
    }


def _list_model_names(manifest: Manifest) -> list[str]:
    known_names = collect_model_names(manifest)
    return [*dict.fromkeys(key.fqn for key in manifest.tensors if key.fqn in known_names), *manifest.aliases]


def exclude_unknown(manifest: Manifest, recipe: Recipe, exclude: tuple[str, ...]) -> TransformResult:
    """The manifest without tensors whose names match a glob of ``exclude`` and are none that ``recipe`` takes."""
    names = _list_model_names(manifest) if exclude else []
    unknown = frozenset(
        name
        for name in names
        if not is_selected(name, (), exclude)
        and not any(is_known_name(name, form, names) for form in recipe.list_forms())
    )
    if not unknown:
        return manifest, ()
    known_manifest, notes = select_tensors(manifest, include=(), exclude=tuple(map(escape, sorted(unknown))))
    return replace(known_manifest, unreadable_names=known_manifest.unreadable_names | unknown), notes


def apply_recipe_ties(manifest: Manifest, recipe: Recipe, config: Mapping[str, Any] | None) -> Manifest:
    """The manifest, in the names of the recipe's right side, with its ties, if the configuration of the model says that
    it has them. There the tied name has no bytes of its own; on the way back it is given, since a live model has it,
    unless the left side has no such names.
    """
    if not recipe.tied_names or not read_tie_flag(config or {}, recipe.tied_by_default):
        return manifest
    manifest = reassign_owners(manifest, lambda name: name not in recipe.tied_names)
    tensors, aliases, equal_pairs = dict(manifest.tensors), dict(manifest.aliases), list(manifest.must_equal)
    for alias, owner in recipe.tied_names.items():
        alias_entry, owner_entry = tensors.get(StateKey(alias)), tensors.get(StateKey(owner))
        if owner_entry is None or alias in aliases:
            continue
        if alias_entry is not None:
            if alias_entry.shape != owner_entry.shape or alias_entry.dtype is not owner_entry.dtype:
                raise UnsupportedError(f"{alias} and {owner} are tied by config.json, and differ in shape or dtype")
            equal_pairs.append(make_tied_pair(f"{alias} and {owner}, which config.json ties", owner_entry, alias_entry))
            state = [key.slot for key in tensors if key.fqn == alias and key.slot != WEIGHT]
            if state:
                raise UnsupportedError(
                    f"{alias} is tied to {owner} by config.json, and has {join_names(state)} of its own"
                )
            del tensors[StateKey(alias)]
        aliases[alias] = owner
    groups = tuple(group.rename_params(aliases) for group in manifest.groups)
    if recipe.is_inverse and not recipe.has_left_ties:
        aliases = {alias: owner for alias, owner in aliases.items() if alias not in recipe.tied_names}
    return replace(manifest, tensors=tensors, aliases=aliases, groups=groups, must_equal=tuple(equal_pairs))
