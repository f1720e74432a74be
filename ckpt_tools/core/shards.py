"""Shards of a tensor as columns: boxes and byte ranges, and the check that they cover the tensor exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ckpt_tools.core.boxes import Box, Shape, contiguous_strides, interval_to_boxes
from ckpt_tools.core.dtypes import INT64_MAX, DType
from ckpt_tools.errors import IncompleteError, MalformedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Ints: TypeAlias = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
"""``NDArray[np.int64]``, without the import of numpy.typing, which takes 1.4 ms."""


class Framing(Enum):
    """The content of a shard's byte range."""

    RAW = "raw"
    """The elements, and nothing else."""
    TORCH_ITEM = "torch_item"
    """A whole torch zip of one tensor (a DCP item); where its elements start is found when it is read."""
    ZSTD_ITEM = "zstd_item"
    """The same, compressed with zstd as one stream."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``[start, stop)`` of a file of the checkpoint."""

    file: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"bytes cannot run from {self.start} to {self.stop} in {self.file}")


@dataclass(frozen=True, slots=True)
class Shard:
    """One stored piece: the region it holds, and its bytes.

    ``strides`` are in elements, for pieces whose bytes are not row-major; ``at`` then spans from the first element to
    the last.
    """

    box: Box
    at: ByteRange
    strides: Shape | None = None


class FlatIndex(NamedTuple):
    """The non-empty shards of a tensor as row-major intervals ``[starts, stops)`` in order; ``rows`` are their table
    rows."""

    rows: Ints
    starts: Ints
    stops: Ints

    def select_overlapping(self, start: int, stop: int) -> FlatIndex:
        """The index of the shards that hold an element of ``[start, stop)``."""
        first = int(self.stops.searchsorted(start, side="right"))
        last = int(self.starts.searchsorted(stop, side="left"))
        return FlatIndex(self.rows[first:last], self.starts[first:last], self.stops[first:last])


class ItemParts(NamedTuple):
    """For rows that are parts of stored items: the number of elements of each row's item, and the first element of the
    part in the row-major order of the item. ``item_numels`` is 0 for a row outside any item: its bytes are
    plain, whatever the framing."""

    item_numels: Ints
    part_starts: Ints


class PlaceInItem(NamedTuple):
    """The framing of a row's bytes, the number of elements that they hold, and the position of the row's first one
    among them."""

    framing: Framing
    item_numel: int
    start: int


class _NotComputed(Enum):
    UNKNOWN = "not computed yet"


