"""A ``.npy`` array as a tensor: the dtype and shape of its header, and the header as numpy writes it."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from math import prod

from ckpt_tools.core.boxes import Shape, contiguous_strides
from ckpt_tools.core.casts import suggest_dtype_fix
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.values import check_extents
from ckpt_tools.errors import IncompleteError, MalformedError, UnsafeError, UnsupportedError
from ckpt_tools.messages.wording import format_count
from ckpt_tools.serialization.npy_header import MAGIC, get_text_start, parse_header_text

ALIGNMENT = 64
"""Where elements start: numpy pads the header to it."""

_DTYPES = {
    "f2": DType.FLOAT16, "f4": DType.FLOAT32, "f8": DType.FLOAT64, "i1": DType.INT8, "i2": DType.INT16,
    "i4": DType.INT32, "i8": DType.INT64, "u1": DType.UINT8, "u2": DType.UINT16, "u4": DType.UINT32,
    "u8": DType.UINT64, "b1": DType.BOOL, "c8": DType.COMPLEX64, "c16": DType.COMPLEX128,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

_AMBIGUOUS_FLOAT8 = ("V1", "f1")
"""What numpy makes of types of one byte that it does not know: ``f1`` of float8_e5m2, ``V1`` of the others."""

_TEXT_DESCR = re.compile(r"[<>|=]?[USa][0-9]{1,9}")

VOID_BFLOAT16 = "V2"
"""What numpy makes of an array of ml_dtypes.bfloat16, which it does not know."""


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """The array that follows: ``strides`` are in elements, and ``offset`` is where its first element lies."""

    shape: Shape
    dtype: DType
    is_fortran: bool
    offset: int
    is_void: bool
    """Whether the dtype is read from a void of two bytes."""

    @property
    def strides(self) -> Shape | None:
        """None where the elements are row-major."""
        if not self.is_fortran or sum(extent > 1 for extent in self.shape) < 2:
            return None
        return tuple(reversed(contiguous_strides(tuple(reversed(self.shape)))))


def parse_npy_header(data: bytes, path: str, key: str) -> NpyHeader | None:
    """The header ``data``, as long as ``read_header_length`` says; None for an array of text.

    Raises:
        MalformedError: it does not describe an array. UnsupportedError: its elements are not those of a tensor.
        UnsafeError: it holds objects, which a loader would unpickle.
    """
    text = data[get_text_start(data) :]
    fields = parse_header_text(text)
    if fields is None and re.match(rb"\{ *'descr' *: *\[", text):
        raise UnsupportedError("it is an array of records, which is not a tensor", path=path, key=key)
    if fields is None:
        shown = repr(text[:100])[1:]
        raise MalformedError(f"its header {shown} does not describe an array", path=path, key=key)
    if _TEXT_DESCR.fullmatch(fields.descr):
        return None
    dtype = _parse_dtype(fields.descr, path, key)
    check_extents(fields.shape)
    return NpyHeader(fields.shape, dtype, fields.is_fortran, len(data), fields.descr[1:] == VOID_BFLOAT16)


def _parse_dtype(descr: str, path: str, key: str) -> DType:
    order, code = descr[:1], descr[1:]
    if code[:1] == "O":
        raise UnsafeError(
            "it holds Python objects as a pickle, which a loader would run; save its arrays each under a name of its "
            "own with numpy.savez",
            path=path,
            key=key,
        )
    if code == VOID_BFLOAT16:
        return DType.BFLOAT16
    if code in _AMBIGUOUS_FLOAT8:
        raise UnsupportedError(
            f"its dtype is {descr!r}, as which numpy saves types of float8 and int4, and they cannot be told apart; "
            "save it as another type",
            path=path,
            key=key,
        )
    if code not in _DTYPES or order not in "<>|=":
        raise UnsupportedError(f"its dtype {descr[:40]!r} is not that of a tensor", path=path, key=key)
    if order == ">" and _DTYPES[code].item_bytes > 1:
        raise UnsupportedError(
            "its elements are big-endian; save it again with array.astype(array.dtype.newbyteorder('<'))",
            path=path,
            key=key,
        )
    return _DTYPES[code]


def check_array_size(header: NpyHeader, size: int, path: str, key: str) -> None:
    """Raises FormatError where a member of ``size`` bytes does not hold exactly the array."""
    expected = header.offset + prod(header.shape) * header.dtype.item_bytes
    if size < expected:
        raise IncompleteError(f"it has {size:,} bytes instead of {expected:,}", path=path, key=key)
    if size > expected:
        raise MalformedError(
            f"{format_count(size - expected, 'byte')} too many, after its elements", path=path, key=key
        )


def build_npy_header(shape: Shape, dtype: DType, key: str) -> bytes:
    """The header that numpy writes. Raises UnsupportedError for a dtype that numpy does not know."""
    if dtype not in _CODES:
        raise UnsupportedError(f"numpy has no {dtype.value}; {suggest_dtype_fix(dtype)}", key=key)
    order = "|" if dtype.item_bytes == 1 else "<"
    descr = order + _CODES[dtype]
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(shape)!r}, }}".encode()
    length = len(text) + 1 + -(10 + len(text) + 1) % ALIGNMENT
    return MAGIC + b"\x01\x00" + struct.pack("<H", length) + text.ljust(length - 1) + b"\n"
