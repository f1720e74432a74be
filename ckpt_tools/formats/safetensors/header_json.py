"""JSON of a safetensors header, which has hundreds of thousands of entries for a large model."""

from __future__ import annotations

from typing import Any, NamedTuple

from ckpt_tools.serialization.strict_json import parse_json

_KEYS = frozenset({"dtype", "shape", "data_offsets"})


class RawEntry(NamedTuple):
    """An entry that has the fields of a tensor; what they hold is not checked."""

    dtype: str
    shape: tuple[Any, ...]
    data_offsets: tuple[Any, ...]


def parse_header_json(data: bytes, path: str) -> Any:
    """The header with a ``RawEntry`` for each object that is one: a fifth of the memory of dicts and lists.

    Raises MalformedError.
    """
    shapes: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    dtypes: dict[str, str] = {}

    def compact_entry(parsed: dict[str, Any]) -> Any:
        if parsed.keys() != _KEYS:
            return parsed
        dtype, shape, offsets = parsed["dtype"], parsed["shape"], parsed["data_offsets"]
        if type(dtype) is not str or type(shape) is not list or type(offsets) is not list:
            return parsed
        if not all(type(extent) is int for extent in shape):
            return parsed
        extents = tuple(shape)
        return RawEntry(dtypes.setdefault(dtype, dtype), shapes.setdefault(extents, extents), tuple(offsets))

    return parse_json(data, path, value_of=compact_entry)
