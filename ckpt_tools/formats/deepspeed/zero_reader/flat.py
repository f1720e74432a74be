"""Flat partitions: the places of a parameter's elements in the vectors of each rank.

Stages 1 and 2 flatten a whole param group and cut it evenly, stage 3 cuts each parameter and concatenates the cuts of a
sub-group. Either way a rank saves a few long vectors, the *flats*: the masters, and as many for each slot of the
optimizer. ``Pieces`` say which interval of a parameter lies at which offset of which flat, once for all slots;
``Flats`` say where the flats of one slot start in the files. Together they are a ``ShardTable``, column by column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange, Ints, RowTable, ShardTable
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.formats.deepspeed.common.partition import ALIGNMENT_FACTOR

Gaps = Sequence[int] | None
"""Zeros after each parameter of a group, ``param_alignment_paddings``; None for none."""

ABSENT = -1
"""The start of a flat that a rank did not save."""


class Vector(NamedTuple):
    """One flat of one rank: the byte it starts at in the rank's file, its elements, their type."""

    start: int
    numel: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class Pieces:
    """Intervals ``[starts, stops)`` of a parameter's row-major elements; interval i starts at element ``offsets[i]``
    of flat ``flats[i]`` of rank ``ranks[i]``."""

    numel: int
    ranks: Ints
    starts: Ints
    stops: Ints
    flats: Ints
    offsets: Ints

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Rank, flat, elements and offset of each interval."""
        columns = (self.ranks, self.flats, self.stops - self.starts, self.offsets)
        yield from zip(*(column.tolist() for column in columns), strict=True)

    def followed_by(self, other: Pieces) -> Pieces:
        """The pieces of a tensor whose next rows are another's."""
        return Pieces(
            numel=self.numel + other.numel,
            ranks=np.concatenate([self.ranks, other.ranks]),
            starts=np.concatenate([self.starts, other.starts + self.numel]),
            stops=np.concatenate([self.stops, other.stops + self.numel]),
            flats=np.concatenate([self.flats, other.flats]),
            offsets=np.concatenate([self.offsets, other.offsets]),
        )


@dataclass(frozen=True, slots=True)
class Flats:
    """The flats of one slot: ``byte_starts`` and ``numels`` are ``[world size, num flats]``.

    ``dtypes`` has each flat that any rank saved; ``files`` are the ranks' files; ``name`` is for messages.
    """

    name: str
    files: Sequence[str]
    dtypes: Mapping[int, DType]
    byte_starts: Ints
    numels: Ints

    @classmethod
    def of(cls, name: str, files: Sequence[str], ranks: Sequence[Mapping[int, Vector]], num_flats: int) -> Flats:
        """From each rank's vectors by flat. Raises MalformedError where ranks disagree on an element type."""
        byte_starts = np.full((len(ranks), num_flats), ABSENT, np.int64)
        numels = np.zeros((len(ranks), num_flats), np.int64)
        dtypes: dict[int, DType] = {}
        for rank, vectors in enumerate(ranks):
            for flat, vector in vectors.items():
                byte_starts[rank, flat], numels[rank, flat] = vector.start, vector.numel
                if dtypes.setdefault(flat, vector.dtype) is not vector.dtype:
                    raise MalformedError(
                        f"its {name} is {vector.dtype.value} but that of other ranks is {dtypes[flat].value}",
                        path=files[rank],
                    )
        return cls(name, files, dtypes, byte_starts, numels)

    def of_ranks(self, ranks: Ints) -> Flats:
        """The flats of some of the ranks."""
        files = [self.files[rank] for rank in ranks.tolist()]
        return Flats(self.name, files, self.dtypes, self.byte_starts[ranks], self.numels[ranks])

    def holds(self, pieces: Pieces) -> bool:
        """Whether any rank saved a flat that ``pieces`` are in."""
        return not self.dtypes.keys().isdisjoint(pieces.flats.tolist())

    def table(self, pieces: Pieces) -> ShardTable:
        """The shards of a parameter in this slot, as intervals. Raises IncompleteError if a rank saved nothing where it
        holds a part; MalformedError if it saved too little, or in several types."""
        starts = self.byte_starts[pieces.ranks, pieces.flats]
        numels = pieces.stops - pieces.starts
        self._refuse(pieces, starts == ABSENT, "is missing", IncompleteError)
        short = pieces.offsets + numels > self.numels[pieces.ranks, pieces.flats]
        self._refuse(pieces, short, "has fewer elements than param_shapes states", MalformedError)
        dtype = self._dtype(pieces)
        byte_starts = starts + pieces.offsets * dtype.item_bytes
        if len(numels) == 1 and numels[0] == pieces.numel:
            start = int(byte_starts[0])
            at = ByteRange(self.files[int(pieces.ranks[0])], start, start + pieces.numel * dtype.item_bytes)
            return ShardTable.whole((pieces.numel,), dtype, at)
        return RowTable(
            shape=(pieces.numel,),
            dtype=dtype,
            starts=pieces.starts[:, None],
            stops=pieces.stops[:, None],
            files=self.files,
            file_ids=pieces.ranks,
            byte_starts=byte_starts,
            byte_stops=byte_starts + numels * dtype.item_bytes,
        )

    def _refuse(
        self, pieces: Pieces, wrong: NDArray[np.bool_], what: str, kind: type[IncompleteError | MalformedError]
    ) -> None:
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            where = f"partition {int(pieces.flats[row])} of {self.name}"
            raise kind(f"{where} {what}", path=self.files[int(pieces.ranks[row])])

    def _dtype(self, pieces: Pieces) -> DType:
        found = {self.dtypes[flat] for flat in set(pieces.flats.tolist())}
        if len(found) > 1:
            names = ", ".join(sorted(dtype.value for dtype in found))
            raise MalformedError(f"{self.name} of one parameter has several dtypes: {names}", path=self.files[0])
        return found.pop()


