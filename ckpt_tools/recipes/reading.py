"""Recipes from TOML files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import SourceNotFoundError, UsageError
from ckpt_tools.messages.wording import find_nearest
from ckpt_tools.process.text_files import read_text
from ckpt_tools.recipes.axes import build_extent_expression, parse_axes
from ckpt_tools.recipes.copying import MAX_COPIES, CopyRule, parse_numbers
from ckpt_tools.recipes.names import NamePattern
from ckpt_tools.recipes.parsed_lines import SIDES, ParsedLine, PrefixRepeat, StackedPrefixes, numbering_refusals
from ckpt_tools.recipes.recipe import MEAN, ZEROS, GrowRule, LineDirection, PatternTexts, Recipe, RecipeLine
from ckpt_tools.recipes.sizes import SizeBinding, SizeExpression

MAX_ADDEND = 1 << 24
"""The largest number to add: float32 has each whole number up to it."""

_RECIPE_KEYS = (
    "about",
    "left",
    "right",
    "models",
    "trainer",
    "source",
    "others",
    "sizes",
    "map",
    "again",
    "drop",
    "tied",
    "copies",
    "copy",
    "grow",
    "tied_by_default",
    "left_ties",
    "stacked",
)
_LINE_KEYS = ("left", "right", "optional", "otherwise", "add", "dtype", "beside", "one_way", "of_state")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file.

    Raises:
        SourceNotFoundError: there is no such file. UsageError: it is not a recipe.
    """
    try:
        if path.is_dir():
            raise UsageError(f"{format_option('recipe', path)} is a folder; name a TOML file")
        text = read_text(path)
    except OSError as error:
        raise SourceNotFoundError(f"{format_option('recipe', path)}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{format_option('recipe', path)} is not UTF-8 text") from error
    return parse_recipe(text, path.stem, str(path))


def parse_recipe(text: str, name: str, path: str) -> Recipe:
    """The recipe in ``text``, of a file at ``path``. Raises UsageError."""
    try:
        return _build_recipe(tomllib.loads(text), text, name)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply for a recipe") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}") from error


def _build_recipe(table: Mapping[str, Any], text: str, name: str) -> Recipe:
    _check_keys(table, _RECIPE_KEYS, "a recipe")
    copy_rules, grow_rules = _parse_copy_rules(table), _parse_grow_rules(table)
    lines = table.get("map", [])
    if not isinstance(lines, list) or not (lines or copy_rules or grow_rules):
        raise UsageError("a recipe needs at least one [[map]], [[copy]] or [[grow]]")
    others = table.get("others", "refused")
    if others not in ("same", "refused"):
        raise UsageError(f"others = {others!r} is neither 'same' nor 'refused'")
    drop = _get_table(table, "drop")
    _check_keys(drop, SIDES, "[drop]")
    left, right = (_get_texts(drop, side) for side in SIDES)
    copies = {NamePattern(copy): owner for copy, owner in _get_owners(table, "copies").items()}
    repeats, stacks = _parse_repeats(table), _parse_stacked(table)
    parsed = [_parse_line(line, number) for number, line in enumerate(lines, 1)]
    parsed += [each for repeat in repeats for line in parsed if (each := repeat.repeat_line(line)) is not None]
    built_lines = tuple(line.build() for line in parsed)
    bindings = tuple(_parse_binding(key, value) for key, value in _get_table(table, "sizes").items())
    _check_variables(bindings, built_lines)
    return Recipe(
        name=name,
        lines=built_lines,
        stacked_lines=tuple(stacks.stack_line(line).build() for line in parsed) if stacks else (),
        about=_get_text(table, "about"),
        left=_get_text(table, "left", "left"),
        right=_get_text(table, "right", "right"),
        models=_get_texts(table, "models"),
        trainer=_get_text(table, "trainer"),
        source=_get_text(table, "source"),
        does_keep_unmatched=others == "same",
        bindings=bindings,
        dropped_names=(tuple(map(NamePattern, left)), (*map(NamePattern, right), *copies)),
        tied_names=_get_owners(table, "tied"),
        copies=copies,
        copy_rules=copy_rules,
        grow_rules=grow_rules,
        tied_by_default=_get_texts(table, "tied_by_default"),
        has_left_ties=_get_flag(table, "left_ties", default=True),
        text=text,
    )


def _parse_copy_rules(table: Mapping[str, Any]) -> tuple[CopyRule, ...]:
    rules = []
    for each in _get_tables(table, "copy"):
        _check_keys(each, (*SIDES, "count", "numbers"), "a [[copy]]")
        count, is_numbered = each.get("count", 0), "numbers" in each
        if is_numbered == ("count" in each):
            raise UsageError("a [[copy]] has either count or numbers")
        if not is_numbered and not (type(count) is int and 0 < count <= MAX_COPIES):
            raise UsageError(f"count = {count!r} is not a whole number from 1 to {MAX_COPIES:,}")
        numbers = parse_numbers(_get_text(each, "numbers")) if is_numbered else tuple(range(count))
        left, right = (NamePattern(_get_text(each, side)) for side in SIDES)
        rules.append(CopyRule(left, right, numbers, is_numbered))
    return tuple(rules)


def _parse_grow_rules(table: Mapping[str, Any]) -> tuple[GrowRule, ...]:
    rules = []
    for each in _get_tables(table, "grow"):
        _check_keys(each, ("name", "size", "new", "dim"), "a [[grow]]")
        name, new, dim = NamePattern(_get_text(each, "name")), each.get("new"), each.get("dim", 0)
        if new not in (ZEROS, MEAN) and not (type(new) is int and new >= 0):
            raise UsageError(f"new = {new!r} is neither {ZEROS!r}, {MEAN!r} nor the number of a row to copy")
        if type(dim) is not int or dim < 0:
            raise UsageError(f"dim = {dim!r} is not the number of a dim")
        size = _parse_binding("size", each.get("size"))
        rules.append(GrowRule(name, SizeBinding("size of a [[grow]]", size.choices), new, dim))
    return tuple(rules)


