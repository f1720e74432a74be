"""Whose names the tensors of a checkpoint have, as recipes tell it.

Reading all built-in recipes takes longer than reading the headers of most checkpoints. So their text is searched first,
and only those whose names may be the checkpoint's are read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.names import (
    MODEL_PREFIX,
    WRAPPER_PARTS,
    collect_model_names,
    find_shared_wrappers,
    has_model_attribute_prefix,
    map_to_bare_names,
    zero_numbers,
)
from ckpt_tools.core.option_names import format_option
from ckpt_tools.stores.source import Source

if TYPE_CHECKING:
    from ckpt_tools.recipes.families import Naming

_STACKED_KEY = re.compile(r'^stacked\s*=\s*\{\s*(left|right)\s*=\s*\["([^"]+)"\]', re.MULTILINE)
_RIGHT_KEY = re.compile(r"^right\s*=.*$", re.MULTILINE)

_BUILT_IN_FOLDER = Path(__file__).parents[1] / "recipes" / "builtin"


def detect_naming(source: Source, manifest: Manifest, config: Mapping[str, Any] | None = None) -> Naming | None:
    """The naming, by ``config.json`` if there is one; None if no built-in recipe tells it."""
    names = collect_model_names(manifest)
    paths = list(_iter_likely_recipes(names))
    if not paths:
        return None
    from ckpt_tools.reading.model_files import read_nearest_config
    from ckpt_tools.recipes.families import recognize_naming
    from ckpt_tools.recipes.reading import read_recipe

    return recognize_naming(
        names, read_nearest_config(source, manifest) if config is None else config, map(read_recipe, paths)
    )


def find_options_to_live_model(config: Mapping[str, Any]) -> str:
    """The options that lead from the hub's names to those of the model of ``config.json`` in memory; empty if they are
    the same, or no recipe is known."""
    from ckpt_tools.recipes.families import TRANSFORMERS_NAMING, find_model_types
    from ckpt_tools.recipes.index import list_recipes

    for model_type in sorted(find_model_types(config)):
        if any(model_type in recipe.models and recipe.left == TRANSFORMERS_NAMING for recipe in list_recipes()):
            return f"{format_option('recipe', model_type)} {format_option('inverse', True)}"
    return ""


def find_wrapper_parts(manifest: Manifest) -> tuple[str, ...]:
    """Parts that wrappers put into names, and prefixes outside the model's names."""
    names = collect_model_names(manifest)
    shared_parts = dict.fromkeys(find_shared_wrappers(names).split(".")[:-1])
    parts = [part for part in WRAPPER_PARTS if any(part in name.split(".") for name in names)]
    outer_prefixes = (
        [MODEL_PREFIX.removesuffix(".")]
        if has_model_attribute_prefix(map_to_bare_names(names).values(), _are_known)
        else []
    )
    return (*shared_parts, *parts, *outer_prefixes)


def _are_known(names: Collection[str]) -> bool:
    paths = list(_iter_likely_recipes(names))
    if not paths:
        return False
    from ckpt_tools.recipes.families import are_known_names

    return are_known_names(names)


def _iter_likely_recipes(names: Collection[str]) -> Iterator[Path]:
    """The built-in recipes that may be made for such names, by the text of their patterns between variables."""
    name_shapes = set(map(zero_numbers, names))
    for path in sorted(_BUILT_IN_FOLDER.glob("*.toml")):
        head, *lines = path.read_text().split("[[map]]")
        stacked_match = _STACKED_KEY.search(head)
        if any(
            _may_match_all(
                _select_required_lines(lines),
                side,
                name_shapes,
                stacked_match[2] if stacked_match is not None and stacked_match[1] == side else None,
            )
            for side in ("left", "right")
        ):
            yield path


def _select_required_lines(lines: Collection[str]) -> list[str]:
    """The lines that need a tensor: they are not optional, and have no other spelling."""
    alternative_sides = {found[0] for line in lines if "one_way = true" in line and (found := _RIGHT_KEY.search(line))}
    optional_marks = ("optional = true", "one_way = true", *alternative_sides)
    return [line for line in lines if not any(text in line for text in optional_marks)]


def _may_match_all(lines: Collection[str], side: str, names: Collection[str], stacked_prefix: str | None) -> bool:
    """``stacked_prefix`` is the beginning of names that layers stacked in one tensor have without its variable."""
    patterns = [pattern for line in lines for pattern in _parse_patterns(line, side)]
    return any("{" in each for each in patterns) and all(
        _may_match(pattern, names)
        or (
            stacked_prefix is not None
            and pattern.startswith(stacked_prefix)
            and _may_match(_make_stacked_pattern(pattern, stacked_prefix), names)
        )
        for pattern in patterns
    )


def _make_stacked_pattern(pattern: str, stacked_prefix: str) -> str:
    return stacked_prefix.partition("{")[0] + pattern.removeprefix(stacked_prefix)


def _parse_patterns(line: str, side: str) -> list[str]:
    """The names of a side of a line of ``[[map]]``, which built-in recipes write in one line of text."""
    side_match = re.search(rf"^{side}\s*=\s*(.*)$", line, re.MULTILINE)
    if side_match is None:
        return []
    names_with_shapes = re.findall(r'"([^"]+)"\s*=', side_match[1])
    return names_with_shapes or re.findall(r'"([^"]+)"', side_match[1])


def _may_match(pattern: str, names: Collection[str]) -> bool:
    if "{" not in pattern:
        return pattern in names
    head, *middle, tail = re.split(r"\{[^}]*\}", pattern)
    return any(
        len(name) >= len(head) + len(tail)
        and name.startswith(head)
        and name.endswith(tail)
        and all(part in name for part in middle)
        for name in names
    )
