"""Values of a pickle as JSON."""

from __future__ import annotations

import base64
from math import isfinite
from typing import Any

from ckpt_tools.core.values import GlobalRef, Opaque, StoredTensor, Value
from ckpt_tools.errors import MalformedError

MAX_SHARED_VISITS = 100_000
"""How often ``value_to_json`` may write a value it has written before: shared lists in lists double with every
level."""


def value_to_json(value: Value) -> Any:
    """``value`` as what ``json.dumps`` takes; what JSON lacks becomes an object with one ``$`` key.

    A value inside itself becomes ``{"$cycle": ...}``.

    Raises:
        MalformedError: values shared inside values would make the text explode.
    """
    return _JsonConverter().convert(value)


class _JsonConverter:
    def __init__(self) -> None:
        self._seen_ids: set[int] = set()
        self._open_ids: set[int] = set()
        self._visits_left = MAX_SHARED_VISITS

    def convert(self, value: Value) -> Any:
        if value is None or isinstance(value, str | bool | int):
            return value
        if isinstance(value, float):
            return value if isfinite(value) else {"$float": repr(value)}
        if isinstance(value, bytes | bytearray):
            return {"$bytes": base64.b64encode(value).decode()}
        return self._convert_shared(value)

    def _convert_shared(self, value: Value) -> Any:
        if id(value) in self._open_ids:
            return {"$cycle": type(value).__name__}
        if id(value) in self._seen_ids:
            self._visits_left -= 1
            if not self._visits_left:
                raise MalformedError("a value contains itself too many times")
        self._seen_ids.add(id(value))
        self._open_ids.add(id(value))
        try:
            return self._convert_compound(value)
        finally:
            self._open_ids.discard(id(value))

    def _convert_compound(self, value: Value) -> Any:
        if isinstance(value, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.convert(item) for key, item in value.items()}
            return {"$dict": [[self.convert(key), self.convert(item)] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return [self.convert(item) for item in value]
        if isinstance(value, set | frozenset):
            return {"$set": sorted((self.convert(item) for item in value), key=repr)}
        if isinstance(value, GlobalRef):
            return {"$global": str(value)}
        if isinstance(value, Opaque):
            parts = {name: getattr(value, name) for name in ("args", "kwargs", "state", "items", "pairs")}
            json_parts = {name: self.convert(part) for name, part in parts.items() if part not in (None, (), [], {})}
            return {f"${value.form}": str(value.ref)} | json_parts
        if isinstance(value, StoredTensor):
            return {"$tensor": {"dtype": value.dtype.value, "shape": list(value.shape)}}
        return {f"${type(value).__name__}": str(value)}
