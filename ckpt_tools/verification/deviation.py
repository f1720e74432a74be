"""Deviation between the elements of two tensors: how many differ in any bit, and the largest differences.

Two elements of one dtype differ if any bit does, so that another payload of a NaN and the sign of a zero count, and
are counted apart. Elements of two dtypes are compared as numbers: exactly if both are integers of at most 64 signed
bits, else as float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.dtypes import DType, to_numpy
from ckpt_tools.core.showing import Jsonable
from ckpt_tools.core.wording import count

MEASURED_ELEMENTS = 1 << 16
"""Elements that are measured at a time: about 4 MB as float64 with their temporaries."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Deviation(Jsonable):
    """The differences between two runs of elements. The sum of two deviations describes both runs.

    ``max_abs`` and ``max_rel`` are over pairs of numbers: ``|a - b|``, and that over ``max(|a|, |b|)``, as
    ``math.isclose`` takes it. A pair with a NaN is only in the counts.
    """

    num_differing: int = 0
    num_nan_bits: int = 0
    """Part of ``num_differing``: NaN on both sides, with other payloads or signs."""
    num_zero_signs: int = 0
    """Part of ``num_differing``: zero on both sides, with other signs."""
    num_one_nan: int = 0
    """Part of ``num_differing``: NaN on one side only."""
    max_abs: float = 0
    max_rel: float = 0.0

    def __add__(self, other: Deviation) -> Deviation:
        return Deviation(
            self.num_differing + other.num_differing,
            self.num_nan_bits + other.num_nan_bits,
            self.num_zero_signs + other.num_zero_signs,
            self.num_one_nan + other.num_one_nan,
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
        )

    def described(self, numel: int) -> str:
        """In words: ``3 of 10 elements differ, by at most 0.5 (relative 0.1); 1 in the sign of a zero``."""
        verb = "differs" if numel == 1 else "differ"
        return self._with_details(f"{self.num_differing:,} of {count(numel, 'element')} {verb}")

    def as_numbers(self) -> str:
        """The same for two dtypes: ``equal as numbers``, or how many elements differ, and by how much."""
        if not self.num_differing:
            return "equal as numbers"
        verb = "differs" if self.num_differing == 1 else "differ"
        return self._with_details(f"{count(self.num_differing, 'element')} {verb} as numbers")

    def _with_details(self, text: str) -> str:
        if self.max_abs:
            text += f", by at most {self.max_abs:.6g} (relative {self.max_rel:.3g})"
        apart = (
            (self.num_nan_bits, "in the bits of a NaN"),
            (self.num_zero_signs, "in the sign of a zero"),
            (self.num_one_nan, "NaN on one side only"),
        )
        return "; ".join([text, *(f"{number:,} {what}" for number, what in apart if number)])


def measure(ours: Bytes, theirs: Bytes, our_dtype: DType, their_dtype: DType) -> Deviation:
    """The deviation of two contiguous runs of bytes with the same number of elements. Those of packed values are only
    counted."""
    is_same_dtype = our_dtype is their_dtype
    # Eight bytes at a time if possible: an eighth of the comparisons and of their memory.
    width = np.uint64 if len(ours) % 8 == 0 else np.uint8
    if is_same_dtype and np.array_equal(ours.view(width), theirs.view(width)):
        return Deviation()
    ours, theirs = ours.reshape(-1, our_dtype.item_bytes), theirs.reshape(-1, their_dtype.item_bytes)
    total = Deviation()
    if our_dtype.num_values > 1 or their_dtype.num_values > 1:
        return Deviation(num_differing=int((ours != theirs).any(axis=1).sum()) if is_same_dtype else len(ours))
    for first in range(0, len(ours), MEASURED_ELEMENTS):
        part = slice(first, first + MEASURED_ELEMENTS)
        if is_same_dtype:
            differ = (ours[part] != theirs[part]).any(axis=1)
            total += _deviation(*(numbers(each[part][differ], our_dtype) for each in (ours, theirs)))
        else:
            a, b = numbers(ours[part], our_dtype), numbers(theirs[part], their_dtype)
            differ = ~((a == b) | (np.isnan(a) & np.isnan(b)))
            total += _deviation(a[differ], b[differ])
    return total


def numbers(elements: Bytes, dtype: DType) -> NDArray[Any]:
    """Elements, one a row of bytes, as the widest numpy type of their kind: (u)int64, float64 or complex128."""
    raw = np.ascontiguousarray(elements).reshape(-1)
    if dtype is DType.COMPLEX32:
        halves = raw.view(np.float16).astype(np.float64)
        return halves.view(np.complex128)
    if dtype is DType.UINT64:
        return raw.view(np.uint64)
    if dtype is DType.BOOL:
        return raw.astype(np.int64)
    stored = raw.view(to_numpy(dtype))
    is_complex = dtype.value.startswith("complex")
    with np.errstate(invalid="ignore"):
        return stored.astype(np.float64 if dtype.is_floating else np.complex128 if is_complex else np.int64)


def _deviation(ours: NDArray[Any], theirs: NDArray[Any]) -> Deviation:
    """Deviation of pairs that are known to differ."""
    our_nans, their_nans = np.isnan(ours), np.isnan(theirs)
    plain = ~(our_nans | their_nans)
    max_abs, max_rel = _largest(ours[plain], theirs[plain])
    return Deviation(
        num_differing=len(ours),
        num_nan_bits=int((our_nans & their_nans).sum()),
        num_zero_signs=int((ours[plain] == theirs[plain]).sum()),
        num_one_nan=int((our_nans ^ their_nans).sum()),
        max_abs=max_abs,
        max_rel=max_rel,
    )


def _largest(ours: NDArray[Any], theirs: NDArray[Any]) -> tuple[float, float]:
    if not len(ours):
        return 0, 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        apart = _apart(ours, theirs)
        size = np.maximum(_magnitude(ours), _magnitude(theirs))
        relative = np.divide(apart, size, out=np.zeros(len(apart)), where=size > 0)
    relative[np.isinf(size)] = np.inf
    return apart.max().item(), float(relative.max())


def _apart(ours: NDArray[Any], theirs: NDArray[Any]) -> NDArray[Any]:
    """``|a - b|``, exactly for integers: the difference of two int64 fits a uint64. Equal infinities are not apart."""
    if ours.dtype != theirs.dtype:
        ours, theirs = _as_floats(ours), _as_floats(theirs)
    if ours.dtype.kind in "iu":
        upper, lower = np.maximum(ours, theirs), np.minimum(ours, theirs)
        return np.asarray(upper.view(np.uint64) - lower.view(np.uint64))
    if ours.dtype.kind == "c":
        return np.asarray(np.hypot(_apart(ours.real, theirs.real), _apart(ours.imag, theirs.imag)))
    return np.asarray(np.where(ours == theirs, 0.0, np.abs(ours - theirs)))


def _as_floats(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _magnitude(array: NDArray[Any]) -> NDArray[Any]:
    """Convert to float64: int64 cannot hold the magnitude of its smallest number."""
    return np.asarray(np.abs(_as_floats(array)))
