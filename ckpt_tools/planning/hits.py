"""Finds the shards that a range of a tensor needs, and the part of each.

A request is elements ``[start, stop)`` of the row-major order of a box. There are two cases:

- The shards are intervals of the flat tensor, as in ZeRO, and the box is one interval of it too:

      shards    |----a----|----b----|----c----|
      request         [==========]               one binary search, a ``FlatHit`` of each of a and b

- Otherwise the request becomes a few boxes. Each box is intersected with all shards, and each intersection is a
  ``BoxHit``: its extents, its strides in the shard, and its strides in the destination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from ckpt_tools.core.boxes import (
    Box,
    Shape,
    box_to_interval,
    contiguous_strides,
    interval_to_boxes,
    is_contiguous,
    ravel_index,
    split_dims,
)
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange, FlatIndex, Framing, ShardTable


@dataclass(frozen=True, slots=True)
class FlatHit:
    """Elements ``[start, stop)`` of the ``numel`` of one stored piece, which belong at element ``destination_start``
    of the destination and after it."""

    at: ByteRange
    framing: Framing
    dtype: DType
    numel: int
    start: int
    stop: int
    destination_start: int


@dataclass(frozen=True, slots=True)
class BoxHit:
    """Elements of one stored piece of ``numel`` elements that a block of the destination needs.

    Index ``i`` of ``extents`` is element ``start + i * strides`` of the piece, in its row-major order, and element
    ``destination_start + i * destination_strides`` of the destination, which is an array of elements. ``shape`` is that
    of the piece, if it is stored in this shape.
    """

    at: ByteRange
    framing: Framing
    dtype: DType
    numel: int
    extents: Shape
    start: int
    strides: Shape
    destination_start: int
    destination_strides: Shape
    shape: Shape | None = None


Hit = FlatHit | BoxHit


def find_hits(table: ShardTable, box: Box, shape: Shape, start: int, stop: int) -> Sequence[Hit]:
    """Stored pieces of the elements ``[start, stop)`` of the row-major order of ``box``.

    ``shape`` is the geometry of ``box``, which need not be that of ``table``. The hits together are exactly those
    elements, numbered from 0.
    """
    if start >= stop:
        return []
    if table.flat_index is not None and is_contiguous(box, shape):
        first, _ = box_to_interval(box, shape)
        return _find_flat_hits(table, table.flat_index, first + start, first + stop)
    table, blocks = _to_common_geometry(table, box, shape, start, stop)
    return [hit for block in blocks for hit in _find_block_hits(table, block)]


def _find_flat_hits(table: ShardTable, flat: FlatIndex, start: int, stop: int) -> list[FlatHit]:
    """The fast path: intervals against intervals, one binary search."""
    flat_hits = []
    for row, lower, upper in zip(*(column.tolist() for column in flat.select_overlapping(start, stop)), strict=True):
        lo, hi = max(start, lower), min(stop, upper)
        framing, numel, first = table.locate_in_item(row)
        first -= lower
        flat_hits.append(
            FlatHit(table.get_byte_range(row), framing, table.dtype, numel, first + lo, first + hi, lo - start)
        )
    return flat_hits


@dataclass(frozen=True, slots=True)
class _PlacedBox:
    """A box of a tensor, whose first element belongs at element ``destination_start`` of the destination, with strides
    there."""

    box: Box
    destination_start: int
    strides: Shape


def _find_block_hits(table: ShardTable, block: _PlacedBox) -> Iterator[BoxHit]:
    lower = np.maximum(table.starts, np.array(block.box.start, np.int64))
    upper = np.minimum(table.stops, np.array(block.box.stop, np.int64))
    for row in np.flatnonzero((upper > lower).all(axis=1)).tolist():
        start_index, extents = tuple(lower[row].tolist()), tuple((upper[row] - lower[row]).tolist())
        framing, numel, item_start = table.locate_in_item(row)
        shard_box, strides = table.get_box(row), table.get_strides(row)
        yield BoxHit(
            at=table.get_byte_range(row),
            framing=framing,
            dtype=table.dtype,
            numel=numel,
            extents=extents,
            start=item_start + _element_distance(shard_box.start, start_index, strides),
            strides=strides,
            destination_start=block.destination_start + _element_distance(block.box.start, start_index, block.strides),
            destination_strides=block.strides,
            shape=shard_box.shape if table.item_parts is None else None,
        )


def _element_distance(origin: Shape, index: Shape, strides: Shape) -> int:
    """Elements from ``origin`` to ``index``."""
    return sum((at - base) * stride for base, at, stride in zip(origin, index, strides, strict=True))


def _to_common_geometry(
    table: ShardTable, box: Box, shape: Shape, start: int, stop: int
) -> tuple[ShardTable, list[_PlacedBox]]:
    """Table and wanted elements in one geometry: the tensor's own where that of the table is a flattening, else the
    table's."""
    assert prod(table.shape) == prod(shape), "two geometries of one tensor"
    if table.shape != shape and len(shape) <= 1:
        first, _ = box_to_interval(box, shape)
        return table, list(_iter_blocks(interval_to_boxes(first + start, first + stop, table.shape)))
    blocks = list(_iter_blocks(part.shift(box.start) for part in interval_to_boxes(start, stop, box.shape)))
    if table.shape == shape:
        return table, blocks
    if len(table.shape) == 1:
        return _unflatten_near(table, shape, [block.box for block in blocks]), blocks
    return table, [part for block in blocks for part in _split_block_dims(block, shape, table.shape)]


