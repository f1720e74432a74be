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
class LocalRegion:
    """The local tensor of a rank: its shape, and the boxes of the whole tensor that it holds, each with where it begins
    in the local tensor. Without an element it has none."""

    shape: Shape
    boxes: tuple[tuple[Box, Shape], ...]


@lru_cache(maxsize=4096)
def compute_region(
    shape: Shape, mesh_shape: Shape, coordinate: Shape, placements: tuple[Placement, ...]
) -> LocalRegion:
    """The part of a tensor of ``shape`` on the rank at ``coordinate`` of a mesh of the shape ``mesh_shape``."""
    # 8 rows, mesh (2, 2), placements (Shard(0), Shard(0)):  rank (0,0): 0 1,  (0,1): 2 3,  (1,0): 4 5,  (1,1): 6 7
    # 8 rows, mesh (2,), _StridedShard(0, split_factor=2):   the rows are 2 parts, and a rank has its chunk of each:
    #     part 0: 0 1 | 2 3    part 1: 4 5 | 6 7             rank 0: 0 1 4 5,  rank 1: 2 3 6 7
    # So a rank's indices along a dim are a list of intervals, and its part is the product of these lists.
    intervals_by_dim: list[list[Interval]] = [[(0, extent)] for extent in shape]
    for placement, size, position in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, ShardPlacement):
            intervals_by_dim[placement.dim] = _select_chunk(intervals_by_dim[placement.dim], size, position)
        elif isinstance(placement, StridedShardPlacement):
            whole_intervals, count = intervals_by_dim[placement.dim], placement.split_factor
            parts = (_select_chunk(whole_intervals, count, number) for number in range(count))
            intervals_by_dim[placement.dim] = _merge_adjacent(
                [each for part in parts for each in _select_chunk(part, size, position)]
            )
    local_shape = tuple(sum(stop - start for start, stop in intervals) for intervals in intervals_by_dim)
    return LocalRegion(local_shape, tuple(_combine_boxes(intervals_by_dim)) if 0 not in local_shape else ())


def _select_chunk(intervals: Sequence[Interval], count: int, number: int) -> list[Interval]:
    """Chunk ``number`` of ``count``, as ``torch.chunk`` makes them; empty where it makes fewer."""
    total = sum(stop - start for start, stop in intervals)
    step = -(-total // count)
    first, last = min(number * step, total), min((number + 1) * step, total)
    chunk_intervals, num_passed = [], 0
    for start, stop in intervals:
        low, high = max(first - num_passed, 0), min(last - num_passed, stop - start)
        if low < high:
            chunk_intervals.append((start + low, start + high))
        num_passed += stop - start
    return chunk_intervals


def _merge_adjacent(intervals: list[Interval]) -> list[Interval]:
    merged_intervals: list[Interval] = []
    for start, stop in intervals:
        if merged_intervals and merged_intervals[-1][1] == start:
            merged_intervals[-1] = merged_intervals[-1][0], stop
        else:
            merged_intervals.append((start, stop))
    return merged_intervals


def _combine_boxes(intervals_by_dim: Sequence[Sequence[Interval]]) -> list[tuple[Box, Shape]]:
    # In the local tensor the intervals of a dim lie one behind the other: each starts at the sum of the lengths before
    # it.
    lengths = ([stop - start for start, stop in intervals] for intervals in intervals_by_dim)
    starts = (accumulate(each, initial=0) for each in lengths)
    starts_by_dim = [
        list(zip(intervals, at, strict=False)) for intervals, at in zip(intervals_by_dim, starts, strict=True)
    ]
    return [
        (Box(tuple(low for (low, _), _ in part), tuple(high for (_, high), _ in part)), tuple(at for _, at in part))
        for part in product(*starts_by_dim)
    ]
