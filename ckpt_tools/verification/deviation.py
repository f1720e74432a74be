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
from ckpt_tools.messages.showing import Jsonable
from ckpt_tools.messages.wording import format_count

MEASURED_ELEMENTS = 1 << 16
"""Elements that are measured at a time: about 4 MB as float64 with their temporaries."""

ByteArray = NDArray[np.uint8]


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
        return self._append_details(f"{self.num_differing:,} of {format_count(numel, 'element')} {verb}")

    def as_numbers(self) -> str:
        """The same for two dtypes: ``equal as numbers``, or how many elements differ, and by how much."""
        if not self.num_differing:
            return "equal as numbers"
        verb = "differs" if self.num_differing == 1 else "differ"
        return self._append_details(f"{format_count(self.num_differing, 'element')} {verb} as numbers")

    def _append_details(self, text: str) -> str:
        if self.max_abs:
            text += f", by at most {self.max_abs:.6g} (relative {self.max_rel:.3g})"
        detail_counts = (
            (self.num_nan_bits, "in the bits of a NaN"),
            (self.num_zero_signs, "in the sign of a zero"),
            (self.num_one_nan, "NaN on one side only"),
        )
        return "; ".join([text, *(f"{number:,} {what}" for number, what in detail_counts if number)])


def measure_deviation(ours: ByteArray, theirs: ByteArray, our_dtype: DType, their_dtype: DType) -> Deviation:
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
    for start in range(0, len(ours), MEASURED_ELEMENTS):
        block = slice(start, start + MEASURED_ELEMENTS)
        if is_same_dtype:
            is_different = (ours[block] != theirs[block]).any(axis=1)
            total += _measure_differing_pairs(
                *(widen_elements(each[block][is_different], our_dtype) for each in (ours, theirs))
            )
        else:
            a, b = widen_elements(ours[block], our_dtype), widen_elements(theirs[block], their_dtype)
            is_different = ~((a == b) | (np.isnan(a) & np.isnan(b)))
            total += _measure_differing_pairs(a[is_different], b[is_different])
    return total


def widen_elements(elements: ByteArray, dtype: DType) -> NDArray[Any]:
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


def _measure_differing_pairs(ours: NDArray[Any], theirs: NDArray[Any]) -> Deviation:
    """Deviation of pairs that are known to differ."""
    our_nans, their_nans = np.isnan(ours), np.isnan(theirs)
    is_number = ~(our_nans | their_nans)
    max_abs, max_rel = _find_largest_differences(ours[is_number], theirs[is_number])
    return Deviation(
        num_differing=len(ours),
        num_nan_bits=int((our_nans & their_nans).sum()),
        num_zero_signs=int((ours[is_number] == theirs[is_number]).sum()),
        num_one_nan=int((our_nans ^ their_nans).sum()),
        max_abs=max_abs,
        max_rel=max_rel,
    )


def _find_largest_differences(ours: NDArray[Any], theirs: NDArray[Any]) -> tuple[float, float]:
    if not len(ours):
        return 0, 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        absolute = _compute_absolute_difference(ours, theirs)
        magnitude = np.maximum(_compute_magnitude(ours), _compute_magnitude(theirs))
        relative = np.divide(absolute, magnitude, out=np.zeros(len(absolute)), where=magnitude > 0)
    relative[np.isinf(magnitude)] = np.inf
    return absolute.max().item(), float(relative.max())


def _compute_absolute_difference(ours: NDArray[Any], theirs: NDArray[Any]) -> NDArray[Any]:
    """``|a - b|``, exactly for integers: the difference of two int64 fits a uint64. Equal infinities are not apart."""
    if ours.dtype != theirs.dtype:
        ours, theirs = _convert_to_floats(ours), _convert_to_floats(theirs)
    if ours.dtype.kind in "iu":
        # The difference of two int64 can need 65 bits. That of the larger and the smaller one is not negative and fits
        # a uint64. Subtracting their bits as uint64 gives it, because two's complement wraps around.
        upper, lower = np.maximum(ours, theirs), np.minimum(ours, theirs)
        return np.asarray(upper.view(np.uint64) - lower.view(np.uint64))
    if ours.dtype.kind == "c":
        return np.asarray(
            np.hypot(
                _compute_absolute_difference(ours.real, theirs.real),
                _compute_absolute_difference(ours.imag, theirs.imag),
            )
        )
    return np.asarray(np.where(ours == theirs, 0.0, np.abs(ours - theirs)))


def _convert_to_floats(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _compute_magnitude(array: NDArray[Any]) -> NDArray[Any]:
    """Convert to float64: int64 cannot hold the magnitude of its smallest number."""
    return np.asarray(np.abs(_convert_to_floats(array)))
