"""Shards of tensors moved to other tensors, box by box. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ckpt_tools.core.boxes import Shape, contiguous_strides, interval_to_boxes, ravel_index, split_dims
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import TensorEntry
from ckpt_tools.core.shards import ByteRange, Framing, Ints, ItemParts, RowTable, ShardTable
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.recipes.moves import FillBox, GroupPlace, Move

MAX_PAIRS = 1 << 18
"""Pairs of a move and a shard that are intersected at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardBoxes:
    """Boxes of one tensor that lie in shards of another.

    ``starts``, ``stops`` and ``strides`` are ``[num_boxes, num_dims]`` in elements, the strides as stored. ``offsets``
    are the elements from the first of the shard, which is one of the ``rows`` of ``table``, to that of the box.
    """

    table: ShardTable
    rows: Ints
    starts: Ints
    stops: Ints
    strides: Ints
    offsets: Ints


class MoveTable:
    """The moves of one source tensor as columns, ordered by target."""

    def __init__(self, moves: Sequence[Move], num_source_dims: int) -> None:
        self.targets: list[GroupPlace] = list(dict.fromkeys((move.pattern, move.indices) for move in moves))
        number = {target: index for index, target in enumerate(self.targets)}
        ordered = sorted(moves, key=lambda move: number[move.pattern, move.indices])
        self.target_ids = _to_column([number[move.pattern, move.indices] for move in ordered])
        self.source_starts = _to_column([move.source_start for move in ordered]).reshape(len(moves), num_source_dims)
        self.source_extents = np.ones_like(self.source_starts)
        for row, move in enumerate(ordered):
            for dim, extent in zip(move.dims, move.extents, strict=True):
                if dim >= 0:
                    self.source_extents[row, dim] = extent
        # Targets can have different numbers of dims: rows are padded in front.
        self.num_target_dims = _to_column([len(move.dims) for move in ordered])
        width = int(self.num_target_dims.max(initial=0))
        shape = (len(moves), width)
        self.target_starts = _to_column([(0,) * (width - len(m.dims)) + m.target_start for m in ordered]).reshape(shape)
        self.source_dims = _to_column([(-1,) * (width - len(m.dims)) + m.dims for m in ordered]).reshape(shape)

    def split_by_target(self, source: ShardBoxes) -> Iterator[tuple[GroupPlace, ShardBoxes]]:
        """The part of each target that lies in the shards of ``source``."""
        step = max(1, MAX_PAIRS // max(1, len(source.rows)))
        for first in range(0, len(self.source_extents), step):
            yield from self._split_range(source, first, min(first + step, len(self.source_extents)))

    def _split_range(self, source: ShardBoxes, first: int, last: int) -> Iterator[tuple[GroupPlace, ShardBoxes]]:
        # Every move against every box at once, as arrays [moves, boxes, dims]:
        #     move     |------ source_starts + source_extents ------|
        #     box             |------ starts .. stops ------------------|
        #     both            |------ lower .. upper ---------------|        kept if upper > lower in every dim
        # A part keeps the strides of its box, and lies at target_starts + (lower - source_starts), dim by dim. A target
        # dim without a source dim (-1) has one position. Moves are sorted by target, so that equal ids are adjacent,
        # and one slice of the parts is one target.
        source_starts = self.source_starts[first:last, None, :]
        lower = np.maximum(source.starts[None], source_starts)
        upper = np.minimum(source.stops[None], source_starts + self.source_extents[first:last, None, :])
        moves, boxes = np.nonzero((upper > lower).all(axis=2))
        lower, upper = lower[moves, boxes], upper[moves, boxes]
        strides = source.strides[boxes]
        offsets = source.offsets[boxes] + ((lower - source.starts[boxes]) * strides).sum(axis=1)
        moves += first
        starts, dims = self.target_starts[moves], self.source_dims[moves]
        has_source_dim, dims, pair_numbers = dims >= 0, np.maximum(dims, 0), np.arange(len(moves))[:, None]

        def gather_dims(column: Ints, otherwise: int) -> Ints:
            return (
                np.where(has_source_dim, column[pair_numbers, dims], otherwise)
                if column.shape[1]
                else np.full_like(dims, otherwise)
            )

        starts = starts + gather_dims(lower - self.source_starts[moves], 0)
        stops, strides, rows = starts + gather_dims(upper - lower, 1), gather_dims(strides, 0), source.rows[boxes]
        ids = self.target_ids[moves]
        start = 0
        for stop in [*((ids[1:] != ids[:-1]).nonzero()[0] + 1).tolist(), len(ids)] if len(ids) else ():
            group_slice, first_dim = slice(start, stop), starts.shape[1] - int(self.num_target_dims[moves[start]])
            begins, ends, steps = (each[group_slice, first_dim:] for each in (starts, stops, strides))
            yield (
                self.targets[int(ids[start])],
                ShardBoxes(source.table, rows[group_slice], begins, ends, steps, offsets[group_slice]),
            )
            start = stop


def move_box(entry: TensorEntry, start: Shape, target_start: Shape, extents: Shape) -> list[ShardBoxes]:
    """The parts of the box from ``start`` of a tensor in its shards, as boxes from ``target_start`` of another.

    Raises:
        UnsupportedError: a recipe has split the axes of the tensor.
    """
    move = Move(0, (), start, target_start, extents, tuple(range(len(extents))))
    boxes = split_table(entry.shards, entry.shape, entry.shape)
    return [part for _, part in MoveTable([move], len(extents)).split_by_target(boxes)]


def _to_column(numbers: Sequence[int] | Sequence[Shape]) -> Ints:
    return np.array(numbers, np.int64)


def split_table(table: ShardTable, shape: Shape, dims: Shape) -> ShardBoxes:
    """The shards of a tensor of ``shape`` with its axes split into ``dims``.

    Raises:
        UnsupportedError: the table has its axes split already.
    """
    if table.shape != shape and len(table.shape) > 1:
        raise UnsupportedError("a recipe has split the axes of this tensor already; apply one recipe at a time")
    if table.shape == dims:
        strides = table.strides if table.strides is not None else _compute_strides(table.stops - table.starts)
        rows = np.arange(len(table))
        return ShardBoxes(table, rows, table.starts, table.stops, strides, np.zeros(len(table), np.int64))
    boxes = [box for row in range(len(table)) if table.numels[row] for box in _iter_boxes(table, row, shape, dims)]
    columns = zip(*boxes, strict=True) if boxes else ((),) * 5
    rows, starts, stops, strides, offsets = (np.array(column, np.int64) for column in columns)
    size = (len(boxes), len(dims))
    return ShardBoxes(table, rows, starts.reshape(size), stops.reshape(size), strides.reshape(size), offsets)


def _iter_boxes(
    table: ShardTable, row: int, shape: Shape, dims: Shape
) -> Iterator[tuple[int, Shape, Shape, Shape, int]]:
    """A shard as boxes of split dims: row, start, stop, strides, and the elements before it in the shard."""
    # Rows 5 to 9 of an axis that is split into [3, 4] are the boxes [1, 1:4] and [2, 0:2]. The boxes of a shard are the
    # product of those of its axes. A table with one axis for a tensor of several has flat intervals, such as partitions
    # of DeepSpeed: this axis is split into all dims.
    box, axis_strides = table.get_box(row), table.get_strides(row)
    cuts = split_dims(shape, dims) if table.shape == shape else [slice(len(dims))]
    parts_by_axis = []
    for first, last, stride, cut in zip(box.start, box.stop, axis_strides, cuts, strict=True):
        strides = tuple(stride * each for each in contiguous_strides(dims[cut]))
        parts_by_axis.append(
            [
                (part.start, part.stop, strides, stride * (ravel_index(part.start, dims[cut]) - first))
                for part in interval_to_boxes(first, last, dims[cut])
            ]
        )
    num_left_dims = len(dims) - sum(len(dims[cut]) for cut in cuts)
    left = (0,) * num_left_dims, (1,) * num_left_dims, (1,) * num_left_dims, 0
    for parts in product(*parts_by_axis):
        starts, stops, strides_of_parts, offsets = zip(*parts, left, strict=True)
        yield row, sum(starts, ()), sum(stops, ()), sum(strides_of_parts, ()), sum(offsets)


def _compute_strides(extents: Ints) -> Ints:
    """Row-major strides of boxes of these extents."""
    strides = np.ones_like(extents)
    if extents.shape[1] > 1:
        strides[:, :-1] = np.multiply.accumulate(extents[:, :0:-1], axis=1)[:, ::-1]
    return strides


def join_boxes(
    parts: Sequence[ShardBoxes], fills: Iterable[FillBox], dims: Shape, dtype: DType, zeros_file: str
) -> ShardTable:
    """The table of a tensor from its parts, which have one dtype and one framing; ``fills`` are of ``zeros_file``, a
    file of zero bytes. The parts may overlap or leave gaps: ``check_exact_cover`` refuses that in the tensor."""
    all_boxes = [*parts, *_make_fill_boxes(fills, dims, dtype, zeros_file)]
    if not all_boxes:
        return ShardTable.build(dims, dtype, [])
    framing = next((part.table.framing for part in parts), Framing.RAW)
    starts, stops, strides, offsets = (
        np.concatenate([getattr(part, name) for part in all_boxes])
        if len(all_boxes) > 1
        else getattr(all_boxes[0], name)
        for name in ("starts", "stops", "strides", "offsets")
    )
    extents = stops - starts
    files, file_ids = _merge_files(all_boxes)
    byte_starts = np.concatenate([part.table.byte_starts[part.rows] for part in all_boxes])
    byte_stops = np.concatenate([part.table.byte_stops[part.rows] for part in all_boxes])
    item_parts = None
    # The bytes of a raw row start at its first element. Otherwise a row is a stored item, whose elements are found when
    # it is read: the byte range stays that of the item, and `item_parts` says which of its elements are meant.
    if framing is Framing.RAW:
        spans = ((extents - 1) * strides).sum(axis=1) + 1
        byte_starts = byte_starts + offsets * dtype.item_bytes
        byte_stops = byte_starts + spans * dtype.item_bytes
    else:
        numels, firsts = (
            np.concatenate(each) for each in zip(*(_locate_in_items(part) for part in all_boxes), strict=True)
        )
        item_parts = ItemParts(numels, firsts + np.where(numels > 0, offsets, 0))
    is_packed = bool(((extents == 1) | (strides == _compute_strides(extents))).all())
    return RowTable(
        shape=dims,
        dtype=dtype,
        starts=starts,
        stops=stops,
        files=files,
        file_ids=file_ids,
        byte_starts=byte_starts,
        byte_stops=byte_stops,
        framing=framing,
        strides=None if is_packed else strides,
        item_parts=item_parts,
    )


def _locate_in_items(part: ShardBoxes) -> tuple[Ints, Ints]:
    """Elements of the items that hold the boxes, and the first one of each shard."""
    table, rows = part.table, part.rows
    if table.framing is Framing.RAW:
        return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    if table.item_parts is not None:
        return table.item_parts.item_numels[rows], table.item_parts.part_starts[rows]
    return table.numels[rows], np.zeros(len(rows), np.int64)


def _merge_files(parts: Sequence[ShardBoxes]) -> tuple[tuple[str, ...], Ints]:
    """The files that hold the boxes, and which one holds each."""
    number: dict[str, int] = {}
    columns = []
    for part in parts:
        ids, files = part.table.file_ids[part.rows], part.table.files
        if len(files) == 1:
            columns.append(np.full(len(ids), number.setdefault(files[0], len(number)), np.int64))
        else:
            columns.append(_to_column([number.setdefault(files[each], len(number)) for each in ids.tolist()]))
    return tuple(number), np.concatenate(columns) if len(columns) > 1 else columns[0]


def _make_fill_boxes(fills: Iterable[FillBox], dims: Shape, dtype: DType, zeros_file: str) -> Iterator[ShardBoxes]:
    """Boxes of zeros: one element of the file, over and over."""
    zero_column = np.zeros(1, np.int64)
    table = ShardTable.whole((1,) * len(dims), dtype, ByteRange(zeros_file, 0, dtype.item_bytes))
    for fill in fills:
        start = np.array([fill.start], np.int64).reshape(1, len(dims))
        stop = start + np.array([fill.extents], np.int64).reshape(1, len(dims))
        yield ShardBoxes(table, zero_column, start, stop, np.zeros_like(start), zero_column)