def _parse_repeats(table: Mapping[str, Any]) -> list[PrefixRepeat]:
    repeat_tables = _get_tables(table, "again")
    for each in repeat_tables:
        _check_keys(each, SIDES, "an [[again]]")
    return [PrefixRepeat({side: _get_texts(each, side) for side in SIDES}) for each in repeat_tables]


def _parse_stacked(table: Mapping[str, Any]) -> StackedPrefixes | None:
    stacked_table = _get_table(table, "stacked")
    if not stacked_table:
        return None
    _check_keys(stacked_table, SIDES, "stacked")
    if len(stacked_table) > 1:
        raise UsageError("stacked has both sides; layers can be stacked on one of them")
    (side,) = stacked_table
    return StackedPrefixes(side, _get_texts(stacked_table, side))


def _parse_line(table: Any, number: int) -> ParsedLine:
    with numbering_refusals(number):
        if not isinstance(table, dict):
            raise UsageError("it is not a table")
        _check_keys(table, _LINE_KEYS, "a [[map]]")
        missing = [side for side in SIDES if side not in table]
        if missing:
            raise UsageError(f"it has no {missing[0]}")
        add = table.get("add", 0)
        if type(add) is not int or abs(add) > MAX_ADDEND:
            raise UsageError(f"add = {add!r} is not a whole number of at most {MAX_ADDEND:,}")
        names = {side: _parse_patterns(table[side]) for side in SIDES}
        dtypes, beside = _get_table(table, "dtype"), _get_table(table, "beside")
        _check_keys(dtypes, SIDES, "dtype")
        _check_keys(beside, SIDES, "beside")
        options = {
            "is_optional": _get_flag(table, "optional"),
            "plus": add,
            "dtypes": tuple(_parse_dtype(dtypes.get(side)) for side in SIDES),
            "is_fallback": _get_flag(table, "otherwise"),
            "direction": LineDirection.FORWARD if _get_flag(table, "one_way") else LineDirection.BOTH,
            "is_state_only": _get_flag(table, "of_state"),
        }
        return ParsedLine(number, names, {side: _get_text(beside, side) for side in beside}, options)


def _get_flag(table: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = table.get(key, default)
    if type(value) is not bool:
        raise UsageError(f"{key} = {value!r} is neither true nor false")
    return value


def _parse_patterns(value: Any) -> PatternTexts:
    if isinstance(value, str):
        return {value: None}
    if not isinstance(value, dict) or not value:
        raise UsageError(f"{value!r} is neither a name nor a table of names and shapes")
    wrong = next((name for name, shape in value.items() if not isinstance(shape, str)), None)
    if wrong is not None:
        raise UsageError(f"the shape of {wrong} is not text; names with dots need quotes")
    return {name: parse_axes(shape) for name, shape in value.items()}


def _parse_dtype(name: Any) -> DType | None:
    if name is None:
        return None
    known = [dtype.value for dtype in DType]
    if name not in known:
        raise UsageError(f"{name!r} is not a dtype{_suggest_key(str(name), known)}")
    return DType(name)


def _parse_binding(name: str, value: Any) -> SizeBinding:
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"{name!r} under [sizes] is not a variable")
    if type(value) is int:
        return SizeBinding(name, (SizeExpression(str(value)),))
    if not isinstance(value, str):
        raise UsageError(f"{name} = {value!r} is neither a number nor text such as 'config.hidden_size'")
    return SizeBinding(name, tuple(SizeExpression(part) for part in value.split("|")))


def _check_variables(bindings: Collection[SizeBinding], lines: Collection[RecipeLine]) -> None:
    """Raises UsageError if a variable of an expression has no value: it is neither bound nor a size of an axis."""
    axes = (axis for line in lines for pattern in (*line.left, *line.right) for axis in pattern.axes or ())
    known = {each.name for each in bindings}.union(*(build_extent_expression(axis).variables for axis in axes))
    for binding in bindings:
        for unknown in sorted({name for choice in binding.choices for name in choice.variables} - known):
            expression = " | ".join(choice.text.strip() for choice in binding.choices)
            raise UsageError(
                f"{binding.name} = {expression!r} under [sizes]: {unknown!r} is not bound, and no axis has it"
                f"{_suggest_key(unknown, known)}"
            )


def _get_owners(table: Mapping[str, Any], key: str) -> Mapping[str, str]:
    """Names and those that own their bytes. Raises UsageError."""
    owner_by_alias = _get_table(table, key)
    for alias, owner in owner_by_alias.items():
        if not isinstance(owner, str) or owner in owner_by_alias or alias == owner:
            raise UsageError(f"[{key}] {alias} = {owner!r} is not the name of a tensor that owns its bytes")
    return dict(owner_by_alias)


def _check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    unknown = next((key for key in table if key not in known), None)
    if unknown is not None:
        raise UsageError(f"{where} has no key {unknown!r}{_suggest_key(unknown, known)}; known: {', '.join(known)}")


def _suggest_key(name: str, known: Collection[str]) -> str:
    found = find_nearest(name, known)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _get_table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise UsageError(f"{key} is not a table")
    return value


def _get_tables(table: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    tables = table.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise UsageError(f"{key} is not a list of tables; write [[{key}]]")
    return tables


def _get_text(table: Mapping[str, Any], key: str, default: str = "") -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise UsageError(f"{key} = {value!r} is not text")
    return value


def _get_texts(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UsageError(f"{key} = {value!r} is not a list of texts")
    return tuple(value)
