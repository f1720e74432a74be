"""Lines of ``[[map]]`` as they are written, and those that are made of them: for tensors that are named alike elsewhere
(``[[again]]``), and for a side that holds all layers as one tensor (``stacked``). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.recipes.axes import REST_FIELD, AxisNode, parse_axes
from ckpt_tools.recipes.names import NamePattern
from ckpt_tools.recipes.recipe import PatternTexts, RecipeLine, pair_sides

SIDES = ("left", "right")


@contextmanager
def numbering_refusals(number: int) -> Iterator[None]:
    """Turns errors of a line into a UsageError with its number in the file."""
    try:
        yield
    except CkptError as error:
        raise UsageError(f"[[map]] number {number}: {error.message}") from error


@dataclass(frozen=True)
class ParsedLine:
    """The names of each side with their axes, the name that each side must have ``beside`` them, and ``options``, which
    are keywords of ``RecipeLine``."""

    number: int
    names: Mapping[str, PatternTexts]
    beside: Mapping[str, str]
    options: Mapping[str, Any]

    def build(self) -> RecipeLine:
        """Raises UsageError."""
        with numbering_refusals(self.number):
            left, right = pair_sides(*(self.names[side] for side in SIDES))
            siblings = [NamePattern(self.beside[side]) if side in self.beside else None for side in SIDES]
            return RecipeLine(left, right, required_siblings=(siblings[0], siblings[1]), **self.options)


@dataclass(frozen=True)
class PrefixRepeat:
    """Two beginnings of names on each side. A line whose names all begin with the first ones is repeated with the
    second ones in their place; the repeated line is optional.

    Raises:
        UsageError: a side has not two texts.
    """

    texts_by_side: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        for side, texts in self.texts_by_side.items():
            if len(texts) != 2 or not texts[0]:
                raise UsageError(f"{side} = {list(texts)!r} under [[again]] is not a list of two beginnings of names")

    def repeat_line(self, line: ParsedLine) -> ParsedLine | None:
        """The repeated line; None if a name of ``line`` does not begin with its side's first text."""
        if not all(name.startswith(self.texts_by_side[side][0]) for side in SIDES for name in line.names[side]):
            return None
        names = {
            side: {self._replace_prefix(name, side): axes for name, axes in line.names[side].items()} for side in SIDES
        }
        beside = {side: self._replace_prefix(name, side) for side, name in line.beside.items()}
        return replace(line, names=names, beside=beside, options={**line.options, "is_optional": True})

    def _replace_prefix(self, name: str, side: str) -> str:
        first, second = self.texts_by_side[side]
        return second + name.removeprefix(first) if name.startswith(first) else name


@dataclass(frozen=True)
class StackedPrefixes:
    """Beginnings of names on ``side``, such as ``decoder.layers.{layer}.``, whose variable a stacked tensor lacks: it
    has an axis of the variable in front instead.

    Raises:
        UsageError: one does not end with a variable and a dot.
    """

    side: str
    prefixes: tuple[str, ...]

    def __post_init__(self) -> None:
        wrong = next((each for each in self.prefixes if not _PREFIX.fullmatch(each)), None)
        if wrong is not None or not self.prefixes:
            raise UsageError(f"stacked.{self.side} = {wrong!r} is not text such as 'decoder.layers.{{layer}}.'")

    def stack_line(self, line: ParsedLine) -> ParsedLine:
        """The line for the stacked tensors; the same if it has none.

        Raises:
            UsageError: a name beside a stacked one is numbered by the same variable, which is an axis now.
        """
        own_names = line.names[self.side]
        variables = {variable for name in own_names for _, variable in [self._stack_name(name)] if variable}
        if not variables:
            return line
        stacked_names: dict[str, tuple[AxisNode, ...]] = {}
        for name, axes in own_names.items():
            stacked_name, variable = self._stack_name(name)
            if not variable and any(each in name for each in variables):
                raise UsageError(f"{name} stands beside stacked tensors and is not stacked; give it a line of its own")
            stacked_names[stacked_name] = (*parse_axes(variable), *(_ANY_AXES if axes is None else axes))
        other_names = {
            side: {name: _ANY_AXES if axes is None else axes for name, axes in names.items()}
            for side, names in line.names.items()
        }
        beside = {side: self._stack_name(name)[0] if side == self.side else name for side, name in line.beside.items()}
        return replace(line, names={**other_names, self.side: stacked_names}, beside=beside)

    def _stack_name(self, name: str) -> tuple[str, str]:
        """The name without the variable of its beginning, and that variable; empty if it has no such beginning."""
        prefix = next((each for each in self.prefixes if name.startswith(each)), None)
        found = None if prefix is None else _PREFIX.fullmatch(prefix)
        return (name, "") if found is None else (found[1] + name.removeprefix(found[0]), found[2])


_PREFIX = re.compile(r"([^{}]*)(\{[A-Za-z_]\w*\})\.", re.ASCII)

_ANY_AXES = parse_axes(REST_FIELD)
