"""Hypothesis strategies for the geometry of checkpoints: shapes, boxes, shardings.

Sizes are small, because mistakes of geometry show on tensors of a few dozen elements: an off-by-one, a swapped dim, an
empty piece. Zero extents, dims of one and 0-d tensors come up often on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

from hypothesis import strategies as st

from ckpt_tools.core.boxes import Box, Shape, interval_to_boxes
from ckpt_tools.core.dtypes import DType

MAX_NDIM = 4
MAX_EXTENT = 6

WIDTHS = {
    1: (DType.UINT8, DType.BOOL, DType.FLOAT8_E4M3FN),
    2: (DType.BFLOAT16, DType.FLOAT16, DType.INT16),
    4: (DType.FLOAT32, DType.INT32),
    8: (DType.FLOAT64, DType.INT64, DType.COMPLEX64),
    16: (DType.COMPLEX128,),
}
"""Element types by their width in bytes."""


def shapes(*, min_ndim: int = 0, max_ndim: int = MAX_NDIM, min_extent: int = 0) -> st.SearchStrategy[Shape]:
    """Shapes of small tensors."""
    extents = st.integers(min_extent, MAX_EXTENT)
    return st.lists(extents, min_size=min_ndim, max_size=max_ndim).map(tuple)


def dtypes() -> st.SearchStrategy[DType]:
    """Element types, every width equally often."""
    return st.sampled_from(sorted(WIDTHS)).flatmap(lambda width: st.sampled_from(WIDTHS[width]))


def intervals(size: int) -> st.SearchStrategy[tuple[int, int]]:
    """Half-open intervals of ``range(size)``, empty ones too."""
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: (min(ends), max(ends)))


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Box:
    """A box of a tensor of ``shape``, perhaps empty."""
    ends = [draw(intervals(extent)) for extent in shape]
    return Box(tuple(start for start, _ in ends), tuple(stop for _, stop in ends))


@st.composite
def cuts(draw: st.DrawFn, size: int, *, max_pieces: int = 4) -> list[tuple[int, int]]:
    """``range(size)`` as consecutive intervals, some of which may be empty."""
    inner = draw(st.lists(st.integers(0, size), max_size=max_pieces - 1))
    return list(pairwise([0, *sorted(inner), size]))


@st.composite
def grid_shardings(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Every dim cut on its own, as tensor parallelism times FSDP does."""
    per_dim = [draw(cuts(extent, max_pieces=3)) for extent in shape]
    return [_make_box(ends) for ends in product(*per_dim)]


@st.composite
def dim_shardings(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """One dim cut: rows as FSDP2 does, or an inner axis."""
    if not shape:
        return [Box((), ())]
    dim = draw(st.integers(0, len(shape) - 1))
    whole = [(0, extent) for extent in shape]
    return [_make_box([*whole[:dim], ends, *whole[dim + 1 :]]) for ends in draw(cuts(shape[dim]))]


@st.composite
def nested_shardings(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Boxes cut in two again and again, each along a dim of its own; no grid has these edges."""
    pieces = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(piece.start[dim], piece.stop[dim]))
        pieces += [
            _replace_interval(piece, dim, piece.start[dim], at),
            _replace_interval(piece, dim, at, piece.stop[dim]),
        ]
    return pieces


@st.composite
def pinwheels(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Five boxes around a middle, which no plane can cut apart, where the first two dims are large enough for it."""
    if len(shape) < 2 or shape[0] < 3 or shape[1] < 3:
        return [Box.whole(shape)]
    a, b = sorted(draw(st.sets(st.integers(1, shape[0] - 1), min_size=2, max_size=2)))
    c, d = sorted(draw(st.sets(st.integers(1, shape[1] - 1), min_size=2, max_size=2)))
    flat = [
        ((0, a), (0, d)),
        ((0, b), (d, shape[1])),
        ((b, shape[0]), (c, shape[1])),
        ((a, shape[0]), (0, c)),
        ((a, b), (c, d)),
    ]
    rest = [(0, extent) for extent in shape[2:]]
    return [_make_box([*ends, *rest]) for ends in flat]


@st.composite
def flat_shardings(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """The flattening ``(numel,)`` in intervals, as ZeRO does; the boxes are in that geometry."""
    return [_make_box([ends]) for ends in draw(cuts(prod(shape), max_pieces=5))]


@st.composite
def unfolded_shardings(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """The intervals of a flat sharding as boxes, all of them contiguous."""
    return [box for start, stop in draw(cuts(prod(shape))) for box in interval_to_boxes(start, stop, shape)]


def box_shardings(shape: Shape) -> st.SearchStrategy[list[Box]]:
    """Any exact cover of a tensor by boxes of its own geometry, in any order."""
    kinds = (grid_shardings, dim_shardings, nested_shardings, pinwheels, unfolded_shardings)
    return st.one_of([kind(shape) for kind in kinds]).flatmap(st.permutations).map(list)


def _make_box(ends: Sequence[tuple[int, int]]) -> Box:
    return Box(tuple(start for start, _ in ends), tuple(stop for _, stop in ends))


def _replace_interval(box: Box, dim: int, start: int, stop: int) -> Box:
    return Box(
        (*box.start[:dim], start, *box.start[dim + 1 :]),
        (*box.stop[:dim], stop, *box.stop[dim + 1 :]),
    )
