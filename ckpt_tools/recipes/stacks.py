"""Lines of a recipe for a side that holds all layers as one tensor, made from those for single layers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.errors import UsageError
from ckpt_tools.recipes.axes import REST


@dataclass(frozen=True)
class Stacks:
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

    def applied(self, line: Any) -> Any:
        """The table of a ``[[map]]`` for the stacked tensors; the same if it has none."""
        if not isinstance(line, Mapping) or not self._is_stacked(line.get(self.side)):
            return line
        other = "right" if self.side == "left" else "left"
        beside = line.get("beside", {})
        if isinstance(beside, Mapping) and isinstance(beside.get(self.side), str):
            beside = {**beside, self.side: self._stacked(beside[self.side], "")[0]}
        there = line.get(other)
        return {
            **line,
            self.side: dict(self._stacked(*each) for each in _shaped(line[self.side]).items()),
            other: _shaped(there),
            **({"beside": beside} if beside else {}),
        }

    def _is_stacked(self, names: Any) -> bool:
        return isinstance(names, str | Mapping) and any(self._prefix(name) for name in _shaped(names))

    def _prefix(self, name: str) -> str | None:
        return next((each for each in self.prefixes if name.startswith(each)), None)

    def _stacked(self, name: str, shape: Any) -> tuple[str, Any]:
        prefix = self._prefix(name)
        if prefix is None:
            return name, shape
        found = _PREFIX.fullmatch(prefix)
        assert found is not None, "checked when it was made"
        return found[1] + name.removeprefix(prefix), f"{found[2]} {shape}"


_PREFIX = re.compile(r"([^{}]*)(\{[A-Za-z_]\w*\})\.", re.ASCII)


def _shaped(names: Any) -> Any:
    """Names with shapes; a name alone has any."""
    return {names: REST} if isinstance(names, str) else names
