"""The elements of a DTensor on each rank. Pure geometry.

Placements take effect from the first dim of the mesh to the last, each on what is left of the tensor (torch 2.15.0,
distributed/tensor/_utils.py ``compute_local_shape_and_global_offset``, which says where a part begins; a part that a
``_StridedShard`` cuts may be of several boxes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.serialization.pickle.sharded_tensors import Placement, ShardPlacement, StridedShardPlacement

Interval = tuple[int, int]
"""Indices ``[start, stop)`` along one dim."""


@dataclass(frozen=True, slots=True)
class Region:
    """The local tensor of a rank: its shape, and the boxes of the whole tensor that it holds, each with where it begins
    in the local tensor. Without an element it has none."""

    shape: Shape
    boxes: tuple[tuple[Box, Shape], ...]


@lru_cache(maxsize=4096)
def region_of(shape: Shape, mesh: Shape, coordinate: Shape, placements: tuple[Placement, ...]) -> Region:
    """The part of a tensor of ``shape`` on the rank at ``coordinate`` of a mesh of the shape ``mesh``."""
    dims: list[list[Interval]] = [[(0, extent)] for extent in shape]
    for placement, size, position in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, ShardPlacement):
            dims[placement.dim] = _chunk(dims[placement.dim], size, position)
        elif isinstance(placement, StridedShardPlacement):
            whole, count = dims[placement.dim], placement.split_factor
            parts = (_chunk(whole, count, number) for number in range(count))
            dims[placement.dim] = _joined([each for part in parts for each in _chunk(part, size, position)])
    local = tuple(sum(stop - start for start, stop in intervals) for intervals in dims)
    return Region(local, tuple(_boxes(dims)) if 0 not in local else ())


def _chunk(intervals: Sequence[Interval], count: int, number: int) -> list[Interval]:
    """Chunk ``number`` of ``count``, as ``torch.chunk`` makes them; empty where it makes fewer."""
    total = sum(stop - start for start, stop in intervals)
    step = -(-total // count)
    first, last = min(number * step, total), min((number + 1) * step, total)
    found, passed = [], 0
    for start, stop in intervals:
        low, high = max(first - passed, 0), min(last - passed, stop - start)
        if low < high:
            found.append((start + low, start + high))
        passed += stop - start
    return found


def _joined(intervals: list[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, stop in intervals:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _boxes(dims: Sequence[Sequence[Interval]]) -> list[tuple[Box, Shape]]:
    lengths = ([stop - start for start, stop in intervals] for intervals in dims)
    starts = (accumulate(each, initial=0) for each in lengths)
    placed = [list(zip(intervals, at, strict=False)) for intervals, at in zip(dims, starts, strict=True)]
    return [
        (Box(tuple(low for (low, _), _ in part), tuple(high for (_, high), _ in part)), tuple(at for _, at in part))
        for part in product(*placed)
    ]
