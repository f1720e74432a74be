"""The places of every parameter's elements in the flats of all ranks: ``FlatIntervals`` by name.

One param group of three parameters a, b and c on two ranks ("." is padding):

    Stages 1 and 2: the group is one vector, padded to a multiple of 2 * world size, and cut evenly.
        group:   a a a a a b b c c c . .
        rank 0:  a a a a a b                rank 1:  b c c c . .
        b:       element 0 on rank 0 at offset 5, element 1 on rank 1 at offset 0

    Stage 3: every parameter is cut evenly and padded, and a rank's shares follow each other.
        rank 0:  a a a b c c                rank 1:  a a . b c .
        b:       element 0 on rank 0 at offset 3, element 1 on rank 1 at offset 3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.shards import Ints
from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.deepspeed.common.partition import ALIGNMENT_FACTOR
from ckpt_tools.formats.deepspeed.zero_reader.flat import FlatIntervals, SlotVectors

AlignmentGaps = Sequence[int] | None
"""Zeros after each parameter of a group, ``param_alignment_paddings``; None for none."""

# Stage 3


def compute_share(numel: int, world_size: int) -> int:
    """Number of elements of a parameter on each rank in stage 3, padding included."""
    return -(-numel // world_size)


def locate_params(
    param_shapes: Sequence[Mapping[str, Shape]], masters: SlotVectors, rank_counts: Sequence[int] | None = None
) -> dict[str, FlatIntervals]:
    """Intervals of every parameter that has elements, in stage 3. Raises MalformedError if the masters have other
    numbers of elements than ``param_shapes``, or if ranks differ in them.

    stage3.py: a rank has a share of ``compute_share`` elements of each parameter; ``fp32_flat_groups`` has one vector
    a sub-group, and ``param_shapes`` lists the parameters in the same order. ``rank_counts`` has, for each mapping of
    ``param_shapes``, the number of ranks over which its parameters are cut; None stands for all ranks. As in
    zero_to_fp32.py (``GatheredTensor``), the shares of a rank follow each other through all its vectors, so that a
    share may be in two of them.
    """
    rank_counts = [len(masters.files)] * len(param_shapes) if rank_counts is None else rank_counts
    vector_bounds = np.concatenate([[0], np.cumsum(masters.numels[0])])
    numel_and_ranks = {
        name: (prod(shape), ranks)
        for ranks, shapes in zip(rank_counts, param_shapes, strict=True)
        for name, shape in shapes.items()
    }
    saved_numel = vector_bounds[-1]
    stated_numel = sum(compute_share(numel, ranks) for numel, ranks in numel_and_ranks.values())
    if saved_numel != stated_numel:
        message = f"its partitions have {saved_numel:,} elements, but param_shapes states {stated_numel:,}"
        raise MalformedError(message, path=masters.files[0])
    wrong_ranks = np.flatnonzero((masters.numels != masters.numels[0]).any(axis=1))
    if len(wrong_ranks):
        rank = int(wrong_ranks[0])
        rank_numels, first_numels = masters.numels[[rank, 0]].tolist()
        message = f"its partitions have {rank_numels} elements, but those of rank 0 have {first_numels}"
        raise MalformedError(message, path=masters.files[rank])
    intervals_by_name: dict[str, FlatIntervals] = {}
    cursor = 0
    for name, (numel, ranks) in numel_and_ranks.items():
        if numel:
            intervals_by_name[name] = locate_param(cursor, numel, ranks, vector_bounds)
        cursor += compute_share(numel, ranks)
    return intervals_by_name


def locate_param(start: int, numel: int, world_size: int, vector_bounds: Ints) -> FlatIntervals:
    """Intervals of a stage 3 parameter whose share starts at element ``start`` of each rank's concatenated vectors.

    ``vector_bounds`` are the starts of the vectors there, and the end of the last. Ranks that hold only padding are
    left out.
    """
    share_numel = compute_share(numel, world_size)
    first_flat = int(np.searchsorted(vector_bounds, start, side="right")) - 1
    stop_flat = int(np.searchsorted(vector_bounds, start + share_numel, side="left"))
    ranks = np.arange(-(-numel // share_numel), dtype=np.int64)
    flat_columns = []
    # A share may straddle two vectors: [lower, upper) is its part in vector ``flat``. The vectors of all ranks have the
    # same lengths, so one computation is for all ranks.
    for flat in range(first_flat, stop_flat):
        lower = max(0, int(vector_bounds[flat]) - start)
        upper = min(share_numel, int(vector_bounds[flat + 1]) - start)
        starts, stops = ranks * share_numel + lower, np.minimum(ranks * share_numel + upper, numel)
        is_held = stops > starts
        num_held, offset = int(is_held.sum()), start + lower - int(vector_bounds[flat])
        flats, offsets = np.full(num_held, flat, np.int64), np.full(num_held, offset, np.int64)
        flat_columns.append((ranks[is_held], starts[is_held], stops[is_held], flats, offsets))
    return FlatIntervals(numel, *(np.concatenate(column) for column in zip(*flat_columns, strict=True)))


# Stages 1 and 2


def locate_group(
    group: int, shapes: Mapping[str, Shape], gaps: AlignmentGaps, masters: SlotVectors, paddings: Ints
) -> dict[str, FlatIntervals]:
    """Intervals of the parameters of ``group`` that have elements, in stages 1 and 2, where a group is one vector.
    Raises MalformedError if the masters have other numbers of elements than ``shapes``.

    stage_1_and_2.py: ``flatten_dense_tensors_aligned`` pads a group to a multiple of twice the world size,
    ``get_data_parallel_partitions`` cuts it, and ``_get_groups_without_padding`` trims the masters, so that the last
    ranks may hold less or nothing; the optimizer's slots keep the padding. BF16_Optimizer trims neither. ``paddings``
    are ``[world size, num groups]``: elements that a trimmed master lacks.
    """
    partition_numel = find_partition_numel(group, masters, paddings)
    spans = list(_list_spans(shapes, gaps, masters.files[0]))
    _check_partition_numels(masters, group, partition_numel, spans[-1][2] if spans else 0)
    return partition_group(group, shapes, gaps, partition_numel, masters.files[0])


def partition_group(
    group: int, shapes: Mapping[str, Shape], gaps: AlignmentGaps, partition_numel: int, path: str
) -> dict[str, FlatIntervals]:
    """Intervals of a group's parameters in partitions of ``partition_numel`` elements. Raises MalformedError if
    ``gaps`` are not one a parameter."""
    spans = _list_spans(shapes, gaps, path)
    return {name: _locate_span(start, stop, partition_numel, group) for name, start, stop in spans if stop > start}


def find_partition_numel(group: int, masters: SlotVectors, paddings: Ints) -> int:
    """Number of elements of a partition, padding included, by the majority of ranks, so that a message can name the
    rank that differs."""
    numels, counts = np.unique(masters.numels[:, group] + paddings[:, group], return_counts=True)
    return int(numels[np.argmax(counts)])


def _list_spans(shapes: Mapping[str, Shape], gaps: AlignmentGaps, path: str) -> Iterator[tuple[str, int, int]]:
    """Name, start and stop of each parameter in the flattened group. Raises MalformedError if ``gaps`` are not one a
    parameter."""
    gaps = [0] * len(shapes) if gaps is None else gaps
    if len(gaps) != len(shapes):
        raise MalformedError(f"{len(gaps)} param_alignment_paddings for {len(shapes)} parameters", path=path)
    cursor = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        yield name, cursor, cursor + prod(shape)
        cursor += prod(shape) + gap


def _check_partition_numels(masters: SlotVectors, group: int, partition_numel: int, numel: int) -> None:
    """Raises MalformedError if a rank's master vector is neither a whole partition nor one without its padding.
    ``numel`` are the elements of the group without padding."""
    world_size = len(masters.files)
    # The padding of the whole group: it fills up to a multiple of ALIGNMENT_FACTOR * world_size and so is less.
    surplus = partition_numel * world_size - numel
    if not 0 <= surplus < max(1, ALIGNMENT_FACTOR * world_size):
        raise MalformedError(
            f"group {group} has {world_size} partitions of {partition_numel:,} elements, which do not fit the "
            f"{numel:,} of param_shapes",
            path=masters.files[0],
        )
    trimmed_numels = np.clip(numel - np.arange(world_size) * partition_numel, 0, partition_numel)
    saved_numels = masters.numels[:, group]
    wrong_ranks = np.flatnonzero((saved_numels != trimmed_numels) & (saved_numels != partition_numel))
    if len(wrong_ranks):
        rank = int(wrong_ranks[0])
        raise MalformedError(
            f"its partition of group {group} has {int(saved_numels[rank]):,} elements instead of "
            f"{int(trimmed_numels[rank]):,}",
            path=masters.files[rank],
        )


def _locate_span(start: int, stop: int, partition_numel: int, group: int) -> FlatIntervals:
    """Intervals of the parameter at ``[start, stop)`` of a group that is cut every ``partition_numel`` elements."""
    ranks = np.arange(start // partition_numel, -(-stop // partition_numel), dtype=np.int64)
    lower = np.maximum(ranks * partition_numel, start)
    upper = np.minimum((ranks + 1) * partition_numel, stop)
    return FlatIntervals(
        numel=stop - start,
        ranks=ranks,
        starts=lower - start,
        stops=upper - start,
        flats=np.full(len(ranks), group, np.int64),
        offsets=lower - ranks * partition_numel,
    )


def locate_whole_momentum(
    param_intervals: Mapping[str, FlatIntervals], momentum: SlotVectors
) -> dict[str, FlatIntervals]:
    """Intervals of Muon's momentum, whose vector on a rank has the whole of every parameter of which the rank holds a
    part by ``param_intervals``. Each is read from the first such rank. Raises MalformedError if a vector is not as long
    as its parameters."""
    # The parameters follow each other in the order of the partition. This is where the next one starts in the vector of
    # each rank; at the end, it must be the vector's length.
    end_by_rank_and_flat: dict[tuple[int, int], int] = {}
    momentum_intervals: dict[str, FlatIntervals] = {}
    for name, intervals in param_intervals.items():
        flat = int(intervals.flats[0])
        if flat not in momentum.dtypes:
            continue
        offsets = {rank: end_by_rank_and_flat.get((rank, flat), 0) for rank in intervals.ranks.tolist()}
        end_by_rank_and_flat |= {(rank, flat): offset + intervals.numel for rank, offset in offsets.items()}
        first_rank = int(intervals.ranks[0])
        columns = ([first_rank], [0], [intervals.numel], [flat], [offsets[first_rank]])
        momentum_intervals[name] = FlatIntervals(intervals.numel, *(np.array(column, np.int64) for column in columns))
    for flat in momentum.dtypes:
        for rank, path in enumerate(momentum.files):
            expected_numel, saved_numel = end_by_rank_and_flat.get((rank, flat), 0), int(momentum.numels[rank, flat])
            if expected_numel != saved_numel:
                raise MalformedError(
                    f"its {momentum.name} of group {flat} has {saved_numel:,} elements; the whole parameters of its "
                    f"partition have {expected_numel:,}",
                    path=path,
                )
    return momentum_intervals
