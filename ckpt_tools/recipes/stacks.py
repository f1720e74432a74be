"""Lines of a recipe for a side that holds all layers as one tensor, made from those for single layers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.errors import UsageError
from ckpt_tools.recipes.axes import REST_FIELD


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
        """The table of a ``[[map]]`` for the stacked tensors; the same if it has none."""
        if not isinstance(line, Mapping) or not self._is_stacked(line.get(self.side)):
            return line
        other_side = "right" if self.side == "left" else "left"
        siblings = line.get("beside", {})
        if isinstance(siblings, Mapping) and isinstance(siblings.get(self.side), str):
            siblings = {**siblings, self.side: self._stack_name(siblings[self.side], "")[0]}
        other_names = line.get(other_side)
        return {
            **line,
            self.side: dict(self._stack_name(*each) for each in _add_shapes(line[self.side]).items()),
            other_side: _add_shapes(other_names),
            **({"beside": siblings} if siblings else {}),
        }

    def _is_stacked(self, names: Any) -> bool:
        return isinstance(names, str | Mapping) and any(self._find_prefix(name) for name in _add_shapes(names))

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
