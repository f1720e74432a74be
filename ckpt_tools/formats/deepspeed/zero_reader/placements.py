"""The places of the optimizer's state on ranks: ``GroupPlacement``, one value for every layout of ZeRO.

A placement says which ranks hold a group, and in which order its parameters lie in a vector, a *flat*, of each of
them. The stage says how they are cut. That is all in which the layouts differ, and ``locate_parameters`` finds the
elements in each:

    ZeRO-1, -2        a placement for each param group, on all ranks
    ZeRO-3            one for each sub-group, on all ranks
    deepspeed.moe     of experts, one for each expert-parallel rank, on the ranks that have its experts
    AutoEP            the same, but the placements have rows of the same tensors, which follow each other

One param group of three parameters a, b and c on two ranks ("." is padding):

    Stages 1 and 2: the group is one vector, padded to a multiple of 2 * number of ranks, and cut evenly.
        group:   a a a a a b b c c c . .
        rank 0:  a a a a a b                rank 1:  b c c c . .
        b:       element 0 on rank 0 at offset 5, element 1 on rank 1 at offset 0

    Stage 3: every parameter is cut evenly and padded, and a rank's shares follow each other.
        rank 0:  a a a b c c                rank 1:  a a . b c .
        b:       element 0 on rank 0 at offset 3, element 1 on rank 1 at offset 3

A rank saves a flat of masters, and one for each slot of the optimizer. ``FlatIntervals`` say which interval of a
parameter lies at which offset of which flat, once for all slots; ``SlotVectors`` say where the flats of one slot start
in the files. Together they are a ``ShardTable``, column by column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import Ints, RowTable, ShardTable, get_shared_columns
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.formats.deepspeed.common.files import ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.model_file import is_round_robin
from ckpt_tools.formats.deepspeed.common.partition import ALIGNMENT_FACTOR, undo_round_robin

NO_START = -1
"""The start of a flat that a rank did not save."""


class StoredVector(NamedTuple):
    """One flat of one rank: the byte at which it starts in the rank's file, its number of elements, their dtype."""

    start_byte: int
    numel: int
    dtype: DType


RankVectors = dict[tuple[int, int], StoredVector]
"""The vectors of one slot by rank and flat."""


