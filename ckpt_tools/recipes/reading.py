"""Recipes from TOML files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.wording import find_nearest
from ckpt_tools.errors import CkptError, SourceNotFoundError, UsageError
from ckpt_tools.recipes.axes import Node, extent_size, parse_axes
from ckpt_tools.recipes.names import NamePattern
from ckpt_tools.recipes.recipe import Line, Recipe, Way
from ckpt_tools.recipes.repeats import Repeat
from ckpt_tools.recipes.sizes import Binding, Size
from ckpt_tools.recipes.stacks import Stacks
from ckpt_tools.text_files import read_text

MAX_ADDED = 1 << 24
"""The largest number to add: float32 has each whole number up to it."""

_TOP = (
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
    "tied_by_default",
    "left_ties",
    "stacked",
)
_OF_LINE = ("left", "right", "optional", "otherwise", "add", "dtype", "beside", "one_way", "of_state")
_SIDES = ("left", "right")
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
        return _recipe(tomllib.loads(text), text, name)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply for a recipe") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}") from error


def _recipe(table: Mapping[str, Any], text: str, name: str) -> Recipe:
    _check_keys(table, _TOP, "a recipe")
    lines = table.get("map")
    if not isinstance(lines, list) or not lines:
        raise UsageError("a recipe needs at least one [[map]]")
    others = table.get("others", "refused")
    if others not in ("same", "refused"):
        raise UsageError(f"others = {others!r} is neither 'same' nor 'refused'")
    drop = _table(table, "drop")
    _check_keys(drop, _SIDES, "[drop]")
    left, right = (_texts(drop, side) for side in _SIDES)
    copies = {NamePattern(copy): owner for copy, owner in _owners(table, "copies").items()}
    tables = [*enumerate(lines, 1), *_repeated(table, lines)]
    made = tuple(_numbered(_line, line, number) for number, line in tables)
    stacks = _stacks(table)
    stacked = [_numbered(_line, stacks.applied(line), number) for number, line in tables] if stacks else []
    bindings = tuple(_binding(key, value) for key, value in _table(table, "sizes").items())
    _check_variables(bindings, made)
    return Recipe(
        name=name,
        lines=made,
        stacked=tuple(stacked),
        about=_text(table, "about"),
        left=_text(table, "left", "left"),
        right=_text(table, "right", "right"),
        models=_texts(table, "models"),
        trainer=_text(table, "trainer"),
        source=_text(table, "source"),
        keeps_others=others == "same",
        bindings=bindings,
        drops=(tuple(map(NamePattern, left)), (*map(NamePattern, right), *copies)),
        tied=_owners(table, "tied"),
        copies=copies,
        tied_by_default=_texts(table, "tied_by_default"),
        left_ties=_flag(table, "left_ties", default=True),
        text=text,
    )


def _repeated(table: Mapping[str, Any], lines: list[Any]) -> list[tuple[int, Any]]:
    """Lines that ``[[again]]`` makes of others, with the numbers of these."""
    found = table.get("again", [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise UsageError("again is not a list of tables; write [[again]]")
    for each in found:
        _check_keys(each, _SIDES, "an [[again]]")
    repeats = [Repeat(*(_texts(each, side) for side in _SIDES)) for each in found]
    made = ((number, repeat.applied(line)) for repeat in repeats for number, line in enumerate(lines, 1))
    return [(number, line) for number, line in made if line is not None]


def _stacks(table: Mapping[str, Any]) -> Stacks | None:
    found = _table(table, "stacked")
    if not found:
        return None
    _check_keys(found, _SIDES, "stacked")
    if len(found) > 1:
        raise UsageError("stacked has both sides; layers can be stacked on one of them")
    (side,) = found
    return Stacks(side, _texts(found, side))


def _numbered(make: Callable[[Any], Line], line: Any, number: int) -> Line:
    try:
        return make(line)
    except CkptError as error:
        raise UsageError(f"[[map]] number {number}: {error.message}") from error


def _line(table: Any) -> Line:
    if not isinstance(table, dict):
        raise UsageError("it is not a table")
    _check_keys(table, _OF_LINE, "a [[map]]")
    missing = [side for side in _SIDES if side not in table]
    if missing:
        raise UsageError(f"it has no {missing[0]}")
    add = table.get("add", 0)
    if type(add) is not int or abs(add) > MAX_ADDED:
        raise UsageError(f"add = {add!r} is not a whole number of at most {MAX_ADDED:,}")
    return Line.build(
        _patterns(table["left"]),
        _patterns(table["right"]),
        optional=_flag(table, "optional"),
        plus=add,
        dtypes=_dtypes(_table(table, "dtype")),
        is_otherwise=_flag(table, "otherwise"),
        beside=_beside(_table(table, "beside")),
        way=Way.THERE if _flag(table, "one_way") else Way.BOTH,
        of_state=_flag(table, "of_state"),
    )


def _beside(table: Mapping[str, Any]) -> tuple[NamePattern | None, NamePattern | None]:
    _check_keys(table, _SIDES, "beside")
    left, right = (NamePattern(_text(table, side)) if side in table else None for side in _SIDES)
    return left, right


def _flag(table: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = table.get(key, default)
    if type(value) is not bool:
        raise UsageError(f"{key} = {value!r} is neither true nor false")
    return value


def _patterns(value: Any) -> Mapping[str, tuple[Node, ...] | None]:
    if isinstance(value, str):
        return {value: None}
    if not isinstance(value, dict) or not value:
        raise UsageError(f"{value!r} is neither a name nor a table of names and shapes")
    wrong = next((name for name, shape in value.items() if not isinstance(shape, str)), None)
    if wrong is not None:
        raise UsageError(f"the shape of {wrong} is not text; names with dots need quotes")
    return {name: parse_axes(shape) for name, shape in value.items()}


def _dtypes(table: Mapping[str, Any]) -> tuple[DType | None, DType | None]:
    _check_keys(table, _SIDES, "dtype")
    left, right = (_dtype(table.get(side)) for side in _SIDES)
    return left, right


def _dtype(name: Any) -> DType | None:
    if name is None:
        return None
    known = [dtype.value for dtype in DType]
    if name not in known:
        raise UsageError(f"{name!r} is not a dtype{_meant(str(name), known)}")
    return DType(name)


def _binding(name: str, value: Any) -> Binding:
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"{name!r} under [sizes] is not a variable")
    if type(value) is int:
        return Binding(name, (Size(str(value)),))
    if not isinstance(value, str):
        raise UsageError(f"{name} = {value!r} under [sizes] is neither a number nor text such as 'config.hidden_size'")
    return Binding(name, tuple(Size(part) for part in value.split("|")))


def _check_variables(bindings: Collection[Binding], lines: Collection[Line]) -> None:
    """Raises UsageError if a variable of an expression has no value: it is neither bound nor a size of an axis."""
    axes = (axis for line in lines for pattern in (*line.left, *line.right) for axis in pattern.axes or ())
    known = {each.name for each in bindings}.union(*(extent_size(axis).variables for axis in axes))
    for binding in bindings:
        for unknown in sorted({name for choice in binding.choices for name in choice.variables} - known):
            expression = " | ".join(choice.text.strip() for choice in binding.choices)
            raise UsageError(
                f"{binding.name} = {expression!r} under [sizes]: {unknown!r} is not bound, and no axis has it"
                f"{_meant(unknown, known)}"
            )


def _owners(table: Mapping[str, Any], key: str) -> Mapping[str, str]:
    """Names and those that own their bytes. Raises UsageError."""
    found = _table(table, key)
    for alias, owner in found.items():
        if not isinstance(owner, str) or owner in found or alias == owner:
            raise UsageError(f"[{key}] {alias} = {owner!r} is not the name of a tensor that owns its bytes")
    return dict(found)


def _check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    unknown = next((key for key in table if key not in known), None)
    if unknown is not None:
        raise UsageError(f"{where} has no key {unknown!r}{_meant(unknown, known)}; known: {', '.join(known)}")


def _meant(name: str, known: Collection[str]) -> str:
    found = find_nearest(name, known)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise UsageError(f"{key} is not a table")
    return value


def _text(table: Mapping[str, Any], key: str, default: str = "") -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise UsageError(f"{key} = {value!r} is not text")
    return value


def _texts(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UsageError(f"{key} = {value!r} is not a list of texts")
    return tuple(value)
