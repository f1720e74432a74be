"""Flat partitions: where the elements of a parameter lie in what each rank saved.

Stages 1 and 2 flatten a whole param group and cut it evenly, stage 3 cuts each parameter and concatenates the cuts of
a sub-group. Either way a rank saves a few long vectors, the *flats*: the masters, and as many for each slot of the
optimizer. ``Pieces`` say which interval of a parameter lies at which offset of which flat, once for all slots;
``Flats`` say where the flats of one slot start in the files. Together they are a ``ShardTable``, column by column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange, Ints, RowTable, ShardTable
from ckpt_tools.errors import IncompleteError, MalformedError

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
        """Whether any rank saved one of the flats that ``pieces`` lie in."""
        return not self.dtypes.keys().isdisjoint(pieces.flats.tolist())

    def table(self, pieces: Pieces) -> ShardTable:
        """The shards of a parameter in this slot, as intervals.

        Raises:
            IncompleteError: a rank saved nothing where it holds a part; MalformedError: too little, or mixed types.
        """
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
