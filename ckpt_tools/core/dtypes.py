"""Element types by neutral names, with their item sizes and their names in each format.

A dtype here is only a label and a width: bytes are moved without looking at them. ``to_numpy`` is for the two places
that do look, casts and comparisons. The neutral names are those of torch without the ``torch.`` prefix.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

INT64_MAX = 2**63 - 1
"""The largest extent, offset or number of bytes."""


class DType(Enum):
    """An element type: its torch name without the ``torch.`` prefix, which is the value; the bytes of an element; its
    name in a safetensors header (0.8.0, tensor.rs, enum Dtype), if that format has it; and the class that torch pickles
    for its storage (storage.py, ``_dtype_to_storage_type_map``), without which it saves an ``UntypedStorage``.

    An element is whole bytes. Values of 4 and 6 bits are packed: an element is as many as fill bytes, as in torch's
    ``float4_e2m1fn_x2``, and a shape counts elements. The header of safetensors counts values.
    """

    FLOAT64 = "float64", 8, "F64", "DoubleStorage"
    FLOAT32 = "float32", 4, "F32", "FloatStorage"
    FLOAT16 = "float16", 2, "F16", "HalfStorage"
    BFLOAT16 = "bfloat16", 2, "BF16", "BFloat16Storage"
    FLOAT8_E4M3FN = "float8_e4m3fn", 1, "F8_E4M3"
    FLOAT8_E5M2 = "float8_e5m2", 1, "F8_E5M2"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz", 1, "F8_E4M3FNUZ"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz", 1, "F8_E5M2FNUZ"
    FLOAT8_E8M0FNU = "float8_e8m0fnu", 1, "F8_E8M0"
    FLOAT4_E2M1FN_X2 = "float4_e2m1fn_x2", 1, "F4"
    FLOAT6_E2M3FN_X4 = "float6_e2m3fn_x4", 3, "F6_E2M3"
    FLOAT6_E3M2FN_X4 = "float6_e3m2fn_x4", 3, "F6_E3M2"
    INT64 = "int64", 8, "I64", "LongStorage"
    INT32 = "int32", 4, "I32", "IntStorage"
    INT16 = "int16", 2, "I16", "ShortStorage"
    INT8 = "int8", 1, "I8", "CharStorage"
    UINT64 = "uint64", 8, "U64"
    UINT32 = "uint32", 4, "U32"
    UINT16 = "uint16", 2, "U16"
    UINT8 = "uint8", 1, "U8", "ByteStorage"
    BOOL = "bool", 1, "BOOL", "BoolStorage"
    COMPLEX64 = "complex64", 8, "C64", "ComplexFloatStorage"
    COMPLEX128 = "complex128", 16, None, "ComplexDoubleStorage"
    COMPLEX32 = "complex32", 4, None

    _value_: str
    item_bytes: int
    safetensors_name: str | None
    torch_storage: str | None
    is_floating: bool
    """True for real floating-point types."""
    num_values: int
    """Values in an element: more than one if they are packed."""
    is_torch_dtype: bool
    """False for the types that torch 2.15 does not have."""

    def __new__(cls, name: str, item_bytes: int = 0, header: str | None = None, storage: str | None = None) -> DType:
        made = object.__new__(cls)
        made._value_, made.item_bytes, made.safetensors_name, made.torch_storage = name, item_bytes, header, storage
        made.is_floating = name.startswith(("float", "bfloat"))
        made.num_values = {"_x2": 2, "_x4": 4}.get(name[-3:], 1)
        made.is_torch_dtype = not name.startswith("float6_")
        return made


_DTYPE_BY_SAFETENSORS_NAME = {dtype.safetensors_name: dtype for dtype in DType if dtype.safetensors_name}

_DTYPE_BY_TORCH_STORAGE = {dtype.torch_storage: dtype for dtype in DType if dtype.torch_storage}

_DTYPE_BY_NAME = {dtype.value: dtype for dtype in DType}


def from_safetensors(name: str) -> DType | None:
    """The dtype a safetensors header calls ``name``, or None."""
    return _DTYPE_BY_SAFETENSORS_NAME.get(name)


def from_torch_storage(name: str) -> DType | None:
    """The dtype of the elements of ``torch.<name>`` (``FloatStorage`` ...), or None."""
    return _DTYPE_BY_TORCH_STORAGE.get(name)


def from_torch(name: str) -> DType | None:
    """The dtype torch calls ``torch.<name>``, or None."""
    return _DTYPE_BY_NAME.get(name)


@cache
def to_numpy(dtype: DType) -> np.dtype[Any]:
    """The numpy dtype whose elements have these bytes.

    Raises:
        KeyError: complex32 and packed types, which neither numpy nor ml_dtypes knows.
    """
    import ml_dtypes
    import numpy as np

    if dtype is DType.COMPLEX32 or dtype.num_values > 1:
        raise KeyError(dtype)
    name = dtype.value
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, name))
    return found


def decode_number(data: bytes, dtype: DType) -> float:
    """The number of one element by its bytes."""
    import numpy as np

    name = str(dtype.value)  # ml_dtypes takes time to import, and few steps need it
    found: float = np.frombuffer(data, name if name in np.sctypeDict else to_numpy(dtype))[0].item()
    return found
