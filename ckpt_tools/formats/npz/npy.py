"""The header of a ``.npy`` array (numpy/lib/format.py, versions 1 to 3): read strictly, and written as numpy does.

The header is the text of a Python dict. It is matched by a pattern and never evaluated: a plain array needs no more
than three entries of known forms.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from math import prod

from ckpt_tools.core.boxes import Shape, contiguous_strides
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.values import check_extents
from ckpt_tools.core.wording import count
from ckpt_tools.errors import IncompleteError, MalformedError, UnsafeError, UnsupportedError

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 10_000
"""numpy's own limit (``_MAX_HEADER_SIZE``)."""

PREFIX_BYTES = len(MAGIC) + 2 + 4
"""Magic, version, and the longer of the two forms of the header's length."""

ALIGNMENT = 64
"""Where elements start: numpy pads the header to it."""

_DTYPES = {
    "f2": DType.FLOAT16, "f4": DType.FLOAT32, "f8": DType.FLOAT64, "i1": DType.INT8, "i2": DType.INT16,
    "i4": DType.INT32, "i8": DType.INT64, "u1": DType.UINT8, "u2": DType.UINT16, "u4": DType.UINT32,
    "u8": DType.UINT64, "b1": DType.BOOL, "c8": DType.COMPLEX64, "c16": DType.COMPLEX128,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

_FLOAT8 = ("V1", "f1")
"""What numpy makes of types of one byte that it does not know: ``f1`` of float8_e5m2, ``V1`` of the others."""

_TEXT = re.compile(r"[<>|=]?[USa]\d{1,9}")

VOID_BFLOAT16 = "V2"
"""What numpy makes of an array of ml_dtypes.bfloat16, which it does not know."""

_ITEM = re.compile(
    r"\s*'(descr|fortran_order|shape)'\s*:\s*(?:'([^'\\]*)'|(True|False)|\(\s*((?:\d{1,20}L?\s*,?\s*)*)\))\s*(,|$)"
)


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


def header_length(prefix: bytes, path: str, key: str) -> int:
    """Bytes before the first element, from the first ``PREFIX_BYTES``. Raises FormatError."""
    if len(prefix) < PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise MalformedError("it is not a .npy array", path=path, key=key)
    major, minor = prefix[6], prefix[7]
    if major not in (1, 2, 3) or minor:
        raise UnsupportedError(f"its version {major}.{minor} of .npy is not known", path=path, key=key)
    form = "<H" if major == 1 else "<I"
    (length,) = struct.unpack_from(form, prefix, 8)
    if length > MAX_HEADER_BYTES:
        raise MalformedError(f"its header claims {length:,} bytes", path=path, key=key)
    return 8 + struct.calcsize(form) + int(length)


def parse_header(data: bytes, path: str, key: str) -> NpyHeader | None:
    """The header ``data``, as long as ``header_length`` says; None for an array of text.

    Raises:
        MalformedError: it does not describe an array. UnsupportedError: its elements are not those of a tensor.
        UnsafeError: it holds objects, which a loader would unpickle.
    """
    start = 10 if data[6] == 1 else 12
    try:
        text = data[start:].decode("utf-8" if data[6] == 3 else "latin1").strip()
    except UnicodeDecodeError as error:
        raise MalformedError("its header is not text", path=path, key=key) from error
    found = _items(text, path, key)
    descr = found["descr"]
    if _TEXT.fullmatch(descr):
        return None
    dtype = _dtype(descr, path, key)
    shape = tuple(int(extent.strip().rstrip("L")) for extent in found["shape"].split(",") if extent.strip())
    check_extents(shape)
    return NpyHeader(shape, dtype, found["fortran_order"] == "True", len(data), descr[1:] == VOID_BFLOAT16)


def _items(text: str, path: str, key: str) -> dict[str, str]:
    found: dict[str, str] = {}
    at, stop = 1, len(text) - 1
    if not (text.startswith("{") and text.endswith("}")):
        raise MalformedError("its header is not a dict", path=path, key=key)
    while at < stop and not text[at:stop].isspace():
        item = _ITEM.match(text, at, stop)
        if item is None or item[1] in found:
            raise _not_plain(text, path, key)
        found[item[1]] = next(part for part in item.groups()[1:4] if part is not None)
        if (item[2] is None) is (item[1] == "descr") or (item[3] is None) is (item[1] == "fortran_order"):
            raise _not_plain(text, path, key)
        at = item.end()
    if len(found) != 3:
        raise _not_plain(text, path, key)
    return found


def _not_plain(text: str, path: str, key: str) -> MalformedError | UnsupportedError:
    if re.match(r"\{\s*'descr'\s*:\s*\[", text):
        return UnsupportedError("it is an array of records, which is not a tensor", path=path, key=key)
    return MalformedError(f"its header {text[:100]!r} does not describe an array", path=path, key=key)


def _dtype(descr: str, path: str, key: str) -> DType:
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
    if code in _FLOAT8:
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


def check_size(header: NpyHeader, size: int, path: str, key: str) -> None:
    """Raises FormatError where a member of ``size`` bytes does not hold exactly the array."""
    expected = header.offset + prod(header.shape) * header.dtype.item_bytes
    if size < expected:
        raise IncompleteError(f"it has {size:,} bytes instead of {expected:,}", path=path, key=key)
    if size > expected:
        raise MalformedError(f"{count(size - expected, 'byte')} too many, after its elements", path=path, key=key)


def npy_header(shape: Shape, dtype: DType, key: str) -> bytes:
    """The header that numpy writes. Raises UnsupportedError for a dtype that numpy does not know."""
    if dtype not in _CODES:
        raise UnsupportedError(f"numpy has no {dtype.value}; cast it (such as to float32) or exclude it", key=key)
    order = "|" if dtype.item_bytes == 1 else "<"
    descr = order + _CODES[dtype]
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(shape)!r}, }}".encode()
    length = len(text) + 1 + -(10 + len(text) + 1) % ALIGNMENT
    return MAGIC + b"\x01\x00" + struct.pack("<H", length) + text.ljust(length - 1) + b"\n"
