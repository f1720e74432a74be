"""Shards of tensors moved to other tensors, box by box. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ckpt_tools.core.boxes import Shape, contiguous_strides, interval_to_boxes, ravel_index, split_dims
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import Framing, Ints, NestedRows, RowTable, ShardTable
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.recipes.moves import Fill, Indices, Move

MAX_PAIRS = 1 << 18
"""Pairs of a move and a shard that are intersected at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
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


Target = tuple[int, Indices]
"""A tensor of a group: its pattern, and the values of its numbered variables."""


class MoveTable:
    """The moves of one source tensor as columns, ordered by target."""

    def __init__(self, moves: Sequence[Move], num_source_dims: int) -> None:
        self.targets: list[Target] = list(dict.fromkeys((move.pattern, move.indices) for move in moves))
        number = {target: index for index, target in enumerate(self.targets)}
        ordered = sorted(moves, key=lambda move: number[move.pattern, move.indices])
        self.target_ids = _column([number[move.pattern, move.indices] for move in ordered])
        self.source_starts = _column([move.source_start for move in ordered]).reshape(len(moves), num_source_dims)
        self.sizes = np.ones_like(self.source_starts)
        for row, move in enumerate(ordered):
            for dim, extent in zip(move.dims, move.extents, strict=True):
                if dim >= 0:
                    self.sizes[row, dim] = extent
        # Targets can have different numbers of dims: rows are padded in front.
        self.widths = _column([len(move.dims) for move in ordered])
        width = int(self.widths.max(initial=0))
        shape = (len(moves), width)
        self.starts = _column([(0,) * (width - len(m.dims)) + m.target_start for m in ordered]).reshape(shape)
        self.dims = _column([(-1,) * (width - len(m.dims)) + m.dims for m in ordered]).reshape(shape)

    def parts(self, source: Boxes) -> Iterator[tuple[Target, Boxes]]:
        """The part of each target that lies in the shards of ``source``."""
        step = max(1, MAX_PAIRS // max(1, len(source.rows)))
        for first in range(0, len(self.sizes), step):
            yield from self._parts(source, first, min(first + step, len(self.sizes)))

    def _parts(self, source: Boxes, first: int, last: int) -> Iterator[tuple[Target, Boxes]]:
        begin = self.source_starts[first:last, None, :]
        lower = np.maximum(source.starts[None], begin)
        upper = np.minimum(source.stops[None], begin + self.sizes[first:last, None, :])
        moves, boxes = np.nonzero((upper > lower).all(axis=2))
        lower, upper = lower[moves, boxes], upper[moves, boxes]
        strides = source.strides[boxes]
        offsets = source.offsets[boxes] + ((lower - source.starts[boxes]) * strides).sum(axis=1)
        moves += first
        starts, dims = self.starts[moves], self.dims[moves]
        has, dims, every = dims >= 0, np.maximum(dims, 0), np.arange(len(moves))[:, None]

        def along(column: Ints, otherwise: int) -> Ints:
            return np.where(has, column[every, dims], otherwise) if column.shape[1] else np.full_like(dims, otherwise)

        starts = starts + along(lower - self.source_starts[moves], 0)
        stops, strides, rows = starts + along(upper - lower, 1), along(strides, 0), source.rows[boxes]
        ids = self.target_ids[moves]
        start = 0
        for stop in [*((ids[1:] != ids[:-1]).nonzero()[0] + 1).tolist(), len(ids)] if len(ids) else ():
            some, first_dim = slice(start, stop), starts.shape[1] - int(self.widths[moves[start]])
            begins, ends, steps = (each[some, first_dim:] for each in (starts, stops, strides))
            yield self.targets[int(ids[start])], Boxes(source.table, rows[some], begins, ends, steps, offsets[some])
            start = stop


def _column(numbers: Sequence[int] | Sequence[Shape]) -> Ints:
    return np.array(numbers, np.int64)


def split_table(table: ShardTable, shape: Shape, dims: Shape) -> Boxes:
    """The shards of a tensor of ``shape`` with its axes split into ``dims``.

    Raises:
        UnsupportedError: the table has its axes split already.
    """
    if table.shape != shape and len(table.shape) > 1:
        raise UnsupportedError("a recipe has split the axes of this tensor already; apply one recipe at a time")
    if table.shape == dims:
        strides = table.strides if table.strides is not None else _contiguous(table.stops - table.starts)
        rows = np.arange(len(table))
        return Boxes(table, rows, table.starts, table.stops, strides, np.zeros(len(table), np.int64))
    found = [box for row in range(len(table)) if table.numels[row] for box in _boxes(table, row, shape, dims)]
    size = (len(found), len(dims))
    return Boxes(
        table,
        np.array([row for row, *_ in found], np.int64),
        np.array([start for _, start, *_ in found], np.int64).reshape(size),
        np.array([stop for _, _, stop, *_ in found], np.int64).reshape(size),
        np.array([strides for *_, strides, _ in found], np.int64).reshape(size),
        np.array([offset for *_, offset in found], np.int64),
    )


def _boxes(table: ShardTable, row: int, shape: Shape, dims: Shape) -> Iterator[tuple[int, Shape, Shape, Shape, int]]:
    """A shard as boxes: row, start, stop, strides, and the elements before it in the shard."""
    box, strides = table.get_box(row), table.get_strides(row)
    if table.shape != shape:
        (first,), (last,) = box.start, box.stop
        assert table.strides is None, "only plain intervals unfold"
        inner = contiguous_strides(dims)
        for part in interval_to_boxes(first, last, dims):
            yield row, part.start, part.stop, inner, ravel_index(part.start, dims) - first
        return
    along = []
    for axis, cut in enumerate(split_dims(shape, dims)):
        inner = contiguous_strides(dims[cut])
        along.append(
            [
                (
                    part,
                    tuple(strides[axis] * each for each in inner),
                    strides[axis] * (ravel_index(part.start, dims[cut]) - box.start[axis]),
                )
                for part in interval_to_boxes(box.start[axis], box.stop[axis], dims[cut])
            ]
        )
    for parts in product(*along):
        start = tuple(n for part, _, _ in parts for n in part.start)
        stop = tuple(n for part, _, _ in parts for n in part.stop)
        rest = len(dims) - len(start)
        yield (
            row,
            (*start, *(0,) * rest),
            (*stop, *(1,) * rest),
            (*(n for _, each, _ in parts for n in each), *(1,) * rest),
            sum(offset for *_, offset in parts),
        )


def _contiguous(extents: Ints) -> Ints:
    """Row-major strides of boxes of these extents."""
    strides = np.ones_like(extents)
    if extents.shape[1] > 1:
        strides[:, :-1] = np.multiply.accumulate(extents[:, :0:-1], axis=1)[:, ::-1]
    return strides


def joined(parts: Sequence[Boxes], fills: Iterable[Fill], dims: Shape, dtype: DType, zeros: str) -> ShardTable:
    """The table of a tensor from its parts, which have one dtype and one framing. ``zeros`` is a file of zero bytes.

    Raises:
        MalformedError, IncompleteError: as ``check_exact_cover`` says, when a tensor is made of it.
    """
    found = [*parts, *_filled(fills, dims, dtype, zeros)]
    if not found:
        return ShardTable.build(dims, dtype, [])
    framing = next((part.table.framing for part in parts), Framing.RAW)
    starts, stops, strides, offsets = (
        np.concatenate([getattr(part, name) for part in found]) if len(found) > 1 else getattr(found[0], name)
        for name in ("starts", "stops", "strides", "offsets")
    )
    extents = stops - starts
    files, file_ids = _files(found)
    byte_starts = np.concatenate([part.table.byte_starts[part.rows] for part in found])
    byte_stops = np.concatenate([part.table.byte_stops[part.rows] for part in found])
    inner = None
    if framing is Framing.RAW:
        spans = ((extents - 1) * strides).sum(axis=1) + 1
        byte_starts = byte_starts + offsets * dtype.item_bytes
        byte_stops = byte_starts + spans * dtype.item_bytes
    else:
        numels, firsts = (np.concatenate(each) for each in zip(*(_items(part) for part in found), strict=True))
        inner = NestedRows(numels, firsts + np.where(numels > 0, offsets, 0))
    is_packed = bool(((extents == 1) | (strides == _contiguous(extents))).all())
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
        inner=inner,
    )


