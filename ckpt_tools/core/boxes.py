"""The only geometry: half-open boxes of integers.

A box is a region of a tensor, counted in elements. A DCP chunk is one box, a flat ZeRO interval is at most
``2 * ndim - 1`` of them, and the part of one box that another holds is their intersection. Nothing here knows of bytes,
files or element types.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from operator import add, gt, mul, sub

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``start[d] <= index[d] < stop[d]`` for every dim ``d``; one element where there are no dims."""

    start: Shape
    stop: Shape

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or min(self.start, default=0) < 0 or any(map(gt, self.start, self.stop)):
            raise ValueError(f"a box cannot run from {self.start} to {self.stop}")

    @staticmethod
    @lru_cache(maxsize=4096)
    def whole(shape: Shape) -> Box:
        """The box of every element of a tensor of ``shape``; one for all tensors of it."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common elements, or None where there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def shift(self, offset: Shape) -> Box:
        """The box moved by ``offset`` elements in every dim."""
        assert len(offset) == len(self.start), "one offset a dim"
        return Box(tuple(map(add, self.start, offset)), tuple(map(add, self.stop, offset)))

    def relative_to(self, origin: Shape) -> Box:
        """The box as seen from ``origin``, one of the points at or before its start."""
        return self.shift(tuple(-o for o in origin))

    def is_within(self, shape: Shape) -> bool:
        """True where a tensor of ``shape`` holds every element of the box."""
        return len(shape) == len(self.stop) and not any(map(gt, self.stop, shape))


def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides of a tensor of ``shape``, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def is_row_major(shape: Shape, strides: Shape) -> bool:
    """True where elements ``strides`` apart lie in row-major order without gaps; the strides of dims of one, and of a
    tensor without elements, do not matter."""
    rows = zip(shape, strides, contiguous_strides(shape), strict=True)
    return 0 in shape or all(extent == 1 or stride == wanted for extent, stride, wanted in rows)


def ravel_index(index: Shape, shape: Shape) -> int:
    """Row-major position of ``index`` in a tensor of ``shape``."""
    assert len(index) == len(shape), "one number a dim"
    return sum(map(mul, index, contiguous_strides(shape)))


def is_contiguous(box: Box, shape: Shape) -> bool:
    """True where the elements of ``box`` follow one another in the row-major order of a tensor of ``shape``."""
    inner_is_whole = True
    for extent, size in zip(reversed(box.shape), reversed(shape), strict=True):
        if not inner_is_whole and extent > 1:
            return box.numel == 0
        inner_is_whole = inner_is_whole and extent == size
    return True


def box_to_interval(box: Box, shape: Shape) -> tuple[int, int]:
    """The row-major interval of a contiguous box of a tensor of ``shape``."""
    start = ravel_index(box.start, shape) if box.numel else 0
    return start, start + box.numel


def interval_to_boxes(start: int, stop: int, shape: Shape) -> list[Box]:
    """The boxes, at most ``2 * ndim - 1``, that together hold the row-major interval ``[start, stop)``, in order.

    Each is contiguous, so that their elements one after the other are the interval's.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop,)) if shape else Box((), ())]
    # An interval is a part of its first row, whole rows, and a part of its last row; parts are split within their row:
    #
    #     . . x x x     from element `head` of `first_row`
    #     x x x x x   \ one box
    #     x x x x x   /
    #     x x . . .     up to element `tail` of `last_row`
    row_numel = prod(shape[1:])
    first_row, head = divmod(start, row_numel)
    last_row, tail = divmod(stop, row_numel)
    if first_row == last_row:
        return _split_row_interval(first_row, head, tail, shape)
    boxes = _split_row_interval(first_row, head, row_numel, shape) if head else []
    first_row += head > 0
    if first_row < last_row:
        boxes.append(Box((first_row, *(0,) * (len(shape) - 1)), (last_row, *shape[1:])))
    return boxes + _split_row_interval(last_row, 0, tail, shape)


def _split_row_interval(row: int, start: int, stop: int, shape: Shape) -> list[Box]:
    inner = interval_to_boxes(start, stop, shape[1:])
    return [Box((row, *box.start), (row + 1, *box.stop)) for box in inner]


def iter_contiguous_runs(box: Box, shape: Shape) -> Iterator[tuple[int, int]]:
    """The maximal row-major intervals of ``box`` in a tensor of ``shape``, in order.

    A property of the geometry alone: a conversion reads rows in one go and places them strided instead.
    """
    if not box.numel:
        return
    # The outermost dim from which on the elements of the box are contiguous: each index of the dims before it starts a
    # run.
    dim = len(shape)
    while dim > 0 and is_contiguous(Box(box.start[dim - 1 :], box.stop[dim - 1 :]), shape[dim - 1 :]):
        dim -= 1
    first_contiguous_dim = dim
    strides = contiguous_strides(shape)
    run_numel = prod(box.shape[first_contiguous_dim:])
    base = ravel_index(box.start, shape)
    for index in product(*(range(extent) for extent in box.shape[:first_contiguous_dim])):
        start = base + sum(i * s for i, s in zip(index, strides[:first_contiguous_dim], strict=True))
        yield start, start + run_numel


def split_dims(shape: Shape, split_shape: Shape) -> list[slice]:
    """The dims of ``split_shape`` that each dim of ``shape`` is split into: ``[6, 4]`` in ``[2, 3, 4]`` gives 0:2 and
    2:3.

    Raises:
        ValueError: ``split_shape`` does not split the dims of ``shape``, which hold elements.
    """
    # Take dims of split_shape until their product reaches the extent. An extent of 1 takes one dim of 1, if it is next.
    # Dims of 1 may be left over at the end.
    dim_slices, first_dim = [], 0
    for extent in shape:
        stop_dim, product = first_dim, 1
        if extent == 1 and split_shape[first_dim : first_dim + 1] == (1,):
            stop_dim += 1
        while stop_dim < len(split_shape) and product < extent:
            product *= split_shape[stop_dim]
            stop_dim += 1
        if product != extent:
            raise ValueError(f"{list(split_shape)} does not split the dims of {list(shape)}")
        dim_slices.append(slice(first_dim, stop_dim))
        first_dim = stop_dim
    if any(extent != 1 for extent in split_shape[first_dim:]):
        raise ValueError(f"{list(split_shape)} does not split the dims of {list(shape)}")
    return dim_slices
