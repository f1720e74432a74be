"""Values of a checkpoint as a summary shows them: small ones as they are, tensors and long ones as type and size.

A checkpoint chooses these values, so that their number, their depth and the length of each are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ckpt_tools.core.manifest import Manifest, TensorRef
from ckpt_tools.core.value_text import one_line
from ckpt_tools.core.values import GlobalRef, Opaque, StoredTensor

MAX_TEXT_CHARS = 1000
"""Of one string. What is longer is cut."""

MAX_ITEMS = 1000
"""Of one list or dict. A longer one is shown as its type and length."""

MAX_DEPTH = 8
"""Of lists and dicts within each other."""

MAX_VALUES = 10_000
"""In all. A DeepSpeed configuration has about 300."""

MAX_INT_BITS = 128
"""Python refuses to print an integer of more than 4,300 digits."""


@dataclass(slots=True)
class ShownValues:
    """Turns values into what ``json.dumps`` takes.

    What JSON does not have becomes a dict with one key that begins with ``$``: ``{"$tensor": "float32 [3, 4]"}``,
    ``{"$list": 5000}`` (a list of that length), ``{"$bytes": 16}``, ``{"$float": "inf"}``, ``{"$int": 9000}`` (bits),
    ``{"$object": "package.Class"}``.
    """

    manifest: Manifest
    values_left: int = MAX_VALUES

    def of(self, value: Any, depth: int = 0) -> Any:
        """``value``, bounded."""
        self.values_left -= 1
        if value is None or isinstance(value, bool):
            return value
        for kind, show in _SCALARS:
            if isinstance(value, kind):
                return show(value)
        if isinstance(value, TensorRef):
            entry = self.manifest.tensors[value.key]
            return {"$tensor": f"{entry.dtype.value} {list(entry.shape)}"}
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return self._container(value, depth)
        return {"$object": _text(type(value).__name__)}

    def _container(self, value: Any, depth: int) -> Any:
        if depth >= MAX_DEPTH or len(value) > min(MAX_ITEMS, self.values_left):
            return {f"${_kind(value)}": len(value)}
        if isinstance(value, Mapping):
            return {self._name(name, depth): self.of(part, depth + 1) for name, part in value.items()}
        return [self.of(part, depth + 1) for part in value]

    def _name(self, name: Any, depth: int) -> str:
        return _text(name) if isinstance(name, str) else one_line(self.of(name, depth + 1), MAX_TEXT_CHARS)


def _kind(value: Any) -> str:
    return "dict" if isinstance(value, Mapping) else "set" if isinstance(value, set | frozenset) else "list"


def _text(value: str) -> str:
    return value if len(value) <= MAX_TEXT_CHARS else f"{value[:MAX_TEXT_CHARS]}..."


def _int(value: int) -> Any:
    return int(value) if value.bit_length() <= MAX_INT_BITS else {"$int": value.bit_length()}


def _tensor(value: StoredTensor) -> Any:
    return {"$tensor": f"{value.dtype.value} {list(value.shape)}"}


_SCALARS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (int, _int),
    (float, lambda value: float(value) if isfinite(value) else {"$float": repr(float(value))}),
    (str, _text),
    (bytes | bytearray, lambda value: {"$bytes": len(value)}),
    (StoredTensor, _tensor),
    (GlobalRef, lambda value: {"$object": _text(str(value))}),
    (Opaque, lambda value: {"$object": _text(str(value.ref))}),
)
