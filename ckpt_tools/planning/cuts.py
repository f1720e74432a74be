"""Cuts a file so that the service that keeps source and destination can copy most of its parts. Intervals only: no
tensor, no store.

A *run* is a range of the file that is one range of one stored file. A service copies a part that lies within a run, and
each part, except the last, has a least size, so that runs may not simply be cut out: what is left between two of them
may be a few kilobytes. Then it is made large enough at the expense of its neighbours, or one of them is given up.

    bytes of the file   |------------------------------------------|
    runs                    [== run 1 ==]  [= run 2 =]   [= run 3 =]
    between them        ----             --           ---

If the two bytes between runs 1 and 2 are too few for a part, the end of run 1 and then the start of run 2 are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from ckpt_tools.core.part_rules import SPARE_BYTES, min_part_limit

StoredRun = tuple[int, int]
"""Bytes ``[start, stop)`` of a file."""

FloorToBoundary = Callable[[int], int]
"""The last position at or before one at which the file may be cut."""


def cut_at_stored_ranges(
    size: int, runs: Iterable[StoredRun], *, min_bytes: int, max_bytes: int, floor_to_boundary: FloorToBoundary
) -> list[int]:
    """Ends of the parts of a file of ``size`` bytes, with most of its bytes in parts that lie within one run.

    ``runs`` do not overlap, are in order, and begin and end where the file may be cut. Every part has at most
    ``max_bytes`` bytes, and each except the last at least ``min_bytes``. An empty file has one empty part.
    """
    assert max_bytes >= min_part_limit(min_bytes), "parts of such sizes do not fill every range"
    part_ends: list[int] = []
    copied_runs = _choose_copied_runs(
        (run for run in runs if run[1] - run[0] >= min_bytes), min_bytes, floor_to_boundary
    )
    for start, stop in pairwise(sorted({0, size}.union(*copied_runs))):
        part_ends += _iter_part_ends(start, stop, min_bytes, max_bytes, floor_to_boundary)
    return part_ends or [0]


def _iter_part_ends(
    start: int, stop: int, min_bytes: int, max_bytes: int, floor_to_boundary: FloorToBoundary
) -> Iterator[int]:
    """The ends of as few parts as can be; halves, where the largest would leave too little."""
    while (bytes_left := stop - start) > max_bytes:
        start = floor_to_boundary(
            start + (max_bytes if bytes_left >= max_bytes + min_bytes + SPARE_BYTES else bytes_left // 2)
        )
        yield start
    yield stop


@dataclass(frozen=True, slots=True)
class _RunSelection:
    """Runs to be copied, shortened so that nothing between two of them is too small: a chain from the last run back."""

    copied: int
    """Bytes of all of them."""
    last_run: StoredRun
    previous: _RunSelection | None = None

    def try_add_run(self, run: StoredRun, min_bytes: int, floor_to_boundary: FloorToBoundary) -> _RunSelection | None:
        """This selection and one more run, if what lies between can be made large enough; else None.

        The missing bytes come from the end of the last run first: later runs cannot use what it can spare.
        """
        stop, (first, end) = self.last_run[1], run
        missing_bytes = max(0, min_bytes - (first - stop)) if first > stop else 0
        from_last_run = min(missing_bytes, _spare_bytes(self.last_run, min_bytes))
        if missing_bytes - from_last_run > _spare_bytes(run, min_bytes):
            return None
        last_run_end = floor_to_boundary(stop - from_last_run) if from_last_run else stop
        shortened = _RunSelection(self.copied - (stop - last_run_end), (self.last_run[0], last_run_end), self.previous)
        if missing_bytes > from_last_run:
            first = floor_to_boundary(first + missing_bytes - from_last_run + SPARE_BYTES)
        return _RunSelection(shortened.copied + end - first, (first, end), shortened)


def _spare_bytes(run: StoredRun, min_bytes: int) -> int:
    """Bytes that the run can spare, wherever it is cut."""
    return max(0, run[1] - run[0] - min_bytes - SPARE_BYTES)


def _choose_copied_runs(
    runs: Iterable[StoredRun], min_bytes: int, floor_to_boundary: FloorToBoundary
) -> list[StoredRun]:
    """The runs to be copied, shortened, the last one first."""
    # A dynamic programme over the runs in order. For each run there are two candidates: the best selection that ends
    # with it, and the best one that gives it up. A later run shortens the last run of a selection and no other, so
    # that nothing else has to be kept.
    best = best_without_last = _RunSelection(0, (0, 0))
    best_with_last: _RunSelection | None = None
    for run in runs:
        extensions = (
            selection.try_add_run(run, min_bytes, floor_to_boundary)
            for selection in (best_without_last, best_with_last)
            if selection is not None
        )
        best_without_last, best_with_last = best, max(filter(None, extensions), key=attrgetter("copied"), default=None)
        best = max(filter(None, (best_without_last, best_with_last)), key=attrgetter("copied"))
    chosen_runs: list[StoredRun] = []
    chain: _RunSelection | None = best
    while chain is not None:
        chosen_runs.append(chain.last_run)
        chain = chain.previous
    return chosen_runs
