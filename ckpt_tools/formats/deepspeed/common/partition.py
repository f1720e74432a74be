"""The elements of each parameter on each rank, and their places in its vectors. Integers only.

A rank holds a few long vectors, one a *flat group*: a param group in stages 1 and 2, a sub-group in stage 3. Stages 1
and 2 concatenate the parameters of a group, pad the end to a multiple of twice the world size and cut evenly
(stage_1_and_2.py ``flatten_dense_tensors_aligned``, ``get_data_parallel_partitions``). Stage 3 cuts every parameter
evenly, pads each cut, and concatenates a rank's cuts (stage3.py ``_create_fp16_partitions_with_defragmentation``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_tools.core.shards import Ints

ALIGNMENT_FACTOR = 2
"""Elements that a rank's part of a group is a multiple of: ``nccl_start_alignment_factor``, for 4-byte alignment."""


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """One rank's vector: row i is elements ``[starts[i], stops[i])`` of parameter ``params[i]`` of the group, then
    ``paddings[i]`` zeros. A row may hold no element."""

    params: Ints
    starts: Ints
    stops: Ints
    paddings: Ints

    @property
    def numel(self) -> int:
        return int((self.stops - self.starts).sum()) + self.num_padding

    @property
    def num_padding(self) -> int:
        return int(self.paddings.sum())

    @property
    def offsets(self) -> Ints:
        """The start of each row in the vector."""
        ends: Ints = np.cumsum(self.stops - self.starts + self.paddings)
        return np.concatenate([[0], ends[:-1]])

    def drop_padding(self) -> VectorLayout:
        return VectorLayout(self.params, self.starts, self.stops, np.zeros_like(self.paddings))

    def cover_whole_parameters(self, numels: Sequence[int]) -> VectorLayout:
        """The layout of Muon's momentum: every parameter with a part in this vector, whole and without padding.
        ``numels`` are the elements of the group's parameters."""
        params = self.params[self.stops > self.starts]
        zeros = np.zeros_like(params)
        return VectorLayout(params, zeros, np.array(numels, np.int64)[params], zeros)


@dataclass(frozen=True, slots=True)
class GroupPartition:
    """Stages 1 and 2: rank r holds elements ``[r * partition_numel, (r + 1) * partition_numel)`` of a flattened group.

    ``param_bounds`` are the starts of the parameters in it, and the end of the last one.
    """

    param_bounds: Ints
    partition_numel: int

    @classmethod
    def of(cls, numels: Sequence[int], world_size: int) -> GroupPartition:
        param_bounds = np.concatenate([[0], np.cumsum(np.array(numels, np.int64))])
        alignment = ALIGNMENT_FACTOR * world_size
        return cls(param_bounds, -(-int(param_bounds[-1]) // alignment) * ALIGNMENT_FACTOR)

    def lay_out_rank(self, rank: int) -> VectorLayout:
        lower, upper = rank * self.partition_numel, (rank + 1) * self.partition_numel
        # The last parameter that starts at or before ``lower``, and the first one that starts at or after ``upper``.
        first_param = int(np.searchsorted(self.param_bounds, lower, side="right")) - 1
        stop_param = max(first_param, int(np.searchsorted(self.param_bounds[:-1], upper, side="left")))
        if first_param >= len(self.param_bounds) - 1:
            # The rank has padding alone: one row without elements.
            zero = np.zeros(1, np.int64)
            return VectorLayout(zero, zero, zero, np.array([self.partition_numel], np.int64))
        params = np.arange(first_param, stop_param, dtype=np.int64)
        starts = np.maximum(self.param_bounds[params], lower) - self.param_bounds[params]
        stops = np.minimum(self.param_bounds[params + 1], upper) - self.param_bounds[params]
        paddings = np.zeros_like(params)
        paddings[-1] = self.partition_numel - int((stops - starts).sum())
        return VectorLayout(params, starts, stops, paddings)


@dataclass(frozen=True, slots=True)
class ParamPartition:
    """Stage 3: rank r holds elements ``[r * share, (r + 1) * share)`` of each parameter, whose share is
    ``ceil(numel / world size)``, padding included."""

    numels: Ints
    shares: Ints

    @classmethod
    def of(cls, numels: Sequence[int], world_size: int) -> ParamPartition:
        numel_array = np.array(numels, np.int64)
        return cls(numel_array, -(-numel_array // world_size))

    def lay_out_rank(self, rank: int) -> VectorLayout:
        starts = np.minimum(rank * self.shares, self.numels)
        stops = np.minimum(starts + self.shares, self.numels)
        return VectorLayout(np.arange(len(self.numels), dtype=np.int64), starts, stops, self.shares - (stops - starts))


def split_sub_groups(shares: Sequence[int], sub_group_size: int) -> list[range]:
    """Positions of a param group's parameters in each of its sub-groups, whose ``shares`` reach ``sub_group_size``.

    stage3.py ``_create_fp16_sub_groups``: a sub-group ends with the parameter that reaches the size.
    """
    groups, first_position, group_numel = [], 0, 0
    for position, share in enumerate(shares):
        group_numel += share
        if group_numel >= sub_group_size or position + 1 == len(shares):
            groups.append(range(first_position, position + 1))
            first_position, group_numel = position + 1, 0
    return groups


def round_robin_order(num_params: int, world_size: int) -> list[int]:
    """The order in which ``round_robin_gradients`` flattens a group: of N ranks, rank r has the positions r, r + N,
    r + 2 N, ...

    stage_1_and_2.py ``_round_robin_reorder``.
    """
    return [position for rank in range(world_size) for position in range(rank, num_params, world_size)]


def undo_round_robin(names: Sequence[str], world_size: int) -> tuple[str, ...]:
    """The order of a group's parameters before ``round_robin_gradients`` reordered them."""
    order = round_robin_order(len(names), min(world_size, max(1, len(names))))
    return tuple(name for _, name in sorted(zip(order, names, strict=True)))


MUON_MOMENTUM_SLOT = "momentum_buffer"
"""Muon's only slot. Muon works on whole matrices, so that in stages 1 and 2 a rank has one vector of the whole momentum
of every parameter of which its partition holds a part, end to end and without padding (stage_1_and_2.py
``_muon_momentum_buffer``). A parameter on two ranks is in both vectors. With ``offload_optimizer``, in BF16_Optimizer
and in stage 3 the vector is cut as the masters are."""


def is_muon(options: Mapping[str, Any]) -> bool:
    return options.get("use_muon") is True
