"""Quantized weights times their scales, as tensors that are computed when they are read.

A stored element holds one value of 8 bits, or several of 4, the lowest bits first. Values and scales become float32,
and their product is rounded to the dtype in which the tool that made the checkpoint computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.casts import cast_into
from ckpt_tools.core.dtypes import DType, to_numpy
from ckpt_tools.core.manifest import RegionwiseTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

STRIP_BYTES = 4 << 20
"""The part of a transposed matrix that is kept: whole rows of the result are narrow columns of what is stored, which
would be read again for each piece."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class ValueFormat(Enum):
    """A form of stored values: the bits of one, and its name."""

    E2M1 = 4, "e2m1"
    """OCP Microscaling Formats 1.0, section 5.3.3: a sign, two bits of exponent, one of mantissa."""
    INT4 = 4, "int4"
    """Stored plus 8, as compressed-tensors packs integers."""
    PLUS_128 = 8, "int8 plus 128"
    """The same of 8 bits."""
    INT8 = 8, "int8"
    E4M3 = 8, "float8_e4m3fn"
    E5M2 = 8, "float8_e5m2"

    @property
    def bits(self) -> int:
        return self.value[0]


class ThirdOperand(Enum):
    """The use of a third operand."""

    NONE = "none"
    MULTIPLY_SCALES = "the scales times it"
    DIVIDE_SCALES = "the scales divided by it"
    DIVIDE_SCALES_ROUNDED = "the scales divided by it, and rounded to bfloat16"
    ZERO_POINTS = "subtracted from the values, as zero points"


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight(RegionwiseTensor):
    """Values times scales: the operands are the stored weight, its scales if it has any, and what ``third_operand``
    says.

    ``block_shape`` are the elements in each dim of the stored weight that share a scale. Dims that the scales lack at
    their end are of one block. Scales that are bytes are exponents of two, less ``exponent_bias``. ``is_transposed``
    exchanges the last two dims of the result; ``factor`` is multiplied last.
    """

    value_format: ValueFormat
    block_shape: Shape
    third_operand: ThirdOperand = ThirdOperand.NONE
    factor: float = 1.0
    exponent_bias: int = 127
    is_transposed: bool = False

    @property
    def working_bytes(self) -> int:
        """The values and the scales in float32, indices of values as numpy makes them, and the stored elements."""
        return (9 << 20) + (STRIP_BYTES if self.is_transposed else 0)

    def get_operand_regions(self, box: Box) -> Sequence[Box]:
        box = self._widen_to_strip(self._to_stored_box(box))
        grid = self._to_block_box(box)
        return self._to_element_box(box), *(
            Box(grid.start[: len(each.shape)], grid.stop[: len(each.shape)])
            if each.shape == self.operands[1].shape
            else Box.whole(each.shape)
            for each in self.operands[1:]
        )

    def compute_box(self, box: Box, parts: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        stored = self._to_stored_box(box)
        is_plain = self.dtype is DType.FLOAT32 and not self.is_transposed
        found = self._decode_values(stored, parts[0], out if is_plain else None)
        scale = self._to_float32(parts[1]) if len(parts) > 1 else np.ones((1,) * len(box.start), np.float32)
        if self.third_operand is ThirdOperand.ZERO_POINTS:
            found -= self._repeat_scales(stored, self._to_float32(parts[2]))
        elif self.third_operand is not ThirdOperand.NONE:
            scale = _combine_scales(self.third_operand, scale, self._to_float32(parts[2]))
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            found *= self._repeat_scales(stored, scale)
            if self.factor != 1.0:
                found *= np.float32(self.factor)
        if self.is_transposed:
            found = found.swapaxes(-1, -2)
        if self.dtype is not DType.FLOAT32:
            flat = np.ascontiguousarray(found).reshape(-1)
            cast_into(flat, DType.FLOAT32, out.reshape(-1).view(np.uint8).data, self.dtype)
        elif found is not out:
            out[...] = found

    @property
    def _values_per_element(self) -> int:
        """Values in a stored element."""
        return self.operands[0].dtype.item_bytes * 8 // self.value_format.bits

    def _to_stored_box(self, box: Box) -> Box:
        """A box of the result as one of the values as they are stored."""
        if not self.is_transposed:
            return box
        *lead, last, before = zip(box.start, box.stop, strict=True)
        start, stop = zip(*lead, before, last, strict=True)
        return Box(start, stop)

    def _widen_to_strip(self, box: Box) -> Box:
        """The values to read for a box: of a transposed matrix a strip of columns, in which the next pieces lie too."""
        if not self.is_transposed:
            return box
        # A row of the transposed result is a column of what is stored: alone it would cost a read of every stored row.
        # Strips lie on a fixed grid, so that the next pieces are in the strip that was read for this one.
        rows, columns, block = self.shape[-1], self.shape[-2], self.block_shape[-1]
        width = STRIP_BYTES * self._values_per_element // max(1, rows * self.operands[0].dtype.item_bytes)
        width = max(1, width // block) * block
        first = box.start[-1] - box.start[-1] % width
        last = min(max(box.stop[-1], first + width), columns)
        return Box((*box.start[:-2], 0, first), (*box.stop[:-2], rows, last))

    def _to_element_box(self, box: Box) -> Box:
        """The stored elements that hold the values of a box."""
        step = self._values_per_element
        return Box((*box.start[:-1], box.start[-1] // step), (*box.stop[:-1], -(-box.stop[-1] // step)))

    def _decode_values(self, box: Box, part: NDArray[Any], out: NDArray[Any] | None) -> NDArray[np.float32]:
        """The values of a box, from the stored elements that were read for it."""
        # Two values of 4 bits share a byte, the low one first, and the table gives both as one number of 64 bits, which
        # is then seen as two float32. A box that begins at an odd value starts inside a byte: `skipped` drops its
        # first.
        element_box = self._to_element_box(self._widen_to_strip(box))
        first = element_box.start[-1] * self._values_per_element
        value_slice = slice(box.start[-1] - first, box.stop[-1] - first)
        per_byte = 8 // self.value_format.bits
        leading_slices = _slice_in(box, element_box)[:-1]
        data: NDArray[np.uint8] = part.view(np.uint8)[
            (*leading_slices, slice(value_slice.start // per_byte, -(-value_slice.stop // per_byte)))
        ]
        table = _make_decoding_table(self.value_format)
        if per_byte == 1 and out is not None:
            np.take(table, data, out=out, mode="wrap")
            return out
        decoded_values: NDArray[np.float32] = np.take(table, data, mode="wrap").view(np.float32)
        skipped = value_slice.start % per_byte
        return decoded_values[..., skipped : skipped + value_slice.stop - value_slice.start]

    def _to_float32(self, numbers: NDArray[Any]) -> NDArray[np.float32]:
        """Scales or zero points in float32."""
        with np.errstate(over="ignore"):
            floats: NDArray[np.float32] = (
                np.ldexp(np.float32(1), numbers.astype(np.int32) - self.exponent_bias)
                if numbers.dtype == np.uint8
                else numbers.astype(np.float32, copy=False)
            )
        return floats

    def _to_block_box(self, box: Box) -> Box:
        """The blocks that a box lies in."""
        start = tuple(at // block for at, block in zip(box.start, self.block_shape, strict=True))
        stop = tuple(-(-at // block) for at, block in zip(box.stop, self.block_shape, strict=True))
        return Box(start, stop)

    def _repeat_scales(self, box: Box, scale: NDArray[np.float32]) -> NDArray[np.float32]:
        """The scale of each value of a box, of those that were read for it; dims of one block are left to numpy's
        broadcasting."""
        # Of the scales that were read, take those of this box, repeat each along its block, and cut to the box, whose
        # first value may lie in the middle of a block.
        scale = scale.reshape(scale.shape + (1,) * (len(box.start) - scale.ndim))
        blocks = self._to_block_box(box)
        block_slices = _slice_in(blocks, self._to_block_box(self._widen_to_strip(box)))
        sizes: tuple[int, ...] = scale.shape
        scale_slices = [at if extent > 1 else slice(None) for at, extent in zip(block_slices, sizes, strict=True)]
        scale = scale[tuple(scale_slices)]
        for dim in reversed(range(scale.ndim)):
            block = self.block_shape[dim]
            if scale.shape[dim] > 1 and block > 1:
                lead = box.start[dim] % block
                scale = np.repeat(scale, block, axis=dim)
                scale = scale[(*(slice(None),) * dim, slice(lead, lead + box.stop[dim] - box.start[dim]))]
        return scale


def _slice_in(box: Box, outer: Box) -> tuple[slice, ...]:
    """A box as a part of one that holds it."""
    inner = box.relative_to(outer.start)
    return tuple(map(slice, inner.start, inner.stop))


def _combine_scales(
    third_operand: ThirdOperand, scale: NDArray[np.float32], other: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The scales with one of the whole tensor."""
    number = other.reshape(-1)[0]
    with np.errstate(all="ignore"):
        combined_scales: NDArray[np.float32] = (
            scale * number if third_operand is ThirdOperand.MULTIPLY_SCALES else scale / number
        )
    if third_operand is ThirdOperand.DIVIDE_SCALES_ROUNDED:
        rounded = np.empty(combined_scales.shape, to_numpy(DType.BFLOAT16))
        cast_into(combined_scales.reshape(-1), DType.FLOAT32, rounded.reshape(-1).view(np.uint8).data, DType.BFLOAT16)
        combined_scales = rounded.astype(np.float32)
    return combined_scales


@cache
def _make_decoding_table(value_format: ValueFormat) -> NDArray[Any]:
    """The values of each byte: a float32, or two of them as one number of 64 bits."""
    numbers = np.arange(256, dtype=np.uint8)
    if value_format.bits == 4:
        halves = np.array(_E2M1 if value_format is ValueFormat.E2M1 else range(-8, 8), np.float32)
        return np.stack([halves[numbers & 15], halves[numbers >> 4]], axis=1).view(np.uint64).reshape(-1)
    if value_format is ValueFormat.PLUS_128:
        return numbers.astype(np.float32) - 128
    return numbers.view(to_numpy(DType(value_format.value[1]))).astype(np.float32)
