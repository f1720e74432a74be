"""The tables, the picture, and two documents' sections, from the journal alone: `python -m benchmarks --report`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import figures, inference, startup
from benchmarks.figures import Result, Row
from benchmarks.journal import Journal, Record
from benchmarks.machine import ROOT, code
from benchmarks.works import COPY, OURS

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
README_SECTION, PAGE_SECTION = "speed", "benchmarks"
"""The names in the markers between which a section stands."""

README_WORKS = ("dcp-safetensors", "dcp-torch", "dcp-zero3", "zero3-safetensors", "zero3-universal", "dcp8-dcp3")
"""The works of README's few rows: each direction, and one without a rival."""

MAX_MEMORY_BYTES = 256_000_000


def write(journal: Journal, folder: Path, readme: Path | None = None, page: Path | None = None) -> None:
    """`table.md` and `picture.png` in the folder, and the sections of the two documents."""
    found = list(figures.results(journal))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text("\n".join(_full_table(journal, found)) + "\n")
    if found:
        from benchmarks.picture import draw

        draw(found, folder / "picture.png")
    if readme:
        refresh(readme, README_SECTION, "\n".join(_few_rows(found)))
    if page:
        refresh(page, PAGE_SECTION, "\n".join(_section(journal, found)))


def refresh(document: Path, name: str, section: str) -> None:
    """Put the section between the markers of that name."""
    start, end = markers(name)
    before, _, rest = document.read_text().partition(start)
    _, _, after = rest.partition(end)
    document.write_text(f"{before}{start}\n{section}\n{end}{after}")


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:start -->", f"<!-- {name}:end -->"


def _few_rows(found: Sequence[Result]) -> Iterator[str]:
    """README's table: time and memory of ours, of `cp -r` and of the best peer."""
    yield "| conversion | output | ours | `cp -r` of the output | fastest other tool | memory: ours, theirs |"
    yield "|---|--:|--:|--:|---|--:|"
    yield from (_row(_few_cells(result)) for result in found if result.work.name in README_WORKS)


def _few_cells(result: Result) -> Iterator[str]:
    ours, peer = result.row(OURS), result.best_peer
    theirs = result.row(peer) if peer else None
    yield result.work.about
    yield f"{result.about['copied_bytes'] / 1e9:.2f} GB"
    yield _seconds(ours)
    yield _seconds(result.row(COPY))
    yield f"{peer}: {_seconds(theirs)}" if peer else _no_peer(result)
    yield ", ".join(_megabytes(row) for row in (ours, theirs) if row)


def _section(journal: Journal, found: Sequence[Result]) -> Iterator[str]:
    yield from _machine(journal)
    yield ""
    yield from _summary(found)
    yield from _earlier(journal, found)
    yield ""
    yield from _promises(journal, found)
    yield from _start_up(journal)
    yield from _inference(journal)


def _full_table(journal: Journal, found: Sequence[Result]) -> Iterator[str]:
    yield "# Benchmarks"
    yield ""
    yield from _machine(journal)
    yield ""
    yield "[How it was measured](../../docs/benchmarks.md#how-it-was-measured)."
    yield ""
    yield from _summary(found)
    yield from _earlier(journal, found)
    yield ""
    yield from _promises(journal, found)
    yield ""
    yield from _costs(journal)
    yield from _start_up(journal)
    yield from _inference(journal)
    for result in found:
        yield from _details(result)
    for work, reason in figures.undone(journal):
        yield f"\n## {work.about}\n\nNot measured: {reason}"


def _start_up(journal: Journal) -> Iterator[str]:
    for record in journal.find(kind=startup.KIND):
        if "lines" in record:
            yield from ("", "## Start-up", "", *record["lines"])


def _inference(journal: Journal) -> Iterator[str]:
    if lines := inference.reported(journal):
        yield ""
        yield "## Inference"
        yield ""
        yield from lines


def _machine(journal: Journal) -> Iterator[str]:
    if machines := journal.find(kind="machine"):
        facts = {key: value for key, value in machines[-1].items() if key != "kind"}
        yield "Measured on: " + ", ".join(f"{name} {value}" for name, value in facts.items()) + "."
    if (measured := _codes(journal)) and code() not in measured:
        yield ""
        yield f"Measured with other versions of ckpt-tools than this one; digests of their code: {', '.join(measured)}."


def _summary(found: Sequence[Result]) -> Iterator[str]:
    """A row a work: ours against `cp -r` in three ways, and the best peer that completes."""
    yield "| work | reads, writes | ours | `cp -r` | ours / cp | fsync | cold | best peer | times faster | memory |"
    yield "|---|---|--:|--:|--:|--:|--:|---|--:|--:|"
    yield from (_row(_summary_cells(result)) for result in found)


def _earlier(journal: Journal, found: Sequence[Result]) -> Iterator[str]:
    """The rows that are not of the code that was measured last: nobody should take them for its figures."""
    codes = _codes(journal)
    if about := [result.work.about for result in found if result.about["code"] != codes[-1]]:
        yield ""
        yield f"Measured with an earlier version of ckpt-tools than the others: {'; '.join(about)}."


def _codes(journal: Journal) -> list[str]:
    """Digests of the code that was measured, that of the last record at the end."""
    latest_first = dict.fromkeys(record["code"] for record in reversed(journal.records) if "code" in record)
    return list(latest_first)[::-1]