def _iter_blocks(boxes: Iterator[Box] | Sequence[Box]) -> Iterator[_PlacedBox]:
    """Boxes whose elements follow one another in the destination, each row-major."""
    destination_start = 0
    for box in boxes:
        yield _PlacedBox(box, destination_start, contiguous_strides(box.shape))
        destination_start += box.numel


def _split_block_dims(block: _PlacedBox, shape: Shape, finer_shape: Shape) -> Iterator[_PlacedBox]:
    """A block of a tensor of ``shape`` as blocks in ``finer_shape``, whose dims split those of ``shape``.

    With shape (6, 4) stored as (2, 3, 4), dim 0 is split into dims 0 and 1. A range along a dim that is split into
    ``n`` is at most ``2 * n - 1`` boxes of these; their product over all dims gives the blocks.
    """
    if is_contiguous(block.box, shape):
        interval = box_to_interval(block.box, shape)
        yield from (
            replace(part, destination_start=block.destination_start + part.destination_start)
            for part in _iter_blocks(interval_to_boxes(*interval, finer_shape))
        )
        return
    parts_by_dim = [
        [
            (
                part.box,
                block.strides[dim] * part.destination_start,
                tuple(block.strides[dim] * stride for stride in part.strides),
            )
            for part in _iter_blocks(interval_to_boxes(block.box.start[dim], block.box.stop[dim], finer_shape[dims]))
        ]
        for dim, dims in enumerate(split_dims(shape, finer_shape))
    ]
    # Dims of extent 1 at the end that belong to no dim of ``shape``.
    trailing_dims = finer_shape[sum(len(parts[0][2]) for parts in parts_by_dim) :]
    for parts in product(*parts_by_dim):
        box = Box(
            (*(n for part in parts for n in part[0].start), *(0 for _ in trailing_dims)),
            (*(n for part in parts for n in part[0].stop), *trailing_dims),
        )
        strides = (*(n for part in parts for n in part[2]), *(1 for _ in trailing_dims))
        yield _PlacedBox(box, block.destination_start + sum(part[1] for part in parts), strides)


def _unflatten_near(table: ShardTable, shape: Shape, block_boxes: list[Box]) -> ShardTable:
    """The shards of a flattened table that overlap the blocks, as boxes of ``shape``.

    Only those: of a parameter that 512 ranks share, a task needs a few, and unflattening them all costs it 15 ms.
    """
    assert table.flat_index is not None, "a flattening is made of intervals"
    first_element = min(ravel_index(block.start, shape) for block in block_boxes)
    last_element = max(ravel_index(tuple(stop - 1 for stop in block.stop), shape) for block in block_boxes)
    return table.select_rows(table.flat_index.select_overlapping(first_element, last_element + 1).rows).unflatten(shape)
