"""The tables, the picture, and two documents' sections, from the journal alone: `python -m benchmarks --report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.conversions import COPY, OURS, WORKS, Work
from benchmarks.measure import ROOT
from benchmarks.runner import DURABLE, LOADED, MACHINE, PARTS, WARM, BenchmarkJournal, Record, digest_code
from benchmarks.turns import format_verdict, make_table
from tests.support.svg import COLOURS, LINE, MARGIN, WIDTH, Picture

README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
README_SECTION, PAGE_SECTION = "speed", "benchmarks"
"""Names in the markers around a section."""

README_WORKS = ("dcp-safetensors", "dcp-torch", "dcp-zero3", "zero3-safetensors", "zero3-universal", "dcp8-dcp3")
"""Works in README's table: each direction, and one without a peer."""

LARGE_BYTES = 4_000_000_000
"""Promises are about checkpoints of at least this size; start-up dominates smaller ones."""

MAX_MEMORY_BYTES = 256_000_000

OURS_COLOUR, PEER_COLOUR = COLOURS[2], COLOURS[1]
BAR = 10
"""Height of a bar in pixels."""


@dataclass(frozen=True, slots=True)
class ContestantRuns:
    """All runs of one contestant in one way."""

    contestant: str
    way: str
    runs: Sequence[Record]

    def get_median(self, field: str) -> float:
        return float(median(run[field] for run in self.runs))

    @property
    def seconds(self) -> float:
        return self.get_median("seconds")

    @property
    def peak_bytes(self) -> int:
        return int(max(run["peak_bytes"] for run in self.runs))


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """A conversion and its record in the journal."""

    work: Work
    record: Record

    def runs_of(self, contestant: str, way: str = WARM) -> ContestantRuns | None:
        """The runs that were done, if any were."""
        runs = [run for run in self.record["runs"] if (run["contestant"], run["way"]) == (contestant, way)]
        return ContestantRuns(contestant, way, runs) if runs else None

    def all_runs(self) -> list[ContestantRuns]:
        return [runs for slot in self.work.list_slots() if (runs := self.runs_of(*slot))]

    def compute_ratio(self, one: str, other: str, way: str = WARM) -> float | None:
        """Median seconds of one over those of the other."""
        first, second = (self.runs_of(each, way) for each in (one, other))
        return first.seconds / second.seconds if first and second else None

    @property
    def times_faster(self) -> float | None:
        """The peer's time over ours, in the peer's way."""
        theirs, ours = self.peer, self.runs_of(OURS, self.work.way_of_peer)
        return theirs.seconds / ours.seconds if theirs and ours else None

    @property
    def peer(self) -> ContestantRuns | None:
        """The runs of the peer, if it completes."""
        return self.runs_of(self.work.peer, self.work.way_of_peer)

    def list_ratios_to_copy(self, way: str, field: str = "seconds") -> list[float]:
        """Ours over that of ``cp -r``, of each round."""
        ours, copies = (self.runs_of(each, way) for each in (OURS, COPY))
        if not ours or not copies:
            return []
        return [one[field] / other[field] for one, other in zip(ours.runs, copies.runs, strict=False)]

    def list_promises(self) -> Iterator[str]:
        """The promises of the work's target that were measured."""
        target, plain = self.work.target, self.work.plain
        durable, loaded = (self.list_ratios_to_copy(way) for way in (DURABLE, LOADED))
        cpu = self.list_ratios_to_copy(DURABLE, "cpu_seconds")
        ratios = (
            ("copy", self.compute_ratio(OURS, COPY), "x cp -r, from memory", "copied_bytes"),
            (
                "durable",
                max(durable, default=None),
                "x cp -r, from the disk onto it, in the worst round",
                "copied_bytes",
            ),
            ("durable_cpu", median(cpu) if cpu else None, "x processor time of cp -r, so", "copied_bytes"),
            ("loaded", max(loaded, default=None), "x cp -r, so, beside two busy processes", "copied_bytes"),
            ("plain", self.compute_ratio(OURS, plain), f"x {plain.removeprefix(OURS).strip()}", "source_bytes"),
        )
        for field, ratio, unit, size in ratios:
            if ratio is not None and field in target:
                text = f"{ratio:.2f}{unit} (at most {target[field]:g})"
                yield self._format_promise(text, ratio <= target[field], size)
        if "peer" in target and (times := self.times_faster):
            text = f"{times:.1f} times as fast as {self.work.peer} (at least {target['peer']:g})"
            yield self._format_promise(text, times >= target["peer"], "source_bytes")

    def _format_promise(self, text: str, kept: bool, size: str) -> str:
        is_large = self.record[size] >= LARGE_BYTES
        return f"{format_verdict(kept)}: {text}" if is_large else f"{text} (promised for 4 GB)"


def get_measured_works(journal: BenchmarkJournal) -> list[MeasuredWork]:
    """Every work that was measured, in the order of ``works.toml``."""
    return [MeasuredWork(work, journal.records[name]) for name, work in WORKS.items() if name in journal.records]


