"""Boxes of a tensor that a rank holds.

torch can say where the piece of a DTensor starts, but where two axes of a mesh cut one dim (FSDP over tensor
parallelism, ``_StridedShard``) a piece can be several boxes. So each cut dim is asked element by element: a vector of
positions is distributed as the tensor is, without communication, and its runs are the boxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.core.boxes import Box
from ckpt_tools.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


class DimensionRun(NamedTuple):
    """``size`` positions of a dim that follow one another both in the tensor and in the local piece."""

    local: int
    start: int
    size: int


def iter_local_views(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, Box]]:
    """Views of this rank's memory, which together are its piece of ``tensor``, each with the box that it holds.

    Raises:
        UnsupportedError: the elements are sums still to be made, or those of an FSDP1 shard.
    """
    from torch.distributed.tensor import DTensor

    if hasattr(tensor, "local_shards"):
        raise UnsupportedError("a ShardedTensor of FSDP1 cannot be filled; use fully_shard")
    if not isinstance(tensor, DTensor):
        yield tensor.detach(), Box.whole(tuple(tensor.shape))
    elif tensor.device_mesh.get_coordinate() is not None:
        local = tensor.to_local().detach()
        for runs in product(*(_find_runs(tensor, dim) for dim in range(tensor.ndim))):
            box = Box(tuple(run.start for run in runs), tuple(run.start + run.size for run in runs))
            yield local[tuple(slice(run.local, run.local + run.size) for run in runs)], box


def _find_runs(tensor: DTensor, dim: int) -> list[DimensionRun]:
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError("a DTensor with a partial placement holds no elements to load")
    cut_mask = [getattr(placement, "dim", None) == dim for placement in tensor.placements]
    if not any(cut_mask):
        return [DimensionRun(0, 0, tensor.shape[dim])]
    return list(_group_consecutive(_find_local_positions(tensor, dim, cut_mask)))


def _find_local_positions(tensor: DTensor, dim: int, cut_mask: list[bool]) -> list[int]:
    # torch does not say which elements of a strided shard a rank holds. So the vector of all positions is distributed
    # in the same way. Of 8 positions that FSDP cuts over tensor parallelism of two ranks each, these are local:
    #     rank 0: [0, 1]    rank 1: [4, 5]    rank 2: [2, 3]    rank 3: [6, 7]
    import torch
    from torch.distributed.tensor import Replicate, distribute_tensor

    shape = [-1 if other == dim else 1 for other in range(tensor.ndim)]
    all_positions = torch.arange(tensor.shape[dim]).reshape(shape)
    placements = [own if is_cut else Replicate() for own, is_cut in zip(tensor.placements, cut_mask, strict=True)]
    local_positions = distribute_tensor(all_positions, tensor.device_mesh, placements, src_data_rank=None).to_local()
    positions: list[int] = local_positions.flatten().tolist()
    return positions


def _group_consecutive(positions: list[int]) -> Iterator[DimensionRun]:
    run_start = 0
    for position in range(1, len(positions) + 1):
        if position == len(positions) or positions[position] != positions[position - 1] + 1:
            yield DimensionRun(run_start, positions[run_start], position - run_start)
            run_start = position
