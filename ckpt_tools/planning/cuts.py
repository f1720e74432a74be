"""Cuts a file so that the service that keeps source and destination can copy most of its parts. Intervals only: no
tensor, no store.

A *run* is a range of the file that is one range of one stored file. A service copies a part that lies within a run, and
every part but the last has to have a least size, so that runs may not simply be cut out: what is left between two of
them may be a few kilobytes. Then it is made large enough at the expense of its neighbours, or one of them is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from ckpt_tools.core.dtypes import SPARE_BYTES

Run = tuple[int, int]
"""Bytes ``[start, stop)`` of a file."""

Whole = Callable[[int], int]
"""The last position at or before one at which the file may be cut."""


def smallest_limit(least: int) -> int:
    """Largest part size needed, so that every run of at least ``least`` bytes can be cut into parts of at least that
    size."""
    return 2 * (least + SPARE_BYTES)


def cut_at_stored_ranges(size: int, runs: Iterable[Run], *, least: int, most: int, whole: Whole) -> list[int]:
    """Ends of the parts of a file of ``size`` bytes, with most of its bytes in parts that lie within one run.

    ``runs`` do not overlap, are in order, and begin and end where the file may be cut. Every part has at most ``most``
    bytes, and all but the last at least ``least``. An empty file has one empty part.
    """
    assert most >= smallest_limit(least), "parts of such sizes do not fill every range"
    found: list[int] = []
    kept = _kept((run for run in runs if run[1] - run[0] >= least), least, whole)
    for start, stop in pairwise(sorted({0, size}.union(*kept))):
        found += _cut(start, stop, least, most, whole)
    return found or [0]


def _cut(start: int, stop: int, least: int, most: int, whole: Whole) -> Iterator[int]:
    """The ends of as few parts as can be; halves, where the largest would leave too little."""
    while (left := stop - start) > most:
        start = whole(start + (most if left >= most + least + SPARE_BYTES else left // 2))
        yield start
    yield stop


@dataclass(frozen=True, slots=True)
class _RunSelection:
    """Runs to be copied, shortened so that nothing between two of them is too small; the last one first."""

    copied: int
    last: Run
    before: _RunSelection | None = None

    def runs(self) -> Iterator[Run]:
        chain: _RunSelection | None = self
        while chain is not None:
            yield chain.last
            chain = chain.before

    def joined(self, run: Run, least: int, whole: Whole) -> _RunSelection | None:
        """With one more run, where what lies between can be made large enough: first of what this chain's last can
        spare, since no later one may have it."""
        stop, (first, end) = self.last[1], run
        lacking = max(0, least - (first - stop)) if first > stop else 0
        given = min(lacking, _room(self.last, least))
        if lacking - given > _room(run, least):
            return None
        end_here = whole(stop - given) if given else stop
        shortened = _RunSelection(self.copied - (stop - end_here), (self.last[0], end_here), self.before)
        if lacking > given:
            first = whole(first + lacking - given + SPARE_BYTES)
        return _RunSelection(shortened.copied + end - first, (first, end), shortened)


def _room(run: Run, least: int) -> int:
    """Bytes that the run can spare, wherever it is cut."""
    return max(0, run[1] - run[0] - least - SPARE_BYTES)


def _kept(runs: Iterable[Run], least: int, whole: Whole) -> list[Run]:
    """The runs to be copied, as ``_RunSelection`` has them: for each that is taken or given up, the better
    way to come there."""
    best = without = _RunSelection(0, (0, 0))
    taken: _RunSelection | None = None
    for run in runs:
        ways = (chain.joined(run, least, whole) for chain in (without, taken) if chain is not None)
        without, taken = best, max(filter(None, ways), key=attrgetter("copied"), default=None)
        best = max(filter(None, (without, taken)), key=attrgetter("copied"))
    return list(best.runs())
