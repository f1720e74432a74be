"""Plain numbers that a checkpoint keeps where a tensor could stand, as 0-d tensors of literal files.

A literal file lies in ``Manifest.literals`` and nowhere else. A number has a width from which its Python type can be
told, so that a writer can make the number again.
"""

from __future__ import annotations

import struct
from typing import Any

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Manifest, TensorEntry
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable

Number = bool | int | float

_ENCODING_BY_TYPE = {bool: (DType.BOOL, "<?"), int: (DType.INT64, "<q"), float: (DType.FLOAT64, "<d")}

_STRUCT_FORMAT_BY_DTYPE = dict(_ENCODING_BY_TYPE.values())


def is_number(value: Any) -> bool:
    """Whether ``value`` is a bool, a float, or an integer of 64 bits: a number that a literal file can hold."""
    return type(value) in _ENCODING_BY_TYPE and (type(value) is not int or -(1 << 63) <= value < 1 << 63)


def make_literal_file_name(name: str) -> str:
    """The name of the literal file that is called ``name``; no file of a store has it."""
    return f"literal:{name}"


def make_number_table(number: Number, name: str) -> tuple[ShardTable, dict[str, bytes]]:
    """The table of a 0-d tensor that holds ``number``, in the width of its Python type, in a literal file called
    ``name``; and that file's bytes by its name. ``is_number`` must be true."""
    dtype, struct_format = _ENCODING_BY_TYPE[type(number)]
    file, data = make_literal_file_name(name), struct.pack(struct_format, number)
    return ShardTable.build((), dtype, [Shard(Box.whole(()), ByteRange(file, 0, len(data)))]), {file: data}


def read_literal_number(manifest: Manifest, entry: TensorEntry) -> Number | None:
    """The number that a tensor of ``manifest`` stands for, in its Python type; None if it is stored otherwise."""
    table = entry.shards
    if entry.shape or len(table) != 1 or not entry.is_as_stored or table.dtype not in _STRUCT_FORMAT_BY_DTYPE:
        return None
    at = table.get_byte_range(0)
    data = manifest.literals.get(at.file)
    if data is None:
        return None
    (number,) = struct.unpack(_STRUCT_FORMAT_BY_DTYPE[table.dtype], data[at.start : at.stop])
    return number  # type: ignore[no-any-return]