def _summary_cells(result: Result) -> Iterator[str]:
    ours, peer = result.row(OURS), result.best_peer
    theirs = result.row(peer) if peer else None
    yield result.work.about
    yield _moved(result)
    yield _seconds(ours)
    yield _seconds(result.row(COPY))
    yield _times(result.ratio(OURS, COPY))
    yield _times(result.ratio(OURS, COPY, synced=True))
    yield _times(result.ratio(OURS, COPY, "cold"))
    yield f"{peer}, {_seconds(theirs)}" if peer else _no_peer(result)
    yield _times(result.times_faster(peer) if peer else None, 1)
    yield _megabytes(ours) + (f" / {_megabytes(theirs)}" if theirs else "")


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _moved(result: Result) -> str:
    """What ours takes in and gives out, by its calls and mapped files: the sizes of the tensors that are moved."""
    return f"{_called(result, 'called_read_bytes')}, {result.about['copied_bytes'] / 1e9:.2f} GB"


def _called(result: Result, field: str) -> str:
    ours = result.row(OURS)
    return f"{ours.median(field) / 1e9:.2f}" if ours else "?"


def _no_peer(result: Result) -> str:
    return "; ".join(f"{name}: {why}" for name, why in result.failures.items() if name in result.work.rivals) or "none"


def _seconds(row: Row | None) -> str:
    return f"{row.seconds:.2f} s" if row else "–"


def _times(ratio: float | None, digits: int = 2) -> str:
    return f"{ratio:.{digits}f}" if ratio is not None else "–"


def _megabytes(row: Row | None) -> str:
    return f"{row.peak_bytes / 1e6:,.0f} MB" if row else "–"


def _promises(journal: Journal, found: Sequence[Result]) -> Iterator[str]:
    """A line each, kept or missed; a work of several has several."""
    yield "Promised, and what came of it:"
    yield ""
    for result in found:
        for promise in result.promises():
            yield f"- {result.work.about}: {promise}"
    yield _equality(found)
    yield from _memory_promises(journal, found)


def _equality(found: Sequence[Result]) -> str:
    """Whether each contestant's output of each work held its source's tensors."""
    checks = [(result, name, check) for result in found for name, check in result.checks.items()]
    wrong = [f"{name} in {result.work.about}" for result, name, check in checks if check["status"] != "equal"]
    text = f"{len(checks) - len(wrong)} of {len(checks)} outputs measured are bit for bit equal to their sources"
    return f"- {_verdict(not wrong)}: {text}" + "".join(f"; not {line}" for line in wrong)


def _memory_promises(journal: Journal, found: Sequence[Result]) -> Iterator[str]:
    done = journal.find(kind="memory", status="done")
    ours = [row for result in found for row in result.rows if row.contestant == OURS and row.runs]
    if peak := max([row.peak_bytes for row in ours] + [record["peak_bytes"] for record in done], default=0):
        yield f"- {_verdict(peak <= MAX_MEMORY_BYTES)}: {peak / 1e6:.0f} MB at the peak of any work (at most 256)"
    if len(done) > 1:
        peaks = [record["peak_bytes"] for record in done]
        within = all(record["peak_bytes"] <= record["planned_bytes"] for record in done)
        spread = max(peaks) / min(peaks) - 1
        yield f"- {_verdict(spread <= 0.1)}: memory at {_sizes(done)} differs by {spread:.1%} (at most 10 %)"
        yield f"- {_verdict(within)}: memory is never above what `plan` said"


def _sizes(records: Sequence[Record]) -> str:
    return ", ".join(f"{record['size_bytes'] / 1e9:g}" for record in records) + " GB"


def _verdict(kept: bool) -> str:
    return "kept" if kept else "**missed**"


def _costs(journal: Journal) -> Iterator[str]:
    """Memory by size, of a DCP of zeros to safetensors."""
    yield "## Memory by size: DCP, 4 ranks → safetensors"
    yield ""
    yield "| checkpoint | peak | said by `plan` | seconds |"
    yield "|--:|--:|--:|--:|"
    for record in journal.find(kind="memory"):
        size = f"{record['size_bytes'] / 1e9:g} GB"
        if record["status"] == "done":
            peak, planned = (f"{record[key] / 1e6:.1f} MB" for key in ("peak_bytes", "planned_bytes"))
            yield f"| {size} | {peak} | {planned} | {record['seconds']:.2f} |"
        else:
            yield f"| {size} | {record['status']}: {record['reason']} | | |"


def _details(result: Result) -> Iterator[str]:
    about = result.about
    yield f"\n## {result.work.about}"
    yield ""
    yield (
        f"Source {about['source_bytes'] / 1e9:.2f} GB; `cp -r` copies {about['copied_bytes'] / 1e9:.2f} GB in "
        f"{about['copied_files']:,} files."
    )
    yield ""
    yield "| who | cache | fsync | median | min | runs | / cp | CPU | memory | calls read, wrote | disk read | equal |"
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|"
    yield from (_row(_detail_cells(result, row)) for row in result.rows)


def _detail_cells(result: Result, row: Row) -> Iterator[str]:
    yield row.contestant
    yield row.cache
    yield "yes" if row.synced else ""
    if not row.runs:
        yield from (row.reason, *("",) * 8)
        return
    yield f"{row.seconds:.2f} s"
    yield f"{row.fastest:.2f} s"
    yield str(len(row.runs))
    yield _times(result.ratio(row.contestant, COPY, row.cache, synced=row.synced))
    yield f"{row.median('cpu_seconds'):.2f} s"
    yield _megabytes(row)
    yield f"{row.median('called_read_bytes') / 1e9:.2f}, {row.median('called_write_bytes') / 1e9:.2f} GB"
    yield f"{row.median('disk_read_bytes') / 1e9:.2f} GB"
    check = result.checks.get(row.contestant)
    yield "not checked" if check is None else check["reason"] or check["status"]
