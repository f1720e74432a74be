"""Rows of a tensor, left out or added, and tables that hold the same elements. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ckpt_tools.core.manifest import TensorEntry
from ckpt_tools.core.shards import ShardTable
from ckpt_tools.recipes.apply import ZEROS_FILE
from ckpt_tools.recipes.moves import FillBox
from ckpt_tools.recipes.tables import ShardBoxes, join_boxes, split_table


def resize_rows(entry: TensorEntry, rows: int) -> TensorEntry:
    """``entry`` with its first ``rows`` rows, or with rows of zeros behind its own, of the literal ``ZEROS_FILE``.

    Raises:
        UnsupportedError: a recipe has split the axes of the tensor.
    """
    before, *rest = entry.shape
    shape = (rows, *rest)
    boxes_before = split_table(entry.shards, entry.shape, entry.shape)
    stops = np.minimum(boxes_before.stops, np.array(shape, np.int64))
    kept = (stops > boxes_before.starts).all(axis=1)
    columns = (
        column[kept]
        for column in (boxes_before.rows, boxes_before.starts, stops, boxes_before.strides, boxes_before.offsets)
    )
    boxes = ShardBoxes(boxes_before.table, *columns)
    fills = [FillBox((before, *(0 for _ in rest)), (rows - before, *rest))] if rows > before else []
    table = join_boxes([boxes], fills, shape, entry.shards.dtype, ZEROS_FILE)
    return replace(entry, shape=shape, shards=table)


def has_same_elements(one: ShardTable, other: ShardTable) -> bool:
    """True if both tables take the same elements from the same places, in the same pieces."""
    if one is other:
        return True
    return _table_attributes(one) == _table_attributes(other) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in _COLUMNS
    )


_COLUMNS = ("starts", "stops", "file_ids", "byte_starts", "byte_stops", "strides", "inner")


def _table_attributes(table: ShardTable) -> tuple[object, ...]:
    return table.shape, table.dtype, table.framing, tuple(table.files)
