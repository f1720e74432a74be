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

_STACKED = re.compile(r'^stacked\s*=\s*\{\s*(left|right)\s*=\s*\["([^"]+)"\]', re.MULTILINE)
_RIGHT = re.compile(r"^right\s*=.*$", re.MULTILINE)

_BUILT_IN = Path(__file__).parents[1] / "recipes" / "builtin"


def naming_of(source: Source, manifest: Manifest, config: Mapping[str, Any] | None = None) -> Naming | None:
    """The naming, by ``config.json`` if there is one; None if no built-in recipe tells it."""
    names = collect_model_names(manifest)
    paths = list(_likely(names))
    if not paths:
        return None
    from ckpt_tools.reading.model_files import config_beside
    from ckpt_tools.recipes.families import naming
    from ckpt_tools.recipes.reading import read_recipe

    return naming(names, config_beside(source, manifest) if config is None else config, map(read_recipe, paths))


def way_to_live(config: Mapping[str, Any]) -> str:
    """The options that lead from the hub's names to those of the model of ``config.json`` in memory; empty if they are
    the same, or no recipe is known."""
    from ckpt_tools.recipes.families import LIVE, model_types
    from ckpt_tools.recipes.index import list_recipes

    for model_type in sorted(model_types(config)):
        if any(model_type in recipe.models and recipe.left == LIVE for recipe in list_recipes()):
            return f"{format_option('recipe', model_type)} {format_option('inverse', True)}"
    return ""


def wrapping_of(manifest: Manifest) -> tuple[str, ...]:
    """Parts that wrappers put into names, and prefixes outside the model's names."""
    names = collect_model_names(manifest)
    shared = dict.fromkeys(find_shared_wrappers(names).split(".")[:-1])
    parts = [part for part in WRAPPER_PARTS if any(part in name.split(".") for name in names)]
    outer = (
        [MODEL_PREFIX.removesuffix(".")]
        if has_model_attribute_prefix(map_to_bare_names(names).values(), _is_known)
        else []
    )
    return (*shared, *parts, *outer)


def _is_known(names: Collection[str]) -> bool:
    paths = list(_likely(names))
    if not paths:
        return False
    from ckpt_tools.recipes.families import is_known

    return is_known(names)


def _likely(names: Collection[str]) -> Iterator[Path]:
    """The built-in recipes that may be made for such names, by the text of their patterns between variables."""
    shapes = set(map(zero_numbers, names))
    for path in sorted(_BUILT_IN.glob("*.toml")):
        head, *lines = path.read_text().split("[[map]]")
        stacked = _STACKED.search(head)
        if any(
            _may_take(_needed(lines), side, shapes, stacked[2] if stacked is not None and stacked[1] == side else None)
            for side in ("left", "right")
        ):
            yield path


def _needed(lines: Collection[str]) -> list[str]:
    """The lines that need a tensor: they are not optional, and have no other spelling."""
    spelled = {found[0] for line in lines if "one_way = true" in line and (found := _RIGHT.search(line))}
    no = ("optional = true", "one_way = true", *spelled)
    return [line for line in lines if not any(text in line for text in no)]


def _may_take(lines: Collection[str], side: str, names: Collection[str], stacked: str | None) -> bool:
    """``stacked`` is the beginning of names that layers stacked in one tensor have without its variable."""
    patterns = [pattern for line in lines for pattern in _patterns(line, side)]
    return any("{" in each for each in patterns) and all(
        _may_match(pattern, names)
        or (stacked is not None and pattern.startswith(stacked) and _may_match(_stacked(pattern, stacked), names))
        for pattern in patterns
    )


def _stacked(pattern: str, stacked: str) -> str:
    return stacked.partition("{")[0] + pattern.removeprefix(stacked)


def _patterns(line: str, side: str) -> list[str]:
    """The names of a side of a line of ``[[map]]``, which built-in recipes write in one line of text."""
    found = re.search(rf"^{side}\s*=\s*(.*)$", line, re.MULTILINE)
    if found is None:
        return []
    several = re.findall(r'"([^"]+)"\s*=', found[1])
    return several or re.findall(r'"([^"]+)"', found[1])


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
