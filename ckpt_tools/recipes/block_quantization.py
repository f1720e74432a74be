"""Weights as integers or floats of 8 bits and their scales, as tensors that are computed when they are read.

A block of elements, which is a row or a square, has one scale. The bits are those of transformers 5.23 (``Fp8Quantize``
in ``integrations/finegrained_fp8.py``) for squares, and of compressed-tensors 0.20 (``calculate_qparams``, and
``quantize`` without zero points) for rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType, to_numpy
from ckpt_tools.core.manifest import RegionwiseTensor
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class BlockFormat(Enum):
    """A form of quantized weights: the dtype of their elements, the least and the largest of them, and the side of the
    blocks, 0 for blocks that are rows."""

    FP8_SQUARES = DType.FLOAT8_E4M3FN, -448.0, 448.0, 128
    FP8_ROWS = DType.FLOAT8_E4M3FN, -448.0, 448.0, 0
    INT8_ROWS = DType.INT8, -128.0, 127.0, 0

    @property
    def dtype(self) -> DType:
        return self.value[0]

    @property
    def side(self) -> int:
        return self.value[3]

    def find_scales_shape(self, shape: Shape) -> Shape:
        """The shape of the scales of a matrix of ``shape``, which ends at the edge of a block."""
        return (shape[0] // self.side, shape[1] // self.side) if self.side else (shape[0], 1)

    def compute_factors(self, values: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        """A number for each block of ``values``, which are rows of the weight ``name``: a square is multiplied by it,
        and its scale is the reciprocal; a row is divided by it, and it is the scale. Raises UnsupportedError for a NaN
        or an infinity."""
        bands = values.reshape(-1, self.side or 1, values.shape[1])
        highest, lowest = (
            reduce_all(reduce_all(bands, axis=1).reshape(len(bands), -1, self.side or values.shape[1]), axis=2)
            for reduce_all in (np.max, np.min)
        )
        largest: NDArray[np.float32] = np.maximum(highest, -lowest)
        if not np.isfinite(largest).all():
            keep = format_option("keep", name)
            raise UnsupportedError(
                f"{name} holds a NaN or an infinity, for which there is no scale; {keep} leaves it as it is", key=name
            )
        _, least, most, side = self.value
        with np.errstate(over="ignore", divide="ignore", under="ignore"):
            if not side:
                scales: NDArray[np.float32] = largest / np.float32((most - least) / 2)
                scales[scales == 0] = np.finfo(np.float32).eps
                return scales
            multipliers: NDArray[np.float32] = np.float32(1) / largest * np.float32(most)
        # Infinite for zeros, which transformers multiplies by 1; and for numbers below 1.4e-36, beside which zeros
        # would become NaN. All these become zeros.
        multipliers[~np.isfinite(multipliers)] = 1
        return multipliers


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedElements(RegionwiseTensor):
    """The elements of 8 bits of the weight ``name``, a matrix of whole blocks, which is the operand."""

    name: str
    block_format: BlockFormat

    @property
    def piece_numel(self) -> int:
        """Whole blocks, so that each element is read once."""
        band_numel = (self.block_format.side or 1) * self.shape[1]
        return max(1, self.max_piece_numel // band_numel) * band_numel

    @property
    def working_bytes(self) -> int:
        """The operand in float32, a piece that is kept, and the strip that is rounded: values, bits and indices."""
        return 5 * max(self.piece_numel, self.max_piece_numel) + 32 * max(self._strip_numel, self.shape[1])

    @property
    def _strip_numel(self) -> int:
        return self.max_piece_numel // 4

    def get_operand_regions(self, box: Box) -> Sequence[Box]:
        return (box,)

    def compute_box(self, box: Box, parts: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        _, least, most, side = self.block_format.value
        (num_rows, num_columns), values = box.shape, parts[0]
        factors = self.block_format.compute_factors(values, self.name)
        blocks = values.reshape(num_rows, -1, side or num_columns)
        factors = np.repeat(factors, side or 1, axis=0)[:, :, None]
        strip_rows = max(1, self._strip_numel // num_columns)
        for first in range(0, num_rows, strip_rows):
            strip = slice(first, first + strip_rows)
            with np.errstate(over="ignore", under="ignore"):
                scaled = (np.multiply if side else np.divide)(blocks[strip], factors[strip])
            if self.dtype is DType.INT8:
                np.clip(scaled, least, most, out=scaled)
                out[strip] = np.rint(scaled, out=scaled).reshape(-1, num_columns)
            else:
                bits = scaled.reshape(-1, num_columns).view(np.uint32)
                upper_bits = bits >> 16
                upper_bits |= (bits & 0xFFFF) != 0
                np.take(_make_e4m3_table(), upper_bits, out=out[strip].view(np.uint8), mode="wrap")


@cache
def _make_e4m3_table() -> NDArray[np.uint8]:
    """The bits of float8_e4m3fn for the upper 16 bits of a float32 of at most 448, the last of them set also where a
    lower one is: four bits of significand are rounded as they are from all, since a tie stays one and nothing becomes
    one. Six times as fast as the cast of ml_dtypes, which also keeps other threads waiting."""
    with np.errstate(invalid="ignore"):
        values = np.arange(1 << 16, dtype=np.uint16).view(to_numpy(DType.BFLOAT16)).astype(np.float32)
        return np.clip(values, -448, 448).astype(to_numpy(DType.FLOAT8_E4M3FN)).view(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class BlockScales(RegionwiseTensor):
    """The scales in float32 of the weight ``name``, a matrix of whole blocks, which is the operand."""

    name: str
    block_format: BlockFormat

    @property
    def piece_numel(self) -> int:
        """Scales of about as many elements as are computed at once elsewhere."""
        band_numel = (self.block_format.side or 1) * self.operands[0].shape[1]
        return max(1, self.max_piece_numel // band_numel) * self.shape[1]

    @property
    def working_bytes(self) -> int:
        """The operand in float32, and what is reduced of it."""
        band_numel = (self.block_format.side or 1) * self.operands[0].shape[1]
        return 5 * max(band_numel, self.max_piece_numel)

    def get_operand_regions(self, box: Box) -> Sequence[Box]:
        rows = self.block_format.side or 1
        return (Box((box.start[0] * rows, 0), (box.stop[0] * rows, self.operands[0].shape[1])),)

    def compute_box(self, box: Box, parts: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        factors = self.block_format.compute_factors(parts[0], self.name)
        out[...] = np.float32(1) / factors if self.block_format.side else factors
