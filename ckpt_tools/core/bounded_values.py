"""Values of a checkpoint for people and for JSON, in bounded number, depth and length: a checkpoint chooses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ckpt_tools.core.manifest import Manifest, TensorRef
from ckpt_tools.core.values import GlobalRef, Opaque, StoredTensor
from ckpt_tools.messages.wording import format_one_line

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
class BoundedValues:
    """Turns values into what ``json.dumps`` takes: small ones as they are, tensors and long ones as type and size.

    A checkpoint chooses these values, so that their number, their depth and the length of each are bounded.
    What JSON does not have becomes a dict with one key that begins with ``$``: ``{"$tensor": "float32 [3, 4]"}``,
    ``{"$list": 5000}`` (a list of that length), ``{"$bytes": 16}``, ``{"$float": "inf"}``, ``{"$int": 9000}`` (bits),
    ``{"$object": "package.Class"}``.
    """

    manifest: Manifest
    values_left: int = MAX_VALUES

    def convert(self, value: Any, depth: int = 0) -> Any:
        """``value``, at ``depth`` lists and dicts within each other, as bounded JSON."""
        self.values_left -= 1
        if value is None or isinstance(value, bool):
            return value
        for kind, convert_scalar in _SCALAR_CONVERTERS:
            if isinstance(value, kind):
                return convert_scalar(value)
        if isinstance(value, TensorRef):
            entry = self.manifest.tensors[value.key]
            return {"$tensor": f"{entry.dtype.value} {list(entry.shape)}"}
        if not isinstance(value, Mapping | list | tuple | set | frozenset):
            return {"$object": _truncate_text(type(value).__name__)}
        if depth >= MAX_DEPTH or len(value) > min(MAX_ITEMS, self.values_left):
            name = "dict" if isinstance(value, Mapping) else "set" if isinstance(value, set | frozenset) else "list"
            return {f"${name}": len(value)}
        if isinstance(value, Mapping):
            return {self._convert_key(name, depth): self.convert(part, depth + 1) for name, part in value.items()}
        return [self.convert(part, depth + 1) for part in value]

    def _convert_key(self, name: Any, depth: int) -> str:
        if isinstance(name, str):
            return _truncate_text(name)
        return format_one_line(self.convert(name, depth + 1), MAX_TEXT_CHARS)


def _truncate_text(value: str) -> str:
    return value if len(value) <= MAX_TEXT_CHARS else f"{value[:MAX_TEXT_CHARS]}..."


_SCALAR_CONVERTERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (int, lambda value: int(value) if value.bit_length() <= MAX_INT_BITS else {"$int": value.bit_length()}),
    (float, lambda value: float(value) if isfinite(value) else {"$float": repr(float(value))}),
    (str, _truncate_text),
    (bytes | bytearray, lambda value: {"$bytes": len(value)}),
    (StoredTensor, lambda value: {"$tensor": f"{value.dtype.value} {list(value.shape)}"}),
    (GlobalRef, lambda value: {"$object": _truncate_text(str(value))}),
    (Opaque, lambda value: {"$object": _truncate_text(str(value.ref))}),
)
