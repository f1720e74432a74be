"""Flat partitions: where the elements of a parameter lie in what each rank saved.

Stages 1 and 2 flatten a whole param group and cut it evenly, stage 3 cuts each parameter and concatenates the cuts of
a sub-group. Either way a rank saves a few long vectors, the *flats*, for the masters and for each slot of the
optimizer. ``Pieces`` say which interval of a parameter lies at which offset of which flat, once for all slots;
``Flats`` say where the flats of one slot start in the files. Together they are a ``ShardTable``, column by column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt_tools.dtypes import DType
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.manifest import Ints, ShardTable

ABSENT = -1
"""The start of a flat that a rank did not save."""


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


@dataclass(frozen=True, slots=True)
class Flats:
    """The flats of one slot: ``byte_starts`` and ``numels`` are ``[world size, num flats]``.

    ``dtypes`` has each flat that any rank saved; ``files`` are the ranks' files.
    """

    files: Sequence[str]
    dtypes: Mapping[int, DType]
    byte_starts: Ints
    numels: Ints

    def hold(self, pieces: Pieces) -> bool:
        """Whether any rank saved one of the flats that ``pieces`` need."""
        return not self.dtypes.keys().isdisjoint(np.unique(pieces.flats).tolist())

    def table(self, pieces: Pieces, name: str) -> ShardTable:
        """The shards of a parameter in this slot; ``name`` is for messages.

        Raises:
            IncompleteError: a rank saved nothing where it holds a part; MalformedError: too little, or mixed types.
        """
        starts = self.byte_starts[pieces.ranks, pieces.flats]
        ends = pieces.offsets + pieces.stops - pieces.starts
        self._check(pieces, starts == ABSENT, f"has no {name} for elements that it holds", IncompleteError)
        short = ends > self.numels[pieces.ranks, pieces.flats]
        self._check(pieces, short, f"has fewer elements of {name} than param_shapes promise", MalformedError)
        dtype = self._dtype(pieces, name)
        byte_starts = starts + pieces.offsets * dtype.item_bytes
        return ShardTable(
            shape=(pieces.numel,),
            dtype=dtype,
            starts=pieces.starts[:, None],
            stops=pieces.stops[:, None],
            files=self.files,
            file_ids=pieces.ranks,
            byte_starts=byte_starts,
            byte_stops=byte_starts + (pieces.stops - pieces.starts) * dtype.item_bytes,
        )

    def _check(
        self, pieces: Pieces, wrong: np.ndarray, what: str, kind: type[IncompleteError | MalformedError]
    ) -> None:
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise kind(f"partition {int(pieces.flats[row])} {what}", path=self.files[int(pieces.ranks[row])])

    def _dtype(self, pieces: Pieces, name: str) -> DType:
        found = {self.dtypes[flat] for flat in np.unique(pieces.flats).tolist()}
        if len(found) > 1:
            raise MalformedError(f"{name} is stored in several element types: {sorted(d.value for d in found)}")
        return found.pop()


def even_pieces(start: int, numel: int, partition_numel: int, flat: int) -> Pieces:
    """The pieces of a parameter at ``start`` of a flattened group that is cut every ``partition_numel`` elements.

    stage_1_and_2.py, ``get_data_parallel_partitions``.
    """
    stop = start + numel
    ranks = np.arange(start // partition_numel, -(-stop // partition_numel), dtype=np.int64)
    lower = np.maximum(ranks * partition_numel, start)
    upper = np.minimum((ranks + 1) * partition_numel, stop)
    return Pieces(
        numel=numel,
        ranks=ranks,
        starts=lower - start,
        stops=upper - start,
        flats=np.full(len(ranks), flat, np.int64),
        offsets=lower - ranks * partition_numel,
    )


def cut_pieces(start: int, numel: int, world_size: int, bounds: Ints) -> Pieces:
    """The pieces of a parameter of which each rank holds ``ceil(numel / world_size)`` elements at ``start``.

    ``bounds`` are where the flats of a rank start and at last end, one after the other; a parameter may straddle them.
    Ranks that hold nothing but padding are left out. stage3.py, and ``GatheredTensor`` of zero_to_fp32.py.
    """
    share = -(-numel // world_size)
    ranks = np.arange(-(-numel // share), dtype=np.int64)
    first = int(np.searchsorted(bounds, start, side="right")) - 1
    last = int(np.searchsorted(bounds, start + share, side="left"))
    parts = [_cut_part(ranks, numel, share, start, bounds, flat) for flat in range(first, last)]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Pieces(numel, *columns)


def _cut_part(
    ranks: Ints, numel: int, share: int, start: int, bounds: Ints, flat: int
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The part of a parameter's shares that lies in one flat: ranks, starts, stops, flats, offsets."""
    lower = max(0, int(bounds[flat]) - start)
    upper = min(share, int(bounds[flat + 1]) - start)
    starts = ranks * share + lower
    stops = np.minimum(ranks * share + upper, numel)
    held = stops > starts
    count = int(held.sum())
    return (
        ranks[held],
        starts[held],
        stops[held],
        np.full(count, flat, np.int64),
        np.full(count, start + lower - int(bounds[flat]), np.int64),
    )
