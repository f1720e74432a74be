"""How results show themselves: one short line for ``repr``, a small table in a notebook."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, ClassVar

from ckpt_tools.core.json_fields import Jsonable
from ckpt_tools.core.wording import size, without_secrets

MAX_REPR_CHARS = 199
MAX_VALUE_CHARS = 60
"""Of one value in a ``repr``. A path, or a name that a checkpoint chose, may be long."""

MAX_CELL_CHARS = 300


class Count(int):
    """The number of items of a collection, which ``repr`` shows as ``<3>``: the attribute is the collection."""

    def __repr__(self) -> str:
        return f"<{int(self)}>"


class Shown(Jsonable):
    """A result of few or many parts. ``SHOWN`` names the attributes that a reader sees first; default: all fields."""

    __slots__ = ()
    SHOWN: ClassVar[tuple[str, ...]] = ()

    def shown(self) -> Mapping[str, object]:
        """The attributes that are shown, in their order, each short: counts instead of collections."""
        names = self.SHOWN or [each.name for each in fields(self)]  # type: ignore[arg-type]
        return {name: _brief(getattr(self, name)) for name in names}

    def __repr__(self) -> str:
        text = ", ".join(
            f"{name}={shortened(without_secrets(repr(value)), MAX_VALUE_CHARS)}" for name, value in self.shown().items()
        )
        return f"{type(self).__name__}({shortened(text, MAX_REPR_CHARS - len(type(self).__name__) - 2)})"

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(shortened(without_secrets(cell), MAX_CELL_CHARS))}</td></tr>"
            for name, cell in ((name, _cell(name, value)) for name, value in self.shown().items())
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"


def _brief(value: Any) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Collection) and not isinstance(value, str):
        # A tuple with names is one value.
        return str(value) if hasattr(value, "_asdict") else Count(len(value))
    return value


def shortened(text: str, limit: int) -> str:
    """``text``, or its beginning and its end with dots between them; at most ``limit`` characters."""
    if len(text) <= limit:
        return text
    head = (limit - 3) // 2
    return f"{text[:head]}...{text[len(text) - (limit - 3 - head) :]}"


def _cell(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return size(value) if "bytes" in name else f"{value:,}"
    return "" if value is None else str(value)
