"""What the journal says of a work: medians, ratios, and whether what was promised was kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import peers
from benchmarks.journal import Journal, Record
from benchmarks.works import COPY, LARGE_BYTES, OURS, UNCAST, WORKS, Target, Work


@dataclass(frozen=True, slots=True)
class Row:
    """All runs of one contestant in one way; `reason` says why it failed, if it did."""

    contestant: str
    cache: str
    synced: bool
    runs: tuple[Record, ...]
    reason: str = ""

    def median(self, field: str) -> float:
        return float(median(run[field] for run in self.runs))

    @property
    def seconds(self) -> float:
        return self.median("seconds")

    @property
    def fastest(self) -> float:
        return float(min(run["seconds"] for run in self.runs))

    @property
    def peak_bytes(self) -> int:
        return int(max(run["peak_bytes"] for run in self.runs))


@dataclass(frozen=True, slots=True)
class Promise:
    """A target, what was measured, and whether it is about a checkpoint of this size."""

    text: str
    kept: bool
    applies: bool

    def __str__(self) -> str:
        said = "kept" if self.kept else "**missed**"
        return f"{said}: {self.text}" if self.applies else f"{self.text} (promised for 4 GB)"


@dataclass(frozen=True, slots=True)
class Result:
    """Everything measured of one work, of one size."""

    work: Work
    about: Record
    rows: tuple[Row, ...]
    checks: dict[str, Record]

    def row(self, contestant: str, cache: str = "warm", *, synced: bool = False) -> Row | None:
        """The runs that were done, if any were."""
        for row in self.rows:
            if (row.contestant, row.cache, row.synced) == (contestant, cache, synced) and row.runs:
                return row
        return None

    def ratio(
        self, one: str, other: str, cache: str = "warm", *, synced: bool = False, other_synced: bool | None = None
    ) -> float | None:
        """Median seconds of one over those of the other."""
        first = self.row(one, cache, synced=synced)
        second = self.row(other, cache, synced=synced if other_synced is None else other_synced)
        return first.seconds / second.seconds if first and second else None

    def times_faster(self, peer: str, cache: str = "warm") -> float | None:
        """The peer's time over ours; over ours with fsync where the peer syncs too."""
        return self.ratio(peer, OURS, cache, other_synced=peer in peers.SYNCING and cache == "warm")

    @property
    def best_peer(self) -> str | None:
        """The fastest that completes."""
        done = [row for peer in self.work.rivals if (row := self.row(peer))]
        return min(done, key=lambda row: row.seconds).contestant if done else None

    @property
    def failures(self) -> dict[str, str]:
        """Why, by contestant."""
        return {row.contestant: row.reason for row in self.rows if row.reason}

    def promises(self) -> Iterator[Promise]:
        """Those of the work's target that can be judged, in the order of its fields."""
        target = self.work.target
        copies = self.about["copied_bytes"] >= LARGE_BYTES
        large = self.about["source_bytes"] >= LARGE_BYTES
        yield from _at_most(self.ratio(OURS, COPY), target.copy, "x cp -r, from memory", copies)
        yield from _at_most(self.ratio(OURS, COPY, "cold"), target.copy, "x cp -r, from the disk", copies)
        yield from _at_most(self.ratio(OURS, COPY, synced=True), target.copy_synced, "x cp -r, both with fsync", copies)
        yield from _at_most(self.ratio(OURS, UNCAST), target.uncast, "x without the cast", large)
        yield from self._peer_promise(target, large)

    def _peer_promise(self, target: Target, large: bool) -> Iterator[Promise]:
        if target.peer is None or self.best_peer is None:
            return
        if times := self.times_faster(self.best_peer):
            text = f"{times:.1f} times as fast as {self.best_peer} (at least {target.peer:g})"
            yield Promise(text, times >= target.peer, large)


def _at_most(ratio: float | None, limit: float | None, unit: str, applies: bool) -> Iterator[Promise]:
    if ratio is not None and limit is not None:
        yield Promise(f"{ratio:.2f}{unit} (at most {limit:g})", ratio <= limit, applies)


def results(journal: Journal, works: Sequence[Work] = WORKS) -> Iterator[Result]:
    """Of every work that was measured, in the order of the list of works."""
    for work in works:
        abouts = journal.find(kind="work", work=work.name, status="done")
        if abouts:
            checks = {record["contestant"]: record for record in journal.find(kind="check", work=work.name)}
            yield Result(work, abouts[-1], tuple(_rows(work, journal)), checks)


def _rows(work: Work, journal: Journal) -> Iterator[Row]:
    for contestant in work.contestants:
        for cache, synced in (("warm", False), ("cold", False), ("warm", True)):
            runs = journal.find(kind="run", work=work.name, contestant=contestant, cache=cache, synced=synced)
            done = tuple(run for run in runs if run["status"] == "done")
            reasons = [run["reason"] for run in runs if run["status"] != "done"]
            if runs:
                yield Row(contestant, cache, synced, done, reasons[0] if reasons else "")


def undone(journal: Journal) -> Iterator[tuple[Work, str]]:
    """Works that could not be run at all, and why."""
    for work in WORKS:
        found = journal.find(kind="work", work=work.name)
        if found and found[-1]["status"] != "done":
            yield work, found[-1]["reason"]
