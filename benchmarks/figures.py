"""Medians, ratios and kept promises of a work, from the journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import peers
from benchmarks.journal import Journal, Record
from benchmarks.suite import COLD, FSYNC, WARM, WAYS
from benchmarks.works import COPY, LARGE_BYTES, OURS, WORKS, Work


@dataclass(frozen=True, slots=True)
class Row:
    """All runs of one contestant in one way, and the reason of its failure, if it failed."""

    contestant: str
    way: str
    runs: tuple[Record, ...]
    reason: str = ""

    def median(self, field: str) -> float:
        return float(median(run[field] for run in self.runs))

    @property
    def seconds(self) -> float:
        return self.median("seconds")

    @property
    def peak_bytes(self) -> int:
        return int(max(run["peak_bytes"] for run in self.runs))


@dataclass(frozen=True, slots=True)
class Result:
    """Everything measured of one work, of one size."""

    work: Work
    about: Record
    rows: tuple[Row, ...]
    checks: dict[str, Record]

    def row(self, contestant: str, way: str = WARM) -> Row | None:
        """The runs that were done, if any were."""
        return next((row for row in self.rows if (row.contestant, row.way) == (contestant, way) and row.runs), None)

    def ratio(self, one: str, other: str, way: str = WARM) -> float | None:
        """Median seconds of one over those of the other."""
        first, second = (self.row(each, way) for each in (one, other))
        return first.seconds / second.seconds if first and second else None

    @property
    def times_faster(self) -> float | None:
        """The peer's time over ours; over ours with fsync where the peer syncs too."""
        theirs, ours = self.peer, self.row(OURS, FSYNC if self.work.peer in peers.SYNCING else WARM)
        return theirs.seconds / ours.seconds if theirs and ours else None

    @property
    def peer(self) -> Row | None:
        """The runs of the peer, if it completes."""
        return self.row(self.work.peer)

    @property
    def failures(self) -> dict[str, str]:
        """Reasons by contestant."""
        return {row.contestant: row.reason for row in self.rows if row.reason}

    def promises(self) -> Iterator[str]:
        """The promises of the work's target that were measured, in the order of its fields."""
        target = self.work.target
        copies = self.about["copied_bytes"] >= LARGE_BYTES
        large = self.about["source_bytes"] >= LARGE_BYTES
        yield from _at_most(self.ratio(OURS, COPY), target.copy, "x cp -r, from memory", copies)
        yield from _at_most(self.ratio(OURS, COPY, COLD), target.copy, "x cp -r, from the disk", copies)
        yield from _at_most(self.ratio(OURS, COPY, FSYNC), target.copy_synced, "x cp -r, both with fsync", copies)
        yield from _at_most(
            self.ratio(OURS, self.work.plain), target.plain, f"x {self.work.plain.removeprefix(OURS).strip()}", large
        )
        if target.peer is not None and (times := self.times_faster):
            text = f"{times:.1f} times as fast as {self.work.peer} (at least {target.peer:g})"
            yield _judged(text, times >= target.peer, large)


def _at_most(ratio: float | None, limit: float | None, unit: str, applies: bool) -> Iterator[str]:
    if ratio is not None and limit is not None:
        yield _judged(f"{ratio:.2f}{unit} (at most {limit:g})", ratio <= limit, applies)


def _judged(text: str, kept: bool, applies: bool) -> str:
    return f"{verdict(kept)}: {text}" if applies else f"{text} (promised for 4 GB)"


def verdict(kept: bool) -> str:
    return "kept" if kept else "**missed**"


def results(journal: Journal, works: Sequence[Work] = WORKS) -> Iterator[Result]:
    """The results of every work that was measured, in the order of ``works``."""
    for work in works:
        abouts = journal.find(kind="work", work=work.name, status="done")
        if abouts:
            checks = {record["contestant"]: record for record in journal.find(kind="check", work=work.name)}
            yield Result(work, abouts[-1], tuple(_rows(work, journal)), checks)


def _rows(work: Work, journal: Journal) -> Iterator[Row]:
    for contestant in work.contestants:
        for way in WAYS:
            runs = journal.find(kind="run", work=work.name, contestant=contestant, way=way)
            done = tuple(run for run in runs if run["status"] == "done")
            reasons = [run["reason"] for run in runs if run["status"] != "done"]
            if runs:
                yield Row(contestant, way, done, reasons[0] if reasons else "")