def write_report(journal: BenchmarkJournal, folder: Path, readme: Path | None = None, page: Path | None = None) -> None:
    """`table.md` and `picture.svg` in the folder, and the sections of the two documents."""
    works = get_measured_works(journal)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text("\n".join(_full_table(journal, works)) + "\n")
    if few := [measured for measured in works if measured.work.name in README_WORKS]:
        (folder / "picture.svg").write_text(draw_picture(few))
    if readme:
        header = (
            "conversion | output | ours | `cp -r` of the output | durable: ours, `cp -r` | fastest other tool "
            "| memory: ours, theirs"
        )
        replace_section(readme, README_SECTION, "\n".join(make_table(header, map(_readme_cells, few), texts=(0, 5))))
    if page:
        replace_section(page, PAGE_SECTION, "\n".join(_list_section_lines(journal, works)))


def replace_section(document: Path, name: str, section: str) -> None:
    """Put the section between the markers of that name."""
    start, end = get_markers(name)
    before, _, rest = document.read_text().partition(start)
    _, _, after = rest.partition(end)
    document.write_text(f"{before}{start}\n{section}\n{end}{after}")


def get_markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:start -->", f"<!-- {name}:end -->"


def _readme_cells(measured: MeasuredWork) -> Iterator[str]:
    ours, theirs = measured.runs_of(OURS), measured.peer
    yield measured.work.about
    yield _format_gigabytes(measured.record["copied_bytes"])
    yield _format_seconds(ours)
    yield _format_seconds(measured.runs_of(COPY))
    yield _format_durable(measured)
    yield f"{measured.work.peer}: {_format_seconds(theirs)}" if theirs else _no_peer(measured)
    yield ", ".join(_format_megabytes(runs) for runs in (ours, theirs) if runs)


def _list_section_lines(
    journal: BenchmarkJournal, works: Sequence[MeasuredWork], *, is_whole: bool = False
) -> Iterator[str]:
    """The page's section; if ``is_whole``, that of ``table.md`` with the note on the method and the promises kept."""
    if machine := journal.records.get(MACHINE):
        facts = (f"{name} {value}" for name, value in machine.items() if name != "name")
        yield f"Machine of the rows measured last: {', '.join(facts)}."
    versions = list(dict.fromkeys(record["code"] for record in journal.records.values() if "code" in record))
    if is_whole and versions and digest_code() not in versions:
        digests = ", ".join(versions)
        yield f"\nMeasured with other versions of ckpt-tools than this one; digests of their code: {digests}."
    if is_whole:
        yield "\n[How it was measured](../../docs/benchmarks.md#how-it-was-measured)."
    yield ""
    header = (
        "work | reads, writes | ours | `cp -r` | ours / cp | durable: ours, `cp -r` | ratios by round | best peer "
        "| times faster | memory"
    )
    yield from make_table(header, map(_summary_cells, works), texts=(0, 1, 7))
    earlier = [measured.work.about for measured in works if measured.record["code"] != versions[-1]]
    if earlier and is_whole:
        what = "with an earlier version of ckpt-tools, and perhaps on another machine"
        yield f"\nMeasured before, {what}: {'; '.join(earlier)}."
    yield ""
    yield from _list_promises(works, is_whole=is_whole)
    for part in PARTS if is_whole else ():
        if record := journal.records.get(part.name):
            yield from ("", f"## {part.heading}", "", *record["lines"])


def _full_table(journal: BenchmarkJournal, works: Sequence[MeasuredWork]) -> Iterator[str]:
    yield "# Benchmarks\n"
    yield from _list_section_lines(journal, works, is_whole=True)
    header = "who | way | median | min | runs | / cp | / plain | CPU | memory | calls read, wrote | disk read | equal"
    for measured in works:
        record = measured.record
        yield f"\n## {measured.work.about}\n"
        copied = f"{_format_gigabytes(record['copied_bytes'])} in {record['copied_files']:,} files"
        yield f"Source {_format_gigabytes(record['source_bytes'])}; `cp -r` copies {copied}.\n"
        yield from make_table(header, (_run_cells(measured, runs) for runs in measured.all_runs()), texts=(0, 1, 11))
        yield from (f"\n{contestant} failed: {reason}" for contestant, reason in record["failures"].items())


def _summary_cells(measured: MeasuredWork) -> Iterator[str]:
    ours, theirs = measured.runs_of(OURS), measured.peer
    yield measured.work.about
    read = f"{ours.get_median('called_read_bytes') / 1e9:.2f}" if ours else "?"
    yield f"{read}, {_format_gigabytes(measured.record['copied_bytes'])}"
    yield _format_seconds(ours)
    yield _format_seconds(measured.runs_of(COPY))
    yield _format_ratio(measured.compute_ratio(OURS, COPY, WARM))
    yield _format_durable(measured)
    ratios = measured.list_ratios_to_copy(DURABLE)
    yield f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "–"
    yield f"{measured.work.peer}, {_format_seconds(theirs)}" if theirs else _no_peer(measured)
    yield _format_ratio(measured.times_faster, 1)
    yield _format_megabytes(ours) + (f" / {_format_megabytes(theirs)}" if theirs else "")