@dataclass(frozen=True, slots=True)
class FlatIntervals:
    """Intervals ``[starts, stops)`` of a parameter's row-major elements; interval i starts at element ``offsets[i]``
    of flat ``flats[i]`` of rank ``ranks[i]``."""

    numel: int
    ranks: Ints
    starts: Ints
    stops: Ints
    flats: Ints
    offsets: Ints

    def iterate_rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Rank, flat, elements and offset of each interval."""
        columns = (self.ranks, self.flats, self.stops - self.starts, self.offsets)
        yield from zip(*(column.tolist() for column in columns), strict=True)

    def concatenate_rows(self, other: FlatIntervals) -> FlatIntervals:
        """Intervals of the tensor that has the rows of ``other`` after its own, as the experts of the next rank."""
        return FlatIntervals(
            numel=self.numel + other.numel,
            ranks=np.concatenate([self.ranks, other.ranks]),
            starts=np.concatenate([self.starts, other.starts + self.numel]),
            stops=np.concatenate([self.stops, other.stops + self.numel]),
            flats=np.concatenate([self.flats, other.flats]),
            offsets=np.concatenate([self.offsets, other.offsets]),
        )


@dataclass(frozen=True, slots=True)
class SlotVectors:
    """The flats of one slot: ``byte_starts`` and ``numels`` are ``[world size, num flats]``.

    ``dtypes`` has each flat that any rank saved; ``files`` are the ranks' files; ``name`` is for messages.
    """

    name: str
    files: Sequence[str]
    dtypes: Mapping[int, DType]
    byte_starts: Ints
    numels: Ints

    @classmethod
    def of(cls, name: str, files: Sequence[str], vectors: RankVectors, num_flats: int) -> SlotVectors:
        """Gathers the vectors of all ranks. Raises MalformedError if ranks differ in the dtype of a flat."""
        byte_starts = np.full((len(files), num_flats), NO_START, np.int64)
        numels = np.zeros((len(files), num_flats), np.int64)
        dtypes: dict[int, DType] = {}
        for (rank, flat), vector in vectors.items():
            byte_starts[rank, flat], numels[rank, flat] = vector.start_byte, vector.numel
            if dtypes.setdefault(flat, vector.dtype) is not vector.dtype:
                raise MalformedError(
                    f"its {name} is {vector.dtype.value} but that of other ranks is {dtypes[flat].value}",
                    path=files[rank],
                )
        return cls(name, files, dtypes, byte_starts, numels)

    def select_ranks(self, ranks: Ints) -> SlotVectors:
        """The flats of some of the ranks."""
        files = [self.files[rank] for rank in ranks.tolist()]
        return SlotVectors(self.name, files, self.dtypes, self.byte_starts[ranks], self.numels[ranks])

    def has_intervals(self, intervals: FlatIntervals) -> bool:
        """Whether a rank saved this slot for one of the flats that ``intervals`` are in."""
        return not self.dtypes.keys().isdisjoint(intervals.flats.tolist())

    def build_shard_table(self, intervals: FlatIntervals) -> ShardTable:
        """Shards of a parameter in this slot, as a flat tensor of ``intervals.numel`` elements. Raises IncompleteError
        if a rank that holds a part did not save its flat; MalformedError if it saved too few elements, or if the
        parameter is in several dtypes."""
        if len(intervals.ranks) == 1 and (table := self._find_whole_table(intervals)) is not None:
            return table
        starts = self.byte_starts[intervals.ranks, intervals.flats]
        numels = intervals.stops - intervals.starts
        self._raise_where(intervals, starts == NO_START, "is missing", IncompleteError)
        is_too_short = intervals.offsets + numels > self.numels[intervals.ranks, intervals.flats]
        self._raise_where(intervals, is_too_short, "has fewer elements than param_shapes states", MalformedError)
        dtype = self._find_dtype(intervals)
        byte_starts = starts + intervals.offsets * dtype.item_bytes
        return RowTable(
            shape=(intervals.numel,),
            dtype=dtype,
            starts=intervals.starts[:, None],
            stops=intervals.stops[:, None],
            files=self.files,
            file_ids=intervals.ranks,
            byte_starts=byte_starts,
            byte_stops=byte_starts + numels * dtype.item_bytes,
        )

    def _find_whole_table(self, intervals: FlatIntervals) -> ShardTable | None:
        """The table of a parameter that is whole in the flat of one rank, as most of 100,000 are."""
        rank, flat, offset = int(intervals.ranks[0]), int(intervals.flats[0]), int(intervals.offsets[0])
        start, numel, dtype = int(self.byte_starts[rank, flat]), intervals.numel, self.dtypes.get(flat)
        is_here = int(intervals.stops[0]) - int(intervals.starts[0]) == numel and start != NO_START
        if dtype is None or not is_here or offset + numel > int(self.numels[rank, flat]):
            return None
        return get_shared_columns((numel,), dtype).make_table(self.files[rank], start + offset * dtype.item_bytes)

    def _raise_where(
        self,
        intervals: FlatIntervals,
        is_wrong: NDArray[np.bool_],
        problem: str,
        error_class: type[IncompleteError | MalformedError],
    ) -> None:
        if is_wrong.any():
            row = int(np.flatnonzero(is_wrong)[0])
            location = f"partition {int(intervals.flats[row])} of {self.name}"
            raise error_class(f"{location} {problem}", path=self.files[int(intervals.ranks[row])])

    def _find_dtype(self, intervals: FlatIntervals) -> DType:
        dtypes = {self.dtypes[flat] for flat in set(intervals.flats.tolist())}
        if len(dtypes) > 1:
            names = ", ".join(sorted(dtype.value for dtype in dtypes))
            raise MalformedError(f"{self.name} of one parameter has several dtypes: {names}", path=self.files[0])
        return dtypes.pop()


AlignmentGaps = Sequence[int] | None
"""Zeros after each parameter of a group, ``param_alignment_paddings``; None for none."""


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """Parameters that lie in flat ``flat`` of each of ``ranks``, which are in the order of their parts. ``numels`` are
    the parameters' elements by name, in the order in which they lie there."""

    flat: int
    ranks: Ints
    numels: Mapping[str, int]
    gaps: AlignmentGaps = None


