"""Tables of ``[[map]]`` made from others before they are parsed: for tensors that are named alike elsewhere
(``[[again]]``), and for a side that holds all layers as one tensor (``stacked``). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.errors import UsageError
from ckpt_tools.recipes.axes import REST_FIELD


@dataclass(frozen=True)
class PrefixRepeat:
    """Two beginnings of names on each side. A line whose names all begin with the first ones is repeated with the
    second ones in their place; the repeated line is optional.

    Raises:
        UsageError: a side has not two texts.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]

    def __post_init__(self) -> None:
        for side, texts in (("left", self.left), ("right", self.right)):
            if len(texts) != 2 or not texts[0]:
                raise UsageError(f"{side} = {list(texts)!r} under [[again]] is not a list of two beginnings of names")

    def repeat_line(self, line: Any) -> Any | None:
        """The table of the repeated ``[[map]]``; None if a name of ``line`` does not begin with its side's first
        text."""
        if not isinstance(line, Mapping):
            return None
        names = {side: _replace_prefix(line.get(side), getattr(self, side)) for side in ("left", "right")}
        if None in names.values():
            return None
        beside = line.get("beside", {})
        if isinstance(beside, Mapping) and beside:
            made = {side: _replace_prefix(name, getattr(self, side)) for side, name in beside.items() if side in names}
            names["beside"] = {side: beside[side] if name is None else name for side, name in made.items()}
        return {**line, **names, "optional": True}


def _replace_prefix(names: Any, texts: tuple[str, ...]) -> Any | None:
    """Names, alone or with shapes, with another beginning; None if one of them does not begin so."""
    first, second = texts
    if isinstance(names, str):
        return second + names.removeprefix(first) if names.startswith(first) else None
    if not isinstance(names, Mapping) or not all(name.startswith(first) for name in names):
        return None
    return {second + name.removeprefix(first): shape for name, shape in names.items()}


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

    def stack_line(self, line: Any) -> Any:
        """The table of a ``[[map]]`` for the stacked tensors; the same if it has none.

        Raises:
            UsageError: a name beside a stacked one is numbered by the same variable, which is an axis now.
        """
        names = line.get(self.side) if isinstance(line, Mapping) else None
        if not isinstance(names, str | Mapping) or not any(map(self._find_prefix, _add_shapes(names))):
            return line
        names = _add_shapes(names)
        variables = {match[2] for name in names if (match := _PREFIX.fullmatch(self._find_prefix(name) or ""))}
        for name in names:
            if self._find_prefix(name) is None and any(variable in name for variable in variables):
                raise UsageError(f"{name} stands beside stacked tensors and is not stacked; give it a line of its own")
        other_side = "right" if self.side == "left" else "left"
        siblings = line.get("beside", {})
        if isinstance(siblings, Mapping) and isinstance(siblings.get(self.side), str):
            siblings = {**siblings, self.side: self._stack_name(siblings[self.side], "")[0]}
        other_names = line.get(other_side)
        return {
            **line,
            self.side: dict(self._stack_name(*each) for each in names.items()),
            other_side: _add_shapes(other_names),
            **({"beside": siblings} if siblings else {}),
        }

    def _find_prefix(self, name: str) -> str | None:
        return next((each for each in self.prefixes if name.startswith(each)), None)

    def _stack_name(self, name: str, shape: Any) -> tuple[str, Any]:
        prefix = self._find_prefix(name)
        if prefix is None:
            return name, shape
        found = _PREFIX.fullmatch(prefix)
        assert found is not None, "checked when it was made"
        return found[1] + name.removeprefix(prefix), f"{found[2]} {shape}"


_PREFIX = re.compile(r"([^{}]*)(\{[A-Za-z_]\w*\})\.", re.ASCII)


def _add_shapes(names: Any) -> Any:
    """Names with shapes; a name alone has any."""
    return {names: REST_FIELD} if isinstance(names, str) else names
