"""Finds the shards that a range of a tensor needs, and the part of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ckpt_tools.core.boxes import Box, Shape, flat_index, flat_interval, from_flat, is_contiguous
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange, FlatIndex, Framing, ShardTable


@dataclass(frozen=True, slots=True)
class FlatHit:
    """Elements ``[start, stop)`` of the ``numel`` of one stored piece, which belong at element ``into`` of the
    destination and after it."""

    at: ByteRange
    framing: Framing
    dtype: DType
    numel: int
    start: int
    stop: int
    into: int


@dataclass(frozen=True, slots=True)
class BoxHit:
    """Elements of one stored piece that a block of the destination needs.

    ``source`` is a box in the piece, whose geometry is ``shape`` and ``strides`` (None: row-major). The destination
    is an array of elements; the block is ``block`` elements large in each dim, row-major, starts at element
    ``block_start``, and ``into`` is the box in it, of the same shape as ``source``.
    """

    at: ByteRange
    framing: Framing
    dtype: DType
    shape: Shape
    strides: Shape | None
    source: Box
    into: Box
    block: Shape
    block_start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


Hit = FlatHit | BoxHit


def hits(table: ShardTable, box: Box, shape: Shape, start: int, stop: int) -> Sequence[Hit]:
    """Stored pieces of the elements ``[start, stop)`` of the row-major order of ``box``.

    ``shape`` is the geometry of ``box``, which need not be that of ``table``. The hits together are exactly those
    elements, numbered from 0.
    """
    if start >= stop:
        return []
    if table.flat is not None and is_contiguous(box, shape):
        first, _ = flat_interval(box, shape)
        return _flat_hits(table, table.flat, first + start, first + stop)
    return _box_hits(table, box, shape, start, stop)


def _flat_hits(table: ShardTable, flat: FlatIndex, start: int, stop: int) -> list[FlatHit]:
    """The fast path: intervals against intervals, one binary search."""
    found = []
    for row, lower, upper in zip(*(column.tolist() for column in flat.between(start, stop)), strict=True):
        lo, hi = max(start, lower), min(stop, upper)
        at = table.byte_range(row)
        found.append(FlatHit(at, table.framing, table.dtype, upper - lower, lo - lower, hi - lower, lo - start))
    return found


def _box_hits(table: ShardTable, box: Box, shape: Shape, start: int, stop: int) -> list[BoxHit]:
    table, blocks = _common_geometry(table, box, shape, start, stop)
    found, block_start = [], 0
    for block in blocks:
        lower = np.maximum(table.starts, np.array(block.start, np.int64))
        upper = np.minimum(table.stops, np.array(block.stop, np.int64))
        for row in np.flatnonzero((upper > lower).all(axis=1)).tolist():
            common = Box(tuple(lower[row].tolist()), tuple(upper[row].tolist()))
            piece = table.box(row)
            found.append(
                BoxHit(
                    at=table.byte_range(row),
                    framing=table.framing,
                    dtype=table.dtype,
                    shape=piece.shape,
                    strides=None if table.strides is None else table.stride(row),
                    source=common.relative_to(piece.start),
                    into=common.relative_to(block.start),
                    block=block.shape,
                    block_start=block_start,
                )
            )
        block_start += block.numel
    return found


def _common_geometry(table: ShardTable, box: Box, shape: Shape, start: int, stop: int) -> tuple[ShardTable, list[Box]]:
    """Table and wanted elements in one geometry: the tensor's own, where the two differ."""
    assert prod(table.shape) == prod(shape), "two geometries of one tensor"
    if table.shape != shape and len(shape) <= 1:
        first, _ = flat_interval(box, shape)
        return table, from_flat(first + start, first + stop, table.shape)
    blocks = [part.shift(box.start) for part in from_flat(start, stop, box.shape)]
    return (table if table.shape == shape else _unfolded(table, shape, blocks)), blocks


def _unfolded(table: ShardTable, shape: Shape, blocks: list[Box]) -> ShardTable:
    """The intervals near ``blocks``, a flattening, as boxes of ``shape``.

    Only those: of a parameter that 512 ranks share, a task needs a few, and unfolding them all costs it 15 ms.
    """
    assert table.flat is not None, "a flattening is made of intervals"
    first = min(flat_index(block.start, shape) for block in blocks)
    last = max(flat_index(tuple(stop - 1 for stop in block.stop), shape) for block in blocks)
    return table.rows(table.flat.between(first, last + 1).rows).in_shape(shape)