def list_placements(
    model: ModelStates,
    optim: OptimStates,
    ranks_by_flat: Sequence[Sequence[Ints]],
    make_name: Callable[[str, int], str] = lambda name, set_number: name,
    *,
    is_in_optimizer_order: bool = False,
) -> list[GroupPlacement]:
    """The groups of ``param_shapes``, one for each set of ranks that the flat has in ``ranks_by_flat``. ``make_name``
    gives the name of a parameter on the ranks of a set. The parameters are in the order in which they lie in the flat,
    or with ``is_in_optimizer_order`` in that in which the optimizer got them. Raises MalformedError in stages 1 and 2
    if there are not as many param groups as flats."""
    num_flats, num_groups = len(optim.masters), len(model.param_shapes)
    if optim.stage < 3 and num_groups != num_flats:
        why = f"{num_flats} groups of partitions, but param_shapes has {num_groups}"
        raise MalformedError(why, path=optim.file.path)
    placements = []
    for flat, shapes in enumerate(model.param_shapes):
        gaps = optim.alignment_paddings[flat] if optim.stage < 3 and optim.alignment_paddings is not None else None
        for set_number, ranks in enumerate(ranks_by_flat[flat]):
            names = list_optimizer_order(model, optim, flat, len(ranks)) if is_in_optimizer_order else shapes
            numels = {make_name(name, set_number): prod(shapes[name]) for name in names}
            placements.append(GroupPlacement(flat, ranks, numels, gaps))
    return placements


def list_optimizer_order(model: ModelStates, optim: OptimStates, flat: int, num_ranks: int) -> tuple[str, ...]:
    """The parameters of a flat that is cut over ``num_ranks`` ranks, in the order in which the optimizer got them."""
    names = tuple(model.param_shapes[flat])
    if is_round_robin(model) and not optim.is_bf16_optimizer:
        return undo_round_robin(names, num_ranks)
    return names


def locate_parameters(
    groups: Sequence[GroupPlacement], masters: SlotVectors, paddings: Ints, stage: int
) -> dict[str, FlatIntervals]:
    """Intervals of every parameter that has elements. Raises MalformedError if the masters have other numbers of
    elements than the groups, or in stage 3 if ranks differ in them."""
    located = _locate_params(groups, masters) if stage == 3 else _locate_vectors(groups, masters, paddings)
    found: dict[str, FlatIntervals] = {}
    for group, name, intervals in located:
        rows = replace(intervals, ranks=group.ranks[intervals.ranks])
        found[name] = found[name].concatenate_rows(rows) if name in found else rows
    return found


# Stage 3