def _run_cells(measured: MeasuredWork, runs: ContestantRuns) -> Iterator[str]:
    yield runs.contestant
    yield runs.way
    yield _format_seconds(runs)
    yield f"{min(run['seconds'] for run in runs.runs):.2f} s"
    yield str(len(runs.runs))
    for other in (COPY, measured.work.plain):
        yield _format_ratio(measured.compute_ratio(runs.contestant, other, runs.way))
    yield f"{runs.get_median('cpu_seconds'):.2f} s"
    yield _format_megabytes(runs)
    read, written = (runs.get_median(f"called_{way}_bytes") for way in ("read", "write"))
    yield f"{read / 1e9:.2f}, {_format_gigabytes(written)}"
    yield _format_gigabytes(runs.get_median("disk_read_bytes"))
    yield measured.record["checks"].get(runs.contestant, "not checked") or "equal"


def _format_durable(measured: MeasuredWork) -> str:
    return ", ".join(_format_seconds(measured.runs_of(each, DURABLE)) for each in (OURS, COPY))


def _no_peer(measured: MeasuredWork) -> str:
    why = measured.record["failures"].get(measured.work.peer)
    return f"{measured.work.peer}: {why}" if why else "none"


def _format_seconds(runs: ContestantRuns | None) -> str:
    return f"{runs.seconds:.2f} s" if runs else "–"


def _format_ratio(ratio: float | None, digits: int = 2) -> str:
    return f"{ratio:.{digits}f}" if ratio is not None else "–"


def _format_megabytes(runs: ContestantRuns | None) -> str:
    return f"{runs.peak_bytes / 1e6:,.0f} MB" if runs else "–"


def _format_gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _list_promises(works: Sequence[MeasuredWork], *, is_whole: bool) -> Iterator[str]:
    yield "Promises, kept or missed:\n" if is_whole else "Promises that were missed, and those for all works:\n"
    for measured in works:
        for promise in measured.list_promises():
            if is_whole or not promise.startswith(format_verdict(True)):
                yield f"- {measured.work.about}: {promise}"
    checks = [(measured, *check) for measured in works for check in measured.record["checks"].items()]
    wrong = [f"{name} in {measured.work.about}" for measured, name, reason in checks if reason]
    text = f"{len(checks) - len(wrong)} of {len(checks)} outputs measured are bit for bit equal to their sources"
    yield f"- {format_verdict(not wrong)}: {text}" + "".join(f"; not {line}" for line in wrong)
    ours = [runs for measured in works for runs in measured.all_runs() if runs.contestant == OURS]
    if peak := max((runs.peak_bytes for runs in ours), default=0):
        yield f"- {format_verdict(peak <= MAX_MEMORY_BYTES)}: {peak / 1e6:.0f} MB at the peak of any work (at most 256)"


def draw_picture(works: Sequence[MeasuredWork]) -> str:
    """An SVG with two bars for each work, ours and the peer's, on a linear axis from zero."""
    bars = [list(_list_bars(measured)) for measured in works]
    longest = max(seconds for each in bars for _, seconds, _ in each)
    scale = (WIDTH - 3 * MARGIN) / longest
    picture = Picture("Seconds of conversions with ckpt-tools and with the fastest other tool")
    for measured, each in zip(works, bars, strict=True):
        picture.words(measured.work.about, strong=True)
        for label, seconds, colour in each:
            picture.words(label)
            picture.box(MARGIN, picture.y, seconds * scale, BAR, colour)
            picture.y += BAR + 2
        picture.y += LINE / 2
    picture.line((MARGIN, picture.y), (WIDTH - MARGIN, picture.y))
    # At most five ticks.
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if longest < 5 * step)
    for tick in range(0, int(longest) + 1, step):
        x = MARGIN + tick * scale
        picture.line((x, picture.y), (x, picture.y + 5))
        picture.text(f"{tick} s" if tick else "0", x, picture.y + LINE, anchor="middle")
    picture.y += 1.5 * LINE
    return str(picture)


def _list_bars(measured: MeasuredWork) -> Iterator[tuple[str, float, str]]:
    """Label, seconds and colour of ours and of the peer."""
    ours, theirs, peer = measured.runs_of(OURS), measured.peer, measured.work.peer
    if ours:
        yield f"{OURS}: {ours.seconds:.1f} s", ours.seconds, OURS_COLOUR
    if theirs:
        yield f"{peer}: {theirs.seconds:.1f} s", theirs.seconds, PEER_COLOUR
    else:
        yield f"{peer}: fails" if peer else "no other tool does this", 0, PEER_COLOUR
