"""JSON of a safetensors header, which has hundreds of thousands of entries for a large model."""

from __future__ import annotations

from typing import Any, NamedTuple

from ckpt_tools.serialization.strict_json import JsonPairs, build_object, parse_json


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

    def compact_entry(pairs: JsonPairs) -> Any:
        if len(pairs) != len(RawEntry._fields):
            return build_object(pairs, path)
        (name, dtype), (second_name, shape), (third_name, offsets) = pairs
        if name != "dtype" or second_name != "shape" or third_name != "data_offsets":  # another order is possible
            parsed = build_object(pairs, path)
            if parsed.keys() != set(RawEntry._fields):
                return parsed
            dtype, shape, offsets = (parsed[name] for name in RawEntry._fields)
        if type(dtype) is not str or type(shape) is not list or type(offsets) is not list:
            return build_object(pairs, path)
        for extent in shape:
            if type(extent) is not int:
                return build_object(pairs, path)
        extents = tuple(shape)
        return RawEntry(dtypes.setdefault(dtype, dtype), shapes.setdefault(extents, extents), tuple(offsets))

    return parse_json(data, path, convert_pairs=compact_entry)
