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


class DType(Enum):
    """An element type; the value is its torch name without the ``torch.`` prefix."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    COMPLEX32 = "complex32"

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self]

    @property
    def is_floating(self) -> bool:
        """True for real floating-point types, the only ones a cast applies to."""
        return self.value.startswith(("float", "bfloat"))

    @property
    def safetensors_name(self) -> str | None:
        """The name in a safetensors header, or None where that format has no such type."""
        return _SAFETENSORS.get(self)

    @property
    def torch_storage(self) -> str | None:
        """The ``torch.*Storage`` class that torch pickles for it; None: an untyped storage with a dtype beside it."""
        return _TORCH_STORAGE.get(self)


_ITEM_BYTES = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1,
    DType.FLOAT8_E4M3FNUZ: 1,
    DType.FLOAT8_E5M2FNUZ: 1,
    DType.FLOAT8_E8M0FNU: 1,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT64: 8,
    DType.UINT32: 4,
    DType.UINT16: 2,
    DType.UINT8: 1,
    DType.BOOL: 1,
    DType.COMPLEX64: 8,
    DType.COMPLEX128: 16,
    DType.COMPLEX32: 4,
}

# safetensors 0.8.0, safetensors/src/tensor.rs, enum Dtype. complex128 and complex32 have no name there.
_SAFETENSORS = {
    DType.FLOAT64: "F64",
    DType.FLOAT32: "F32",
    DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16",
    DType.FLOAT8_E4M3FN: "F8_E4M3",
    DType.FLOAT8_E5M2: "F8_E5M2",
    DType.FLOAT8_E4M3FNUZ: "F8_E4M3FNUZ",
    DType.FLOAT8_E5M2FNUZ: "F8_E5M2FNUZ",
    DType.FLOAT8_E8M0FNU: "F8_E8M0",
    DType.INT64: "I64",
    DType.INT32: "I32",
    DType.INT16: "I16",
    DType.INT8: "I8",
    DType.UINT64: "U64",
    DType.UINT32: "U32",
    DType.UINT16: "U16",
    DType.UINT8: "U8",
    DType.BOOL: "BOOL",
    DType.COMPLEX64: "C64",
}

# torch/storage.py, _dtype_to_storage_type_map(): newer types have no class and are saved through UntypedStorage.
_TORCH_STORAGE = {
    DType.FLOAT64: "DoubleStorage",
    DType.FLOAT32: "FloatStorage",
    DType.FLOAT16: "HalfStorage",
    DType.BFLOAT16: "BFloat16Storage",
    DType.INT64: "LongStorage",
    DType.INT32: "IntStorage",
    DType.INT16: "ShortStorage",
    DType.INT8: "CharStorage",
    DType.UINT8: "ByteStorage",
    DType.BOOL: "BoolStorage",
    DType.COMPLEX64: "ComplexFloatStorage",
    DType.COMPLEX128: "ComplexDoubleStorage",
}

_BY_SAFETENSORS = {name: dtype for dtype, name in _SAFETENSORS.items()}

_BY_STORAGE = {name: dtype for dtype, name in _TORCH_STORAGE.items()}

_BY_NAME = {dtype.value: dtype for dtype in DType}


def from_safetensors(name: str) -> DType | None:
    """The dtype a safetensors header calls ``name``, or None."""
    return _BY_SAFETENSORS.get(name)


def from_torch_storage(name: str) -> DType | None:
    """The dtype of the elements of ``torch.<name>`` (``FloatStorage`` ...), or None."""
    return _BY_STORAGE.get(name)


def from_torch(name: str) -> DType | None:
    """The dtype torch calls ``torch.<name>``, or None."""
    return _BY_NAME.get(name)


@cache
def to_numpy(dtype: DType) -> np.dtype[Any]:
    """The numpy dtype whose elements have these bytes.

    Raises:
        KeyError: complex32, which neither numpy nor ml_dtypes knows.
    """
    import ml_dtypes
    import numpy as np

    if dtype is DType.COMPLEX32:
        raise KeyError(dtype)
    name = dtype.value
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, name))
    return found


SPARE_BYTES = 64
"""More than any element has: what a cut moves back, so as to split none, is less."""