class ShardTable(ABC):
    """The shards of one tensor as columns, one row a shard."""

    __slots__ = ()
    shape: Shape
    """The geometry of the boxes: the tensor's own shape, the same with dims split (``[6, 4]`` as ``[2, 3, 4]``), or
    ``(numel,)``."""
    dtype: DType
    starts: Ints
    """First index of each box, ``[num_shards, ndim]``, in elements."""
    stops: Ints
    """End of each box, ``[num_shards, ndim]``, in elements."""
    files: Sequence[str]
    file_ids: Ints
    """Index of each shard's file in ``files``, ``[num_shards]``."""
    byte_starts: Ints
    """``[num_shards]``, like ``byte_stops``."""
    byte_stops: Ints
    framing: Framing
    strides: Ints | None
    """``[num_shards, ndim]``, in elements; None where every shard is row-major."""
    item_parts: ItemParts | None
    """Given if shards are parts of framed items: then the bytes are those of the items, and ``strides`` count the
    elements of an item in its row-major order."""
    numels: Ints
    """Elements of each shard, ``[num_shards]``."""
    _is_exact_cover_known: bool

    @classmethod
    def build(
        cls,
        shape: Shape,
        dtype: DType,
        shards: Sequence[Shard],
        *,
        framing: Framing = Framing.RAW,
    ) -> ShardTable:
        """The table of a few shards given one by one. Raises MalformedError also for a box of other dims."""
        if any(len(shard.box.start) != len(shape) for shard in shards):
            raise MalformedError(f"a shard of a tensor of shape {list(shape)} has a different number of dims")
        files = list(dict.fromkeys(shard.at.file for shard in shards))
        file_index = {file: index for index, file in enumerate(files)}
        columns_shape = (len(shards), len(shape))
        has_strides = any(shard.strides is not None for shard in shards)
        return RowTable(
            shape=tuple(shape),
            dtype=dtype,
            starts=_make_int64_array([s.box.start for s in shards], columns_shape),
            stops=_make_int64_array([s.box.stop for s in shards], columns_shape),
            files=tuple(files),
            file_ids=np.array([file_index[s.at.file] for s in shards], np.int64),
            byte_starts=_make_int64_array([s.at.start for s in shards], columns_shape[:1]),
            byte_stops=_make_int64_array([s.at.stop for s in shards], columns_shape[:1]),
            framing=framing,
            strides=_make_int64_array([s.strides or contiguous_strides(s.box.shape) for s in shards], columns_shape)
            if has_strides
            else None,
        )

    @classmethod
    def whole(cls, shape: Shape, dtype: DType, at: ByteRange, *, framing: Framing = Framing.RAW) -> ShardTable:
        """The table of one row-major shard that is the whole tensor, as most are: 200,000 take a second and 100 MB
        less than with ``build``. The columns that follow from the shape are shared, and cannot be written to."""
        columns = get_shared_columns(tuple(shape), dtype)
        if at.stop > INT64_MAX:
            raise MalformedError("a shard's offset is not a 64-bit number")
        if framing is Framing.RAW and at.stop - at.start != columns.num_bytes:
            num_bytes = at.stop - at.start
            raise MalformedError(f"{num_bytes} bytes cannot hold {prod(shape)} elements of {dtype.value}", path=at.file)
        return _SingleShardTable(columns, at.file, at.start, at.stop, framing)

    def __len__(self) -> int:
        return len(self.file_ids)

    @property
    @abstractmethod
    def flat_index(self) -> FlatIndex | None:
        """The shards as intervals of the row-major order; None where one is not an interval, or not stored in
        that order."""

    @property
    def whole_range(self) -> ByteRange | None:
        """The bytes that are all elements in row-major order and nothing else, if they are known to be one range."""
        return None

    def get_box(self, row: int) -> Box:
        return Box(tuple(self.starts[row].tolist()), tuple(self.stops[row].tolist()))

    def get_byte_range(self, row: int) -> ByteRange:
        file = self.files[int(self.file_ids[row])]
        return ByteRange(file, int(self.byte_starts[row]), int(self.byte_stops[row]))

    def get_strides(self, row: int) -> Shape:
        """Strides of a shard in elements."""
        if self.strides is None:
            return contiguous_strides(self.get_box(row).shape)
        return tuple(self.strides[row].tolist())

    def __iter__(self) -> Iterator[Shard]:
        for row in range(len(self)):
            strides = None if self.strides is None else self.get_strides(row)
            yield Shard(self.get_box(row), self.get_byte_range(row), strides)

    def select_rows(self, rows: Ints) -> ShardTable:
        """The table of some of the shards."""
        return RowTable(
            shape=self.shape,
            dtype=self.dtype,
            starts=self.starts[rows],
            stops=self.stops[rows],
            files=self.files,
            file_ids=self.file_ids[rows],
            byte_starts=self.byte_starts[rows],
            byte_stops=self.byte_stops[rows],
            framing=self.framing,
            strides=None if self.strides is None else self.strides[rows],
            item_parts=None if self.item_parts is None else ItemParts(*(column[rows] for column in self.item_parts)),
        )

    def locate_in_item(self, row: int) -> PlaceInItem:
        if self.item_parts is None:
            return PlaceInItem(self.framing, int(self.numels[row]), 0)
        item_numel = int(self.item_parts.item_numels[row])
        if not item_numel:
            return PlaceInItem(Framing.RAW, int(self.numels[row]), 0)
        return PlaceInItem(self.framing, item_numel, int(self.item_parts.part_starts[row]))

    @abstractmethod
    def with_file_prefix(self, prefix: str) -> ShardTable:
        """The same shards in files whose names have ``prefix`` before them."""

    def unflatten(self, shape: Shape) -> ShardTable:
        """The same shards in the geometry of ``shape``; an interval of the flattening becomes its boxes."""
        if self.shape == shape:
            return self
        assert len(self.shape) == 1 and prod(shape) == prod(self.shape), "only a flattening unfolds"
        assert self.framing is Framing.RAW and self.strides is None, "only plain intervals unfold"
        item_bytes = self.dtype.item_bytes
        shards: list[Shard] = []
        for row in range(len(self)):
            at, start = self.get_byte_range(row), int(self.starts[row, 0])
            byte_start = at.start
            for box in interval_to_boxes(start, start + int(self.numels[row]), shape):
                shards.append(Shard(box, ByteRange(at.file, byte_start, byte_start + box.numel * item_bytes)))
                byte_start += box.numel * item_bytes
        return ShardTable.build(shape, self.dtype, shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored pieces, their framing included unless they are parts of items."""
        if self.item_parts is not None:
            return int(self.numels.sum()) * self.dtype.item_bytes
        return int((self.byte_stops - self.byte_starts).sum())


@dataclass(frozen=True, slots=True, eq=False)
class RowTable(ShardTable):
    """The table with all columns stored.

    Raises:
        MalformedError: a box leaves the tensor, or a length disagrees with the elements it should hold; a number is
        larger than any address.
    """

    shape: Shape
    dtype: DType
    starts: Ints
    stops: Ints
    files: Sequence[str]
    file_ids: Ints
    byte_starts: Ints
    byte_stops: Ints
    framing: Framing = Framing.RAW
    strides: Ints | None = None
    item_parts: ItemParts | None = None
    numels: Ints = field(init=False, repr=False)
    """Elements of each shard."""
    _flat: FlatIndex | _NotComputed | None = field(default=_NotComputed.UNKNOWN, init=False, repr=False)
    _is_exact_cover_known: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_addressable(self.shape, self.dtype)
        shape = np.array(self.shape, np.int64)
        if ((self.starts < 0) | (self.stops > shape) | (self.stops < self.starts)).any():
            raise MalformedError(f"a shard lies outside a tensor of shape {list(self.shape)}")
        if ((self.byte_starts < 0) | (self.byte_stops < self.byte_starts)).any():
            raise MalformedError("a shard has a negative byte range")
        if self.strides is not None and (self.strides < 0).any():
            raise MalformedError("a shard has a negative stride")
        object.__setattr__(self, "numels", np.multiply.reduce(self.stops - self.starts, axis=1, dtype=np.int64))
        if self.framing is Framing.RAW:
            self._check_byte_lengths()
        elif self.item_parts is not None:
            item_numels, part_starts = self.item_parts
            if (part_starts + self._compute_spans() > item_numels)[item_numels > 0].any():
                raise MalformedError("a part of an item has elements that the item does not hold")

    def _check_byte_lengths(self) -> None:
        is_wrong = self.byte_stops - self.byte_starts != self._compute_spans() * self.dtype.item_bytes
        if is_wrong.any():
            row = int(np.flatnonzero(is_wrong)[0])
            raise MalformedError(
                f"{int(self.byte_stops[row] - self.byte_starts[row])} bytes cannot hold "
                f"{int(self.numels[row])} elements of {self.dtype.value}",
                path=self.files[int(self.file_ids[row])],
            )

    def _compute_spans(self) -> Ints:
        """Elements from each shard's first to its last as stored, those between its own included: ``sum((extent - 1) *
        stride) + 1``, or 0 for an empty box. ``[num_shards]``"""
        if self.strides is None:
            return self.numels
        spans = [
            sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True)) + 1
            if all(extents)
            else 0
            for extents, strides in zip((self.stops - self.starts).tolist(), self.strides.tolist(), strict=True)
        ]
        return _make_int64_array(spans, (len(self),))

    @property
    def flat_index(self) -> FlatIndex | None:
        if self._flat is _NotComputed.UNKNOWN:
            object.__setattr__(self, "_flat", _compute_flat_index(self))
        assert self._flat is not _NotComputed.UNKNOWN
        return self._flat

    def with_file_prefix(self, prefix: str) -> ShardTable:
        return replace(self, files=_add_prefix(prefix, tuple(self.files)))


@lru_cache(maxsize=4)
def _add_prefix(prefix: str, files: tuple[str, ...]) -> tuple[str, ...]:
    """The tables of one checkpoint share a list of its files, and so they do afterwards."""
    return tuple(f"{prefix}{file}" for file in files)


class SharedColumns(NamedTuple):
    """The columns of a tensor of one shard that follow from shape and dtype: 200,000 tensors share a few of them."""

    shape: Shape
    dtype: DType
    num_bytes: int
    starts: Ints
    stops: Ints
    file_ids: Ints
    numels: Ints
    flat: FlatIndex

    def make_table(self, file: str, start: int) -> ShardTable:
        """The table of the tensor whose bytes begin at byte ``start`` of ``file``. Raises MalformedError."""
        if start + self.num_bytes > INT64_MAX:
            raise MalformedError("a shard's offset is not a 64-bit number")
        return _SingleShardTable(self, file, start, start + self.num_bytes, Framing.RAW)


@lru_cache(maxsize=4096)
def get_shared_columns(shape: Shape, dtype: DType) -> SharedColumns:
    """The columns of every tensor of this shape and dtype. Raises MalformedError if it is too large."""
    _check_addressable(shape, dtype)
    numel, ndim = prod(shape), len(shape)
    zero, end = _make_read_only_column([0]), _make_read_only_column([numel])
    return SharedColumns(
        shape=shape,
        dtype=dtype,
        num_bytes=numel * dtype.item_bytes,
        starts=_make_read_only_column([0] * ndim).reshape(1, ndim),
        stops=_make_read_only_column(shape).reshape(1, ndim),
        file_ids=zero,
        numels=end,
        flat=FlatIndex(zero, zero, end) if numel else FlatIndex(zero[:0], zero[:0], zero[:0]),
    )


class _SingleShardTable(ShardTable):
    """The table of one row-major shard that is the whole tensor: its byte range, and shared columns."""

    __slots__ = ("_columns", "_file", "_start", "_stop", "framing")
    _columns: SharedColumns
    _file: str
    _start: int
    _stop: int

    _is_exact_cover_known = True
    strides = None
    item_parts = None

    def __init__(self, columns: SharedColumns, file: str, start: int, stop: int, framing: Framing) -> None:
        self._columns = columns
        self._file, self._start, self._stop = file, start, stop
        self.framing = framing

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as a call of `whole`, so that worker processes share columns too.
        return partial(ShardTable.whole, framing=self.framing), (self.shape, self.dtype, self.get_byte_range(0))

    shape = property(lambda self: self._columns.shape)
    dtype = property(lambda self: self._columns.dtype)
    starts = property(lambda self: self._columns.starts)
    stops = property(lambda self: self._columns.stops)
    file_ids = property(lambda self: self._columns.file_ids)
    numels = property(lambda self: self._columns.numels)
    flat_index = property(lambda self: self._columns.flat)
    files = property(lambda self: (self._file,))
    byte_starts = property(lambda self: np.array([self._start], np.int64))
    byte_stops = property(lambda self: np.array([self._stop], np.int64))

    @property
    def whole_range(self) -> ByteRange | None:
        return ByteRange(self._file, self._start, self._stop) if self.framing is Framing.RAW else None

    def with_file_prefix(self, prefix: str) -> ShardTable:
        return _SingleShardTable(self._columns, f"{prefix}{self._file}", self._start, self._stop, self.framing)

    def get_byte_range(self, row: int) -> ByteRange:
        return (ByteRange(self._file, self._start, self._stop),)[row]  # an IndexError for any other row

    @property
    def num_bytes(self) -> int:
        return self._stop - self._start

    def __len__(self) -> int:
        return 1


def _make_read_only_column(numbers: Sequence[int]) -> Ints:
    column = np.array(numbers, np.int64)
    column.flags.writeable = False
    return column


def _check_addressable(shape: Shape, dtype: DType) -> None:
    """Raises MalformedError if a position in the tensor, in elements or bytes, may exceed an int64, also where a dim is
    empty."""
    if any(extent < 0 for extent in shape) or prod(max(extent, 1) for extent in shape) * dtype.item_bytes > INT64_MAX:
        raise MalformedError(f"a {dtype.value} tensor of shape {list(shape)} is too large")


def _make_int64_array(numbers: Sequence[Any], shape: Shape) -> Ints:
    try:
        return np.array(numbers, np.int64).reshape(shape)
    except OverflowError as error:
        raise MalformedError("a shard's offset is not a 64-bit number") from error


def _compute_flat_index(table: ShardTable) -> FlatIndex | None:
    if table.strides is not None:
        return None
    if _is_single_whole_shard(table):
        return FlatIndex(_make_read_only_column([0]), _make_read_only_column([0]), table.numels)
    extents = table.stops - table.starts
    if not _find_contiguous_boxes(extents, table.shape).all():
        return None
    strides = np.array(contiguous_strides(table.shape), np.int64)
    starts = table.starts @ strides
    non_empty_rows = np.flatnonzero(table.numels > 0)
    rows = non_empty_rows[np.argsort(starts[non_empty_rows], kind="stable")]
    return FlatIndex(rows, starts[rows], starts[rows] + table.numels[rows])


def _is_single_whole_shard(table: ShardTable) -> bool:
    """True if the only shard is the whole tensor."""
    return len(table.numels) == 1 and 0 < int(table.numels[0]) == prod(table.shape)


def _find_contiguous_boxes(extents: Ints, shape: Shape) -> NDArray[np.bool_]:
    """Mask of the boxes of these extents that are one interval of the row-major order: around some dim, all outer
    extents are 1 and all inner dims are whole. ``boxes.is_contiguous`` by column."""
    is_contiguous = np.ones(len(extents), bool)
    inner_is_whole = np.ones(len(extents), bool)
    for dim in range(len(shape) - 1, -1, -1):
        is_contiguous &= inner_is_whole | (extents[:, dim] <= 1)
        inner_is_whole &= extents[:, dim] == shape[dim]
    is_empty: NDArray[np.bool_] = (extents == 0).any(axis=1)
    return is_contiguous | is_empty


def check_exact_cover(table: ShardTable) -> None:
    """Check that the shards hold every element exactly once; the result is remembered.

    Raises:
        MalformedError: two shards overlap.
        IncompleteError: elements are in no shard.
    """
    if table._is_exact_cover_known:
        return
    if _is_single_whole_shard(table):
        object.__setattr__(table, "_is_exact_cover_known", True)
        return
    flat_index = table.flat_index
    if flat_index is not None:
        are_disjoint = bool((flat_index.starts[1:] >= flat_index.stops[:-1]).all())
    else:
        is_non_empty = table.numels > 0
        are_disjoint = _are_disjoint(table.starts[is_non_empty], table.stops[is_non_empty])
    if not are_disjoint:
        raise MalformedError(f"shards of a tensor of shape {list(table.shape)} overlap")
    num_missing = prod(table.shape) - int(table.numels.sum())
    if num_missing:
        raise IncompleteError(f"{num_missing:,} of {prod(table.shape):,} elements are in no shard")
    object.__setattr__(table, "_is_exact_cover_known", True)


def _are_disjoint(starts: Ints, stops: Ints) -> bool:
    """Whether no two boxes share an element, in O(n log n) where they can be cut apart, as any sharding can."""
    # Boxes on two sides of a plane share no element, so that only a group that no plane cuts is compared pair by pair.
    pending_groups = [(starts, stops)]
    while pending_groups:
        starts, stops = pending_groups.pop()
        if len(starts) < 2:
            continue
        if starts.shape[1] == 0:  # two shards of a 0-d tensor are the same element
            return False
        groups = _split_by_planes(starts, stops)
        if groups is None:
            if not _are_pairwise_disjoint(starts, stops):
                return False
        else:
            pending_groups.extend(groups)
    return True


def _split_by_planes(starts: Ints, stops: Ints) -> list[tuple[Ints, Ints]] | None:
    """The boxes in groups that planes across one dim separate, or None where no plane does."""
    # A plane cuts before a box that starts where all earlier boxes, in the order of their starts, have stopped:
    #
    #     |---a---|
    #         |-b-|
    #             ^ plane
    #             |---c---|
    for dim in range(starts.shape[1]):
        order = np.argsort(starts[:, dim], kind="stable")
        sorted_starts = starts[order, dim]
        running_stops = np.maximum.accumulate(stops[order, dim])
        cuts = np.flatnonzero(sorted_starts[1:] >= running_stops[:-1]) + 1
        if len(cuts):
            return [(starts[rows], stops[rows]) for rows in np.split(order, cuts)]
    return None


def _are_pairwise_disjoint(starts: Ints, stops: Ints) -> bool:
    for row in range(len(starts) - 1):
        has_common_extent = np.minimum(stops[row], stops[row + 1 :]) > np.maximum(starts[row], starts[row + 1 :])
        if has_common_extent.all(axis=1).any():
            return False
    return True
