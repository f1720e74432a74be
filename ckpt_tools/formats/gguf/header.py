"""The header of a GGUF file: key-values, and where each tensor lies.

Facts from ggml's specification of GGUF and ``gguf.cpp``: version 3, and version 2, which differs in nothing that
little-endian files hold. The order is: magic, version, number of tensors, number of key-values, the key-values, one
description a tensor, padding, tensors. Dims are stored innermost first. Each tensor starts at a multiple of the
alignment, in the order of the descriptions, with padding alone between two of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import INT64_MAX, DType
from ckpt_tools.core.shards import ByteRange
from ckpt_tools.core.values import format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.messages.wording import format_count

if TYPE_CHECKING:
    from ckpt_tools.trainers.saved import SavedCheckpoint

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
MAX_DIMS = 4
"""ggml.h GGML_MAX_DIMS."""
MAX_NAME_BYTES = 63
"""ggml.h GGML_MAX_NAME is 64 with the zero byte at the end."""

MAX_HEADER_BYTES = 256 << 20
"""A vocabulary of 256,000 tokens with merges takes 12 MB."""

MAX_ITEMS = 10_000_000
"""Elements of all arrays: each becomes a Python object."""

WINDOW_BYTES = 256 << 10
"""Read at once: a small model's header is one request."""

SCALARS: Mapping[int, tuple[str, str]] = {
    0: ("uint8", "<u1"), 1: ("int8", "<i1"), 2: ("uint16", "<u2"), 3: ("int16", "<i2"), 4: ("uint32", "<u4"),
    5: ("int32", "<i4"), 6: ("float32", "<f4"), 7: ("bool", "<u1"), 10: ("uint64", "<u8"), 11: ("int64", "<i8"),
    12: ("float64", "<f8"),
}  # fmt: skip
"""Types of key-values by their numbers: our name, which is numpy's, and the form of an element."""
STRING, ARRAY = 8, 9
SCALAR_NUMBERS: Mapping[str, int] = {name: number for number, (name, _) in SCALARS.items()}

DTYPES: Mapping[int, DType] = {
    0: DType.FLOAT32, 1: DType.FLOAT16, 24: DType.INT8, 25: DType.INT16, 26: DType.INT32, 27: DType.INT64,
    28: DType.FLOAT64, 30: DType.BFLOAT16,
}  # fmt: skip
"""ggml types whose elements stand for themselves."""

