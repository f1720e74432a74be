"""Key-values of GGUF as bytes, and what of a checkpoint's entries is one. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.gguf.header import ARRAY, SCALAR_NUMBERS, SCALARS, STRING, Value

ENTRY = "gguf"
"""The entry of a manifest that holds the key-values of a file, each with its type."""


def packed_text(text: str | bytes) -> bytes:
    """A length and the text, as GGUF writes names."""
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def packed(name: str, value: Value) -> bytes:
    """A key with its type and value."""
    kind, found = value
    is_array = kind.endswith("[]")
    kind = kind.removesuffix("[]")
    number = STRING if kind == "string" else SCALAR_NUMBERS[kind]
    items = found if is_array else [found]
    head = struct.pack("<IIQ", ARRAY, number, len(items)) if is_array else struct.pack("<I", number)
    return packed_text(name) + head + _items(kind, number, items)


def _items(kind: str, number: int, items: list[Any]) -> bytes:
    if kind == "string":
        return b"".join(map(packed_text, items))
    return np.array(items, SCALARS[number][1]).tobytes()


def values_of(entry: Any) -> dict[str, Value]:
    """The key-values in an entry of a checkpoint, which a file of torch may have carried as lists.

    Raises:
        UnsupportedError: it is not what reading GGUF gave.
    """
    if not isinstance(entry, Mapping):
        raise UnsupportedError(f"the entry {ENTRY!r} of the checkpoint does not hold key-values of GGUF")
    return {str(name): _checked(name, value) for name, value in entry.items()}


def _checked(name: Any, value: Any) -> Value:
    kind, found = value if isinstance(value, tuple | list) and len(value) == 2 else ("", None)
    try:
        packed(str(name), (kind, found))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UnsupportedError(f"the entry {ENTRY}.{name} is not a key-value of GGUF") from error
    return kind, found