# Stage 3


def share(numel: int, world_size: int) -> int:
    """Elements of a parameter on each rank in stage 3, padding included."""
    return -(-numel // world_size)


def locate_params(
    param_shapes: Sequence[Mapping[str, Shape]], masters: Flats, counts: Sequence[int] | None = None
) -> dict[str, Pieces]:
    """The pieces of every parameter that has elements, in stage 3. Raises MalformedError if the partitions are not
    those of these parameters.

    stage3.py: a rank has a cut of ``share`` elements of each parameter; ``fp32_flat_groups`` has one vector a
    sub-group, and ``param_shapes`` lists the parameters in the same order. ``counts`` are the ranks over which each of
    its lists is cut, all of them if it is None. As in zero_to_fp32.py (``GatheredTensor``),
    the cuts of a rank follow each other through all its vectors, so that a cut may be in two of them.
    """
    counts = [len(masters.files)] * len(param_shapes) if counts is None else counts
    bounds = np.concatenate([[0], np.cumsum(masters.numels[0])])
    numels = {
        name: (prod(shape), ranks)
        for ranks, shapes in zip(counts, param_shapes, strict=True)
        for name, shape in shapes.items()
    }
    saved, stated = bounds[-1], sum(share(numel, ranks) for numel, ranks in numels.values())
    if saved != stated:
        message = f"its partitions have {saved:,} elements, but param_shapes states {stated:,}"
        raise MalformedError(message, path=masters.files[0])
    wrong = np.flatnonzero((masters.numels != masters.numels[0]).any(axis=1))
    if len(wrong):
        rank = int(wrong[0])
        mine, first = masters.numels[[rank, 0]].tolist()
        message = f"its partitions have {mine} elements, but those of rank 0 have {first}"
        raise MalformedError(message, path=masters.files[rank])
    found: dict[str, Pieces] = {}
    cursor = 0
    for name, (numel, ranks) in numels.items():
        if numel:
            found[name] = cut_pieces(cursor, numel, ranks, bounds)
        cursor += share(numel, ranks)
    return found


def cut_pieces(start: int, numel: int, world_size: int, bounds: Ints) -> Pieces:
    """The pieces of a parameter whose cut is at element ``start`` of each rank's vectors.

    ``bounds`` are the starts of the vectors and the end of the last. Ranks that hold only padding are left out.
    """
    cut = share(numel, world_size)
    first = int(np.searchsorted(bounds, start, side="right")) - 1
    last = int(np.searchsorted(bounds, start + cut, side="left"))
    ranks = np.arange(share(numel, cut), dtype=np.int64)
    parts = []
    for flat in range(first, last):
        lower = max(0, int(bounds[flat]) - start)
        upper = min(cut, int(bounds[flat + 1]) - start)
        starts, stops = ranks * cut + lower, np.minimum(ranks * cut + upper, numel)
        held = stops > starts
        same = np.ones(int(held.sum()), np.int64)
        parts.append((ranks[held], starts[held], stops[held], same * flat, same * (start + lower - int(bounds[flat]))))
    return Pieces(numel, *(np.concatenate(column) for column in zip(*parts, strict=True)))


# Stages 1 and 2


def locate_group(
    group: int, shapes: Mapping[str, Shape], gaps: Gaps, masters: Flats, paddings: Ints
) -> dict[str, Pieces]:
    """The pieces of every parameter that has elements, in stages 1 and 2, where a group is one vector. Raises
    MalformedError if the partitions are not those of these parameters.

    stage_1_and_2.py: ``flatten_dense_tensors_aligned`` pads a group to a multiple of twice the world size,
    ``get_data_parallel_partitions`` cuts it, and ``_get_groups_without_padding`` trims the masters, so that the last
    ranks may hold less or nothing; the optimizer's slots keep the padding. BF16_Optimizer trims neither. ``paddings``
    are ``[world size, num groups]``: elements that a trimmed master lacks.
    """
    partition = partition_size(group, masters, paddings)
    spans = list(_spans(shapes, gaps, masters.files[0]))
    _check_sizes(masters, group, partition, spans[-1][2] if spans else 0)
    return cut_group(group, shapes, gaps, partition, masters.files[0])


def cut_group(group: int, shapes: Mapping[str, Shape], gaps: Gaps, partition: int, path: str) -> dict[str, Pieces]:
    """The pieces of a group's parameters, cut into partitions of ``partition`` elements. Raises MalformedError."""
    spans = _spans(shapes, gaps, path)
    return {name: _pieces(start, stop, partition, group) for name, start, stop in spans if stop > start}


def partition_size(group: int, masters: Flats, paddings: Ints) -> int:
    """The elements of a partition, padding included, as most ranks state them, so that a message names the rank that
    differs."""
    found, counts = np.unique(masters.numels[:, group] + paddings[:, group], return_counts=True)
    return int(found[np.argmax(counts)])


def _spans(shapes: Mapping[str, Shape], gaps: Gaps, path: str) -> Iterator[tuple[str, int, int]]:
    """Each parameter's name, start and stop in the flattened group."""
    gaps = [0] * len(shapes) if gaps is None else gaps
    if len(gaps) != len(shapes):
        raise MalformedError(f"{len(gaps)} param_alignment_paddings for {len(shapes)} parameters", path=path)
    cursor = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        yield name, cursor, cursor + prod(shape)
        cursor += prod(shape) + gap


def _check_sizes(masters: Flats, group: int, partition: int, numel: int) -> None:
    """Every rank has the elements of its partition, all or without the padding."""
    world_size = len(masters.files)
    surplus = partition * world_size - numel
    if not 0 <= surplus < max(1, ALIGNMENT_FACTOR * world_size):
        raise MalformedError(
            f"group {group} has {world_size} partitions of {partition:,} elements, which do not fit the {numel:,} "
            "of param_shapes",
            path=masters.files[0],
        )
    trimmed = np.clip(numel - np.arange(world_size) * partition, 0, partition)
    saved = masters.numels[:, group]
    wrong = np.flatnonzero((saved != trimmed) & (saved != partition))
    if len(wrong):
        rank = int(wrong[0])
        raise MalformedError(
            f"its partition of group {group} has {int(saved[rank]):,} elements instead of {int(trimmed[rank]):,}",
            path=masters.files[rank],
        )


def _pieces(start: int, stop: int, partition: int, group: int) -> Pieces:
    """The pieces of a parameter at ``[start, stop)`` of a group that is cut every ``partition`` elements."""
    ranks = np.arange(start // partition, -(-stop // partition), dtype=np.int64)
    lower = np.maximum(ranks * partition, start)
    upper = np.minimum((ranks + 1) * partition, stop)
    return Pieces(
        numel=stop - start,
        ranks=ranks,
        starts=lower - start,
        stops=upper - start,
        flats=np.full(len(ranks), group, np.int64),
        offsets=lower - ranks * partition,
    )


def locate_whole(pieces: Mapping[str, Pieces], momentum: Flats) -> dict[str, Pieces]:
    """The pieces of Muon's momentum: whole parameters, in the vector of every rank that holds a part of ``pieces``. The
    first of these ranks is read. Raises MalformedError if a vector is not as long as its parameters."""
    ends: dict[tuple[int, int], int] = {}
    found: dict[str, Pieces] = {}
    for name, own in pieces.items():
        flat = int(own.flats[0])
        if flat not in momentum.dtypes:
            continue
        offsets = {rank: ends.get((rank, flat), 0) for rank in own.ranks.tolist()}
        ends |= {(rank, flat): offset + own.numel for rank, offset in offsets.items()}
        first = int(own.ranks[0])
        columns = ([first], [0], [own.numel], [flat], [offsets[first]])
        found[name] = Pieces(own.numel, *(np.array(column, np.int64) for column in columns))
    for flat in momentum.dtypes:
        for rank, path in enumerate(momentum.files):
            expected, saved = ends.get((rank, flat), 0), int(momentum.numels[rank, flat])
            if expected != saved:
                raise MalformedError(
                    f"its {momentum.name} of group {flat} has {saved:,} elements; the whole parameters of its "
                    f"partition have {expected:,}",
                    path=path,
                )
    return found