def compute_share(numel: int, world_size: int) -> int:
    """Number of elements of a parameter on each rank in stage 3, padding included."""
    return -(-numel // world_size)


def _locate_params(
    groups: Sequence[GroupPlacement], masters: SlotVectors
) -> Iterator[tuple[GroupPlacement, str, FlatIntervals]]:
    """Intervals by parameter and group, which number the group's ranks from 0.

    stage3.py: a rank has a share of ``compute_share`` elements of each parameter; ``fp32_flat_groups`` has one vector
    a sub-group, and ``param_shapes`` lists the parameters in the same order. As in zero_to_fp32.py
    (``GatheredTensor``), the shares of a rank follow each other through all its vectors, so that a share may be in two
    of them.
    """
    vector_bounds = np.concatenate([[0], np.cumsum(masters.numels[0])])
    start_by_flat, stated_numel = {}, 0
    for group in groups:
        if 0 in group.ranks:
            start_by_flat[group.flat] = stated_numel
            stated_numel += sum(compute_share(numel, len(group.ranks)) for numel in group.numels.values())
    saved_numel = vector_bounds[-1]
    if saved_numel != stated_numel:
        message = f"its partitions have {saved_numel:,} elements, but param_shapes states {stated_numel:,}"
        raise MalformedError(message, path=masters.files[0])
    wrong_ranks = np.flatnonzero((masters.numels != masters.numels[0]).any(axis=1))
    if len(wrong_ranks):
        rank = int(wrong_ranks[0])
        rank_numels, first_numels = masters.numels[[rank, 0]].tolist()
        message = f"its partitions have {rank_numels} elements, but those of rank 0 have {first_numels}"
        raise MalformedError(message, path=masters.files[rank])
    for group in groups:
        cursor = start_by_flat[group.flat]
        for name, numel in group.numels.items():
            if numel:
                yield group, name, locate_param(cursor, numel, len(group.ranks), vector_bounds)
            cursor += compute_share(numel, len(group.ranks))


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


def _locate_vectors(
    groups: Sequence[GroupPlacement], masters: SlotVectors, paddings: Ints
) -> Iterator[tuple[GroupPlacement, str, FlatIntervals]]:
    """Intervals by group and parameter, which number the group's ranks from 0.

    stage_1_and_2.py: ``flatten_dense_tensors_aligned`` pads a group to a multiple of twice the number of its ranks,
    ``get_data_parallel_partitions`` cuts it, and ``_get_groups_without_padding`` trims the masters, so that the last
    ranks may hold less or nothing; the optimizer's slots keep the padding. BF16_Optimizer trims neither. ``paddings``
    are ``[world size, num flats]``: elements that a trimmed master lacks.
    """
    for group in groups:
        own_masters = masters.select_ranks(group.ranks)
        partition_numel = find_partition_numel(group.flat, own_masters, paddings[group.ranks])
        _check_partition_numels(own_masters, group, partition_numel)
        for name, intervals in cut_placement(group, partition_numel, own_masters.files[0]):
            yield group, name, intervals


def cut_placement(group: GroupPlacement, partition_numel: int, path: str) -> Iterator[tuple[str, FlatIntervals]]:
    """Intervals of a group's parameters in partitions of ``partition_numel`` elements, which number the group's ranks
    from 0. Raises MalformedError if ``gaps`` are not one a parameter."""
    for name, start, stop in _list_spans(group, path):
        if stop > start:
            yield name, _locate_span(start, stop, partition_numel, group.flat)


def find_partition_numel(flat: int, masters: SlotVectors, paddings: Ints) -> int:
    """Number of elements of a partition, padding included, by the majority of ranks, so that a message can name the
    rank that differs."""
    numels, counts = np.unique(masters.numels[:, flat] + paddings[:, flat], return_counts=True)
    return int(numels[np.argmax(counts)])


def _list_spans(group: GroupPlacement, path: str) -> Iterator[tuple[str, int, int]]:
    """Name, start and stop of each parameter in the flattened group. Raises MalformedError if ``gaps`` are not one a
    parameter."""
    gaps = [0] * len(group.numels) if group.gaps is None else group.gaps
    if len(gaps) != len(group.numels):
        raise MalformedError(f"{len(gaps)} param_alignment_paddings for {len(group.numels)} parameters", path=path)
    cursor = 0
    for (name, numel), gap in zip(group.numels.items(), gaps, strict=True):
        yield name, cursor, cursor + numel
        cursor += numel + gap


def _check_partition_numels(masters: SlotVectors, group: GroupPlacement, partition_numel: int) -> None:
    """Raises MalformedError if a rank's master vector is neither a whole partition nor one without its padding."""
    world_size = len(masters.files)
    numel = max((stop for _, _, stop in _list_spans(group, masters.files[0])), default=0)
    # The padding of the whole group: it fills up to a multiple of ALIGNMENT_FACTOR * world_size and so is less.
    surplus = partition_numel * world_size - numel
    if not 0 <= surplus < max(1, ALIGNMENT_FACTOR * world_size):
        raise MalformedError(
            f"group {group.flat} has {world_size} partitions of {partition_numel:,} elements, which do not fit the "
            f"{numel:,} of param_shapes",
            path=masters.files[0],
        )
    trimmed_numels = np.clip(numel - np.arange(world_size) * partition_numel, 0, partition_numel)
    saved_numels = masters.numels[:, group.flat]
    wrong_ranks = np.flatnonzero((saved_numels != trimmed_numels) & (saved_numels != partition_numel))
    if len(wrong_ranks):
        rank = int(wrong_ranks[0])
        raise MalformedError(
            f"its partition of group {group.flat} has {int(saved_numels[rank]):,} elements instead of "
            f"{int(trimmed_numels[rank]):,}",
            path=masters.files[rank],
        )


def _locate_span(start: int, stop: int, partition_numel: int, flat: int) -> FlatIntervals:
    """Intervals of the parameter at ``[start, stop)`` of a group that is cut every ``partition_numel`` elements."""
    ranks = np.arange(start // partition_numel, -(-stop // partition_numel), dtype=np.int64)
    lower = np.maximum(ranks * partition_numel, start)
    upper = np.minimum((ranks + 1) * partition_numel, stop)
    return FlatIntervals(
        numel=stop - start,
        ranks=ranks,
        starts=lower - start,
        stops=upper - start,
        flats=np.full(len(ranks), flat, np.int64),
        offsets=lower - ranks * partition_numel,
    )


def locate_whole_momentum(
    param_intervals: Mapping[str, FlatIntervals], momentum: SlotVectors
) -> dict[str, FlatIntervals]:
    """Intervals of Muon's momentum. The vector of a rank has every parameter whole that has a part on the rank by
    ``param_intervals``. Each is read from the first such rank. Raises MalformedError if a vector is not as long as its
    parameters."""
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
