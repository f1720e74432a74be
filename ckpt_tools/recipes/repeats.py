"""Lines of a recipe for tensors that are named like others in another place, such as layers of multi-token prediction.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.errors import UsageError


@dataclass(frozen=True)
class PrefixRepeat:
    """Beginnings of names on both sides, each a text and the one that replaces it: a line whose names all begin with
    the first texts is there with the second ones too, and is optional then.

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
        """The table of the other ``[[map]]``; None if a name of the line does not begin so."""
        if not isinstance(line, Mapping):
            return None
        names = {side: _replace_prefix(line.get(side), getattr(self, side)) for side in ("left", "right")}
        if None in names.values():
            return None
        siblings = line.get("beside", {})
        if isinstance(siblings, Mapping) and siblings:
            made = {
                side: _replace_prefix(name, getattr(self, side)) for side, name in siblings.items() if side in names
            }
            names["beside"] = {side: siblings[side] if name is None else name for side, name in made.items()}
        return {**line, **names, "optional": True}


def _replace_prefix(names: Any, texts: tuple[str, ...]) -> Any | None:
    """Names, alone or with shapes, with another beginning; None if one of them does not begin so."""
    first, second = texts
    if isinstance(names, str):
        return second + names.removeprefix(first) if names.startswith(first) else None
    if not isinstance(names, Mapping) or not all(name.startswith(first) for name in names):
        return None
    return {second + name.removeprefix(first): shape for name, shape in names.items()}