QUANTIZED: Mapping[int, tuple[str, int, int]] = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""ggml types of blocks: name, elements of a block, and bytes of a block (gguf-py's GGML_QUANT_SIZES)."""

Value = tuple[str, Any]
"""A key-value's value with the name of its type: ``("uint32", 32)``, ``("string", "llama")``, ``("string[]", [...])``.
A string that is not UTF-8, which some vocabularies hold, is bytes."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its shape outermost first, its ggml type, and its bytes. ``dtype`` is None if it is quantized."""

    shape: Shape
    type_number: int
    byte_range: ByteRange

    @property
    def dtype(self) -> DType | None:
        return DTYPES.get(self.type_number)

    @property
    def type_name(self) -> str:
        dtype = self.dtype
        return QUANTIZED[self.type_number][0] if dtype is None else dtype.value


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The key-values of one file, and its tensors by name, in order. ``num_bytes`` is where its padding begins."""

    values: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    num_bytes: int

    def get_integer(self, name: str) -> int | None:
        """The key-value ``name`` if it is an integer."""
        value = self.values.get(name, ("", None))[1]
        return value if type(value) is int else None


class FileReader(Protocol):
    """Interface that files are read from; a ``Source`` has it."""

    def size(self, path: str) -> int: ...

    def read(self, path: str, start: int, stop: int) -> bytes: ...


def read_gguf_header(source: FileReader, path: str) -> GgufHeader:
    """The checked header of one file.

    Raises:
        MalformedError, IncompleteError: a rule of the format is broken. UnsupportedError: another version, byte order
        or type.
    """
    cursor = _HeaderCursor(source, path)
    num_tensors, num_values = _read_counts(cursor)
    values: dict[str, Value] = {}
    for _ in range(num_values):
        name = _read_name(cursor)
        if name in values:
            raise MalformedError(f"the key {format_brief(name)} appears twice", path=path)
        values[name] = _read_value(cursor, cursor.read_integer("<I"), name)
    descriptions = [_read_description(cursor) for _ in range(num_tensors)]
    alignment_type, alignment = values.get(ALIGNMENT_KEY, ("uint32", DEFAULT_ALIGNMENT))
    if alignment_type != "uint32" or alignment < 1 or alignment & (alignment - 1):
        raise MalformedError(f"{ALIGNMENT_KEY} is not a power of two", path=path)
    return GgufHeader(values, _place_tensors(descriptions, int(alignment), cursor), cursor.position)


def _read_counts(cursor: _HeaderCursor) -> tuple[int, int]:
    if cursor.read_bytes(4) != MAGIC:
        raise MalformedError("it is not a GGUF file", path=cursor.path)
    version = cursor.read_integer("<I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        described_as = "a big-endian GGUF file" if swapped else f"GGUF of version {version}"
        raise UnsupportedError(
            f"it is {described_as}, which is not supported; convert it with llama.cpp", path=cursor.path
        )
    return cursor.read_integer("<Q"), cursor.read_integer("<Q")


class _HeaderCursor:
    def __init__(self, source: FileReader, path: str) -> None:
        self.path = path
        self.position = 0
        self.size = source.size(path)
        self.items_left = MAX_ITEMS
        self._source = source
        self._window = (0, b"")

    def read_bytes(self, num_bytes: int) -> bytes:
        """The next bytes. Raises IncompleteError, MalformedError."""
        stop = self.position + num_bytes
        if stop > self.size:
            raise IncompleteError(f"its header does not fit its {self.size:,} bytes; the file is cut", path=self.path)
        if stop > MAX_HEADER_BYTES:
            raise MalformedError(f"its header is longer than {MAX_HEADER_BYTES:,} bytes", path=self.path)
        start, data = self._window
        if stop > start + len(data):
            start = self.position
            data = self._source.read(self.path, start, min(self.size, max(stop, start + WINDOW_BYTES)))
            self._window = start, data
        taken_bytes = data[self.position - start : stop - start]
        self.position = stop
        return taken_bytes

    def read_integer(self, struct_format: str) -> int:
        (number,) = struct.unpack(struct_format, self.read_bytes(struct.calcsize(struct_format)))
        return int(number)

    def read_text(self) -> bytes:
        return self.read_bytes(self.read_integer("<Q"))

    def read_array_length(self) -> int:
        """Number of items that follow."""
        number = self.read_integer("<Q")
        self.items_left -= number
        if self.items_left < 0:
            raise MalformedError(f"its arrays have more than {MAX_ITEMS:,} elements", path=self.path)
        return number


def _read_name(cursor: _HeaderCursor) -> str:
    try:
        return cursor.read_text().decode()
    except UnicodeDecodeError as error:
        raise MalformedError("a name is not UTF-8", path=cursor.path) from error


def _read_value(cursor: _HeaderCursor, type_number: int, name: str) -> Value:
    if type_number == STRING:
        return "string", _decode_text(cursor.read_text())
    if type_number in SCALARS:
        kind, form = SCALARS[type_number]
        return kind, _read_scalars(cursor, kind, form, 1)[0]
    if type_number != ARRAY:
        raise MalformedError(f"the key {format_brief(name)} is of the unknown type {type_number}", path=cursor.path)
    item_type, length = cursor.read_integer("<I"), cursor.read_array_length()
    if item_type == STRING:
        return "string[]", [_decode_text(cursor.read_text()) for _ in range(length)]
    if item_type not in SCALARS:
        raise UnsupportedError(
            f"the key {format_brief(name)} is an array of arrays, which is not supported", path=cursor.path
        )
    kind, form = SCALARS[item_type]
    return f"{kind}[]", _read_scalars(cursor, kind, form, length)


def _read_scalars(cursor: _HeaderCursor, kind: str, struct_format: str, length: int) -> list[Any]:
    scalars = np.frombuffer(cursor.read_bytes(length * np.dtype(struct_format).itemsize), struct_format)
    if kind == "bool":
        if (scalars > 1).any():
            raise MalformedError("a bool is neither 0 nor 1", path=cursor.path)
        scalars = scalars.astype(bool)
    items: list[Any] = scalars.tolist()
    return items


def _decode_text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


@dataclass(frozen=True, slots=True)
class _TensorDescription:
    name: str
    dims: Shape
    type_number: int
    offset: int

    @property
    def num_bytes(self) -> int:
        if self.type_number in DTYPES:
            return prod(self.dims) * DTYPES[self.type_number].item_bytes
        _, block, block_bytes = QUANTIZED[self.type_number]
        return prod(self.dims) // block * block_bytes


def _read_description(cursor: _HeaderCursor) -> _TensorDescription:
    name = _read_name(cursor)
    num_dims = cursor.read_integer("<I")
    if num_dims > MAX_DIMS:
        raise MalformedError(f"it has {num_dims} dims, and ggml has at most {MAX_DIMS}", path=cursor.path, key=name)
    dims = tuple(cursor.read_integer("<Q") for _ in range(num_dims))
    type_number, offset = cursor.read_integer("<I"), cursor.read_integer("<Q")
    if type_number not in DTYPES and type_number not in QUANTIZED:
        raise UnsupportedError(f"its ggml type {type_number} is not known", path=cursor.path, key=name)
    if prod(max(dim, 1) for dim in dims) > INT64_MAX // 8:
        raise MalformedError(f"a tensor of shape {list(reversed(dims))} is too large", path=cursor.path, key=name)
    if type_number in QUANTIZED and (not dims or dims[0] % QUANTIZED[type_number][1]):
        raise MalformedError(
            f"its rows are not whole blocks of {QUANTIZED[type_number][0]}", path=cursor.path, key=name
        )
    return _TensorDescription(name, dims, type_number, offset)


def align_up(position: int, alignment: int) -> int:
    """The first multiple of ``alignment`` at or after ``position``."""
    return position + -position % alignment


def _place_tensors(
    descriptions: list[_TensorDescription], alignment: int, cursor: _HeaderCursor
) -> dict[str, TensorInfo]:
    """The tensors by name; they follow one another with padding alone between them, to the end of the file."""
    # | header | pad | tensor 0 | pad | tensor 1 | pad |    Offsets count from ``start``, the first multiple of the
    #                0                ^ next_offset         alignment behind the header. Tensors lie in the order of
    # their descriptions, so each offset is known before it is read, and any other one is an error.
    path, start = cursor.path, align_up(cursor.position, alignment)
    tensors: dict[str, TensorInfo] = {}
    next_offset = stop = 0
    for description in descriptions:
        if description.name in tensors:
            raise MalformedError("two tensors have this name", path=path, key=description.name)
        if description.offset != next_offset:
            reason = f"it starts at byte {description.offset:,} of the data instead of {next_offset:,}"
            raise MalformedError(reason, path=path, key=description.name)
        stop = description.offset + description.num_bytes
        byte_range = ByteRange(path, start + description.offset, start + stop)
        tensors[description.name] = TensorInfo(tuple(reversed(description.dims)), description.type_number, byte_range)
        next_offset = align_up(stop, alignment)
    # The last tensor may be padded as all others are.
    size, end, padded = cursor.size, start + stop, start + next_offset
    if size < end or end < size < padded:
        raise IncompleteError(f"it has {size:,} bytes instead of {padded:,}; the file is cut", path=path)
    if size > padded:
        raise MalformedError(f"{format_count(size - padded, 'byte')} too many, after the last tensor", path=path)
    return tensors


def is_empty(saved: SavedCheckpoint, path: str) -> bool:
    """True if the header counts no tensor."""
    if not path.endswith(".gguf"):
        return False
    read, size, _ = saved.get_archive_arguments(path)
    head = read(0, min(16, size))
    return head.startswith(MAGIC) and not any(head[8:])
