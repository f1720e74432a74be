"""Flat partitions: the long vectors that a rank saves, and the intervals of a parameter in them.

A rank saves a few long vectors, the *flats*: the masters, and as many for each slot of the optimizer.
``FlatIntervals`` say which interval of a parameter lies at which offset of which flat, once for all slots;
``placements`` computes them. ``SlotVectors`` say where the flats of one slot start in the files. Together they are
a ``ShardTable``, column by column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange, Ints, RowTable, ShardTable
from ckpt_tools.errors import IncompleteError, MalformedError

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
        starts = self.byte_starts[intervals.ranks, intervals.flats]
        numels = intervals.stops - intervals.starts
        self._raise_where(intervals, starts == NO_START, "is missing", IncompleteError)
        is_too_short = intervals.offsets + numels > self.numels[intervals.ranks, intervals.flats]
        self._raise_where(intervals, is_too_short, "has fewer elements than param_shapes states", MalformedError)
        dtype = self._find_dtype(intervals)
        byte_starts = starts + intervals.offsets * dtype.item_bytes
        if len(numels) == 1 and numels[0] == intervals.numel:
            path, start = self.files[int(intervals.ranks[0])], int(byte_starts[0])
            byte_range = ByteRange(path, start, start + intervals.numel * dtype.item_bytes)
            return ShardTable.whole((intervals.numel,), dtype, byte_range)
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
