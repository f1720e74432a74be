"""Element type conversion, block by block, to the bits that torch on the CPU gives.

Widening is exact and narrowing rounds to nearest even; float64 becomes a 16-bit type by way of float32, as torch does,
which for a few values in a million is another neighbour than one rounding gives.

Of a NaN torch keeps the sign and the upper bits of the payload and makes it quiet, and so do we. It contradicts itself
in two places, found by comparing contiguous, strided and single-element tensors under its AVX-512, AVX2 and default
kernels (torch 2.15):

- to bfloat16, the vector kernels make every NaN ``ffff`` and the scalar ones ``7fc0``. We write ``7fc0``, which is
  also what it always makes of a float16 one;
- from float16 to float32, the vector kernels keep a negative NaN and the scalar one makes it ``7fffffff``. We keep it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.dtypes import DType, to_numpy
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UnsupportedError

MAX_CAST_BYTES = 1 << 20
"""Of the stored elements before a cast, at a time: they are still in the processor's cache afterwards."""

CASTABLE = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
"""The types between which weights are cast. The 8-bit ones mean nothing without the scales stored beside them."""

_BF16_NAN = 0x7FC0


def suggest_dtype_fix(dtype: DType) -> str:
    """Advice on a tensor whose dtype a format does not have."""
    if dtype in CASTABLE:
        return "cast it (such as to float32) or exclude it"
    if dtype.is_floating:
        return f"dequantize it with {format_option('dequantize', True)}, or exclude it"
    return "exclude it"


def check_cast(source: DType, target: DType) -> None:
    """Raises UnsupportedError where ``source`` cannot become ``target``."""
    if source is not target and not {source, target} <= CASTABLE:
        raise UnsupportedError(f"casting {source.value} to {target.value} is not supported")


def cast_into(
    elements: NDArray[Any], source: DType, out: memoryview, target: DType, *, addend: int | NDArray[np.float32] = 0
) -> None:
    """Write ``elements``, whose bytes are ``source``, as ``target`` into ``out``, which has exactly their room.

    ``addend``, a number or one for each element, is added in float32, or in float64 to float64. The memory of an array
    ``addend`` may be overwritten.
    """
    values = elements.view(to_numpy(source))
    result = np.frombuffer(out, dtype=to_numpy(target))
    with np.errstate(over="ignore", invalid="ignore"):
        if not isinstance(addend, int) or addend:
            accumulation_dtype = np.dtype(np.float64 if source is DType.FLOAT64 else np.float32)
            # Sum into the memory of the output or of the addend, if either has the type of the sum.
            arrays = [each for each in (result, addend) if isinstance(each, np.ndarray)]
            scratch = next((each for each in arrays if each.dtype == accumulation_dtype), None)
            total = np.add(values, addend, out=scratch, dtype=accumulation_dtype)
            if total is not result:
                _convert_values(total, result, target)
            return
        if source is DType.FLOAT16 or (source is DType.BFLOAT16 and target is DType.FLOAT16):
            # One look-up an element is 2.5 times as fast as numpy's arithmetic: 6 GB/s of float32 written.
            np.take(_build_lookup_table(source, target), values.view(np.uint16), out=result, mode="wrap")
        else:
            _convert_values(values, result, target)


@cache
def _build_lookup_table(source: DType, target: DType) -> NDArray[Any]:
    """The result for each of the 65,536 values of a 16-bit type."""
    float32_values = np.arange(1 << 16, dtype=np.uint16).view(to_numpy(source)).astype(np.float32)
    float32_values.view(np.uint32)[np.isnan(float32_values)] |= 0x0040_0000
    result = np.empty(1 << 16, to_numpy(target))
    _convert_values(float32_values, result, target)
    return result


def _convert_values(values: NDArray[Any], result: NDArray[Any], target: DType) -> None:
    if target is DType.FLOAT16:
        _round_to_half(values.astype(np.float32, copy=False), result.view(np.uint16))
        return
    result[:] = values
    if target is DType.BFLOAT16 and has_nan(values):
        result.view(np.uint16)[np.isnan(values)] = _BF16_NAN


def has_nan(values: NDArray[Any]) -> bool:
    """Whether a value is NaN, in a tenth of the time that rounding takes; ``np.isnan(values).any()`` takes twice
    that."""
    return bool(np.isnan(np.maximum.reduce(values, initial=0)))


def is_finite(values: NDArray[Any]) -> bool:
    """Whether no value is NaN or infinite, in the time of two ``has_nan``."""
    return bool(np.isfinite(np.maximum.reduce(values, initial=0)) and np.isfinite(np.minimum.reduce(values, initial=0)))


def _round_to_half(float32_values: NDArray[np.float32], half_bits: NDArray[np.uint16]) -> None:
    """float32 to the bits of float16, at 3.3 GB/s read by a thread whatever the numbers.

    numpy's own takes 2.4 ns for a number, and 65 for one that overflows or is subnormal in float16, as small weights
    are. Adding to a number the power of two that is ``2**13`` times its own, or 0.5 where it is subnormal in float16,
    leaves it rounded to ten bits at the lower end of the sum. The difference of the two as integers is the rounded
    significand; the power's exponent, less 126, is the float16's own. What is 65,536 or more is infinite like 65,536.
    """
    magnitude = np.absolute(float32_values)
    np.minimum(magnitude, _get_constant_array(65536.0, len(magnitude)), out=magnitude)
    power_bits = magnitude.view(np.uint32) & 0x7F80_0000  # the exponent alone, as the bits of a power of two
    power_bits += 13 << 23  # times 2**13
    power = power_bits.view(np.float32)
    np.maximum(power, _get_constant_array(0.5, len(magnitude)), out=power)
    magnitude += power  # the addition rounds to nearest even; power has the exponent of the sum
    bits = magnitude.view(np.uint32)
    bits -= power_bits  # the rounded significand, with a carry where it rounds up to the next power of two
    power_bits >>= 13  # the exponent, where float16 has it
    bits += power_bits
    half_bits[:] = bits
    half_bits -= np.uint16((126 << 10) % (1 << 16))
    half_bits |= np.left_shift(np.signbit(float32_values), 15, dtype=np.uint16)
    if has_nan(float32_values):
        nans = np.isnan(float32_values)
        bits = float32_values.view(np.uint32)[nans]
        half_bits[nans] = (bits >> 16) & 0x8000 | 0x7E00 | (bits >> 13) & 0x01FF


def _get_constant_array(value: float, length: int) -> NDArray[np.float32]:
    """An array of ``length`` times ``value``: numpy's minimum of two arrays is five times as fast as that of an array
    and a number."""
    return _make_constant_array(value, 1 << (length - 1).bit_length())[:length]


@cache
def _make_constant_array(value: float, length: int) -> NDArray[np.float32]:
    return np.full(length, value, np.float32)
