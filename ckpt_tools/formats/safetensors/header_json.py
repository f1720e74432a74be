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


def parse_header(data: bytes, path: str) -> Any:
    """The header with a ``RawEntry`` for each object that is one: a fifth of the memory of dicts and lists.

    Raises MalformedError.
    """
    shapes: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    dtypes: dict[str, str] = {}

    def entry_of(found: dict[str, Any]) -> Any:
        if found.keys() != _KEYS:
            return found
        dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
        if type(dtype) is not str or type(shape) is not list or type(offsets) is not list:
            return found
        if not all(type(extent) is int for extent in shape):
            return found
        extents = tuple(shape)
        return RawEntry(dtypes.setdefault(dtype, dtype), shapes.setdefault(extents, extents), tuple(offsets))

    return parse_json(data, path, value_of=entry_of)
