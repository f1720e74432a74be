"""Whose names the tensors of a checkpoint have, as recipes tell it.

Reading all built-in recipes takes longer than reading the headers of most checkpoints. So only those are read whose
text has patterns that the names may match (``recipes.pages``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.names import (
    MODEL_PREFIX,
    WRAPPER_PARTS,
    find_shared_wrappers,
    has_model_attribute_prefix,
    map_to_bare_names,
)
from ckpt_tools.core.option_names import format_option
from ckpt_tools.recipes.pages import find_likely_pages
from ckpt_tools.stores.source import Source

if TYPE_CHECKING:
    from ckpt_tools.recipes.search import Naming


def detect_naming(
    source: Source, manifest: Manifest, name_shapes: Collection[str], config: Mapping[str, Any] | None = None
) -> Naming | None:
    """The naming of a manifest with names of these shapes (``collect_name_shapes``), by ``config.json`` if there is
    one; None if no built-in recipe tells it."""
    likely_pages = find_likely_pages(name_shapes)
    if not likely_pages:
        return None
    from ckpt_tools.reading.model_files import read_nearest_config
    from ckpt_tools.recipes.index import load_recipe
    from ckpt_tools.recipes.search import recognize_naming

    config = read_nearest_config(source, manifest) if config is None else config
    return recognize_naming(name_shapes, config, map(load_recipe, likely_pages))


def find_options_to_live_model(config: Mapping[str, Any]) -> str:
    """The options that lead from the hub's names to those of the model of ``config.json`` in memory; empty if they are
    the same, or no recipe is known."""
    from ckpt_tools.recipes.index import list_recipes
    from ckpt_tools.recipes.search import TRANSFORMERS_NAMING, find_model_types

    for model_type in sorted(find_model_types(config)):
        if any(model_type in recipe.models and recipe.left == TRANSFORMERS_NAMING for recipe in list_recipes()):
            return f"{format_option('recipe', model_type)} {format_option('inverse', True)}"
    return ""


def find_wrapper_parts(names: Collection[str]) -> tuple[str, ...]:
    """Parts that wrappers put into names, or into their shapes, and prefixes outside the model's names."""
    shared_parts = dict.fromkeys(find_shared_wrappers(names).split(".")[:-1])
    parts = [part for part in WRAPPER_PARTS if any(part in name.split(".") for name in names)]
    outer_prefixes = (
        [MODEL_PREFIX.removesuffix(".")]
        if has_model_attribute_prefix(map_to_bare_names(names).values(), _are_known)
        else []
    )
    return (*shared_parts, *parts, *outer_prefixes)


def _are_known(names: Collection[str]) -> bool:
    if not find_likely_pages(names):
        return False
    from ckpt_tools.recipes.search import are_known_names

    return are_known_names(names)