def _items(part: Boxes) -> tuple[Ints, Ints]:
    """Elements of the items that hold the boxes, and the first one of each shard."""
    table, rows = part.table, part.rows
    if table.framing is Framing.RAW:
        return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    if table.inner is not None:
        return table.inner.numels[rows], table.inner.starts[rows]
    return table.numels[rows], np.zeros(len(rows), np.int64)


def _files(parts: Sequence[Boxes]) -> tuple[tuple[str, ...], Ints]:
    """The files that hold the boxes, and which one holds each."""
    number: dict[str, int] = {}
    columns = []
    for part in parts:
        ids, files = part.table.file_ids[part.rows], part.table.files
        if len(files) == 1:
            columns.append(np.full(len(ids), number.setdefault(files[0], len(number)), np.int64))
        else:
            columns.append(_column([number.setdefault(files[each], len(number)) for each in ids.tolist()]))
    return tuple(number), np.concatenate(columns) if len(columns) > 1 else columns[0]


def _filled(fills: Iterable[Fill], dims: Shape, dtype: DType, zeros: str) -> Iterator[Boxes]:
    """Boxes of zeros: one element of the file, over and over."""
    for fill in fills:
        start = np.array([fill.start], np.int64).reshape(1, len(dims))
        stop = start + np.array([fill.extents], np.int64).reshape(1, len(dims))
        one, none = np.array([dtype.item_bytes], np.int64), np.zeros(1, np.int64)
        shape = (1,) * len(dims)
        table = RowTable(
            shape, dtype, np.zeros_like(start), np.ones_like(start), (zeros,), none, none, one, Framing.RAW
        )
        yield Boxes(table, none, start, stop, np.zeros_like(start), none)
