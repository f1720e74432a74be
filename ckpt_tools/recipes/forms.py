"""The form of a recipe that fits a checkpoint: for single layers, or for layers stacked in one tensor. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckpt_tools.recipes.groups import match_lines
from ckpt_tools.recipes.recipe import Recipe


def choose_form(recipe: Recipe, names: Sequence[str]) -> Recipe:
    """The form whose left side has the most of ``names``. If the right side is the one with stacked layers, it is the
    stacked one where all layers have the same tensors, as Megatron-Core stores them.

    Source: Megatron-Core 0.16.1, ``transformer/transformer_block.py``, ``sharded_state_dict``.
    """
    if not recipe.stacked_lines:
        return recipe
    single, stacked = recipe.list_forms()
    all_names = frozenset(names)
    if _is_stacked_on_left(recipe):
        return max((single, stacked), key=lambda form: sum(bool(match_lines(name, form, all_names)) for name in names))
    return stacked if _has_same_tensors_in_layers(single, stacked, names) else single


def _is_stacked_on_left(recipe: Recipe) -> bool:
    """True if the left side is the one whose names lack the layer when stacked."""
    return any(
        [each.name.text for each in one.left] != [each.name.text for each in other.left]
        for one, other in zip(recipe.lines, recipe.stacked_lines, strict=True)
    )


def _has_same_tensors_in_layers(single: Recipe, stacked: Recipe, names: Collection[str]) -> bool:
    """True if each line of layers has the same ones."""
    all_names, layers_by_line = frozenset(names), dict[int, set[str]]()
    for name in names:
        for number, _, values in match_lines(name, single, all_names):
            variables = single.lines[number].shared_variables - stacked.lines[number].shared_variables
            for variable in variables:
                layers_by_line.setdefault(number, set()).add(values[variable])
    layers = list(layers_by_line.values())
    return all(each == layers[0] for each in layers[1:])
