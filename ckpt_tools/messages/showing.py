"""Results as JSON, as one short line for ``repr``, and as a small table in a notebook."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from pathlib import PurePath
from typing import Any, ClassVar

from ckpt_tools.messages.wording import format_size
from ckpt_tools.process.credentials import mask_secrets

MAX_REPR_CHARS = 199
MAX_VALUE_CHARS = 60
"""Of one value in a ``repr``. A path, or a name that a checkpoint chose, may be long."""

MAX_CELL_CHARS = 300


class Jsonable:
    """A dataclass that JSON has too: all its fields, then the properties that ``JSON_PROPERTIES`` names."""

    __slots__ = ()
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """The attributes by name, as plain dicts, lists, numbers and strings."""
        return dataclass_to_json(self, *self.JSON_PROPERTIES)


def dataclass_to_json(result: Any, *property_names: str) -> dict[str, Any]:
    """The fields of the dataclass ``result``, and those of its properties that are named, as ``json.dumps`` takes them.

    A nested result becomes what its own ``to_json`` gives. JSON has no infinity and no NaN: they become ``"inf"``,
    ``"-inf"`` and ``"nan"``. A file's name may hold bytes that are not text; they become ``\\udcff``, as they are
    shown.
    """
    names = (*(each.name for each in fields(result) if not each.name.startswith("_")), *property_names)
    return {name: _convert_to_json(getattr(result, name)) for name in names}


def _convert_to_json(value: Any) -> Any:
    if isinstance(value, Jsonable):
        return value.to_json()
    if is_dataclass(value):
        return dataclass_to_json(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _convert_to_json(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {_escape_surrogates(str(name)): _convert_to_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_to_json(part) for part in value]
    if isinstance(value, float) and not isfinite(value):
        return repr(value)
    if isinstance(value, str):
        return _escape_surrogates(mask_secrets(value))
    return _escape_surrogates(str(value)) if isinstance(value, PurePath) else value


def _escape_surrogates(value: str) -> str:
    return value.encode(errors="backslashreplace").decode()


class ItemCount(int):
    """The number of items of a collection, which ``repr`` shows as ``<3>``: the attribute is the collection."""

    def __repr__(self) -> str:
        return f"<{int(self)}>"


class DisplayableResult(Jsonable):
    """A result of few or many parts. ``SHOWN`` names the attributes that a reader sees first; default: all fields."""

    __slots__ = ()
    SHOWN: ClassVar[tuple[str, ...]] = ()

    def shown(self) -> Mapping[str, object]:
        """The attributes that are shown, in their order, each short: counts instead of collections."""
        names = self.SHOWN or [each.name for each in fields(self)]  # type: ignore[arg-type]
        return {name: _shorten_value(getattr(self, name)) for name in names}

    def __repr__(self) -> str:
        reprs = {name: mask_secrets(repr(value)) for name, value in self.shown().items()}
        text = ", ".join(f"{name}={shorten_text(value, MAX_VALUE_CHARS)}" for name, value in reprs.items())
        return f"{type(self).__name__}({shorten_text(text, MAX_REPR_CHARS - len(type(self).__name__) - 2)})"

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(shorten_text(mask_secrets(cell), MAX_CELL_CHARS))}</td></tr>"
            for name, cell in ((name, _format_cell(name, value)) for name, value in self.shown().items())
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"


def _shorten_value(value: Any) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Collection) and not isinstance(value, str):
        # A tuple with names is one value.
        return str(value) if hasattr(value, "_asdict") else ItemCount(len(value))
    return value


def shorten_text(text: str, limit: int) -> str:
    """``text``, or its beginning and its end with dots between them; at most ``limit`` characters."""
    if len(text) <= limit:
        return text
    head = (limit - 3) // 2
    return f"{text[:head]}...{text[len(text) - (limit - 3 - head) :]}"


def _format_cell(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return format_size(value) if "bytes" in name else f"{value:,}"
    return "" if value is None else str(value)
