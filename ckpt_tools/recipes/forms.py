"""The form of a recipe that fits a checkpoint: for single layers, or for layers stacked in one tensor. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckpt_tools.recipes.groups import matches
from ckpt_tools.recipes.recipe import Recipe


def chosen_form(recipe: Recipe, names: Sequence[str]) -> Recipe:
    """The form whose left side has the most of ``names``. If the right side is the one with stacked layers, it is the
    stacked one where all layers have the same tensors, as Megatron-Core stores them.

    Source: Megatron-Core 0.16.1, ``transformer/transformer_block.py``, ``sharded_state_dict``.
    """
    if not recipe.stacked:
        return recipe
    single, stacked = recipe.forms()
    there = frozenset(names)
    if _is_left(recipe):
        return max((single, stacked), key=lambda form: sum(bool(matches(name, form, there)) for name in names))
    return stacked if _are_alike(single, stacked, names) else single


def _is_left(recipe: Recipe) -> bool:
    """True if the left side is the one whose names lack the layer when stacked."""
    return any(
        [each.name.text for each in one.left] != [each.name.text for each in other.left]
        for one, other in zip(recipe.lines, recipe.stacked, strict=True)
    )


def _are_alike(single: Recipe, stacked: Recipe, names: Collection[str]) -> bool:
    """True if each line of layers has the same ones."""
    there, found = frozenset(names), dict[int, set[str]]()
    for name in names:
        for number, _, values in matches(name, single, there):
            variables = single.lines[number].shared - stacked.lines[number].shared
            for variable in variables:
                found.setdefault(number, set()).add(values[variable])
    layers = list(found.values())
    return all(each == layers[0] for each in layers[1:])
