"""A result as JSON: the keys are the names of its attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from pathlib import PurePath
from typing import Any, ClassVar

from ckpt_tools.core.wording import without_secrets


class Jsonable:
    """A dataclass that JSON has too: all its fields, then the properties that ``JSON_PROPERTIES`` names."""

    __slots__ = ()
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """The attributes by name, as plain dicts, lists, numbers and strings."""
        return json_of(self, *self.JSON_PROPERTIES)


def json_of(result: Any, *properties: str) -> dict[str, Any]:
    """The fields of the dataclass ``result``, and those of its properties that are named, as ``json.dumps`` takes them.

    A nested result becomes what its own ``to_json`` gives. JSON has no infinity and no NaN: they become ``"inf"``,
    ``"-inf"`` and ``"nan"``. A file's name may hold bytes that are no text; they become ``\\udcff``, as they are shown.
    """
    names = (*(each.name for each in fields(result) if not each.name.startswith("_")), *properties)
    return {name: _plain(getattr(result, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, Jsonable):
        return value.to_json()
    if is_dataclass(value):
        return json_of(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {_text(str(name)): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not isfinite(value):
        return repr(value)
    if isinstance(value, str):
        return _text(without_secrets(value))
    return _text(str(value)) if isinstance(value, PurePath) else value


def _text(value: str) -> str:
    """``value`` in characters that UTF-8 has."""
    return value.encode(errors="backslashreplace").decode()
