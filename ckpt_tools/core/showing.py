"""How results show themselves: one short line for ``repr``, a small table in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from ckpt_tools.core.wording import size, without_secrets

MAX_REPR_CHARS = 199
MAX_VALUE_CHARS = 60
"""Of one value in a ``repr``. A path, or a name that a checkpoint chose, may be long."""

MAX_CELL_CHARS = 300


class Shown(ABC):
    """A result of few or many parts. ``shown`` gives what a reader sees of it first, by attribute."""

    __slots__ = ()

    @abstractmethod
    def shown(self) -> Mapping[str, object]:
        """What is shown, in this order: short values, counts instead of collections."""

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
