"""The tables, the picture, and two documents' sections, from the journal alone: `python -m benchmarks --report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import figures
from benchmarks.figures import Result, Row, verdict
from benchmarks.journal import Journal
from benchmarks.machine import ROOT, code
from benchmarks.parts import KIND, PARTS
from benchmarks.picture import draw
from benchmarks.suite import COLD, FSYNC
from benchmarks.turns import markdown
from benchmarks.works import COPY, OURS, WORKS

README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
README_SECTION, PAGE_SECTION = "speed", "benchmarks"
"""Names in the markers around a section."""

README_WORKS = ("dcp-safetensors", "dcp-torch", "dcp-zero3", "zero3-safetensors", "zero3-universal", "dcp8-dcp3")
"""Works in README's table: each direction, and one without a peer."""

MAX_MEMORY_BYTES = 256_000_000


def write(journal: Journal, folder: Path, readme: Path | None = None, page: Path | None = None) -> None:
    """`table.md` and `picture.svg` in the folder, and the sections of the two documents."""
    found = list(figures.results(journal))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text("\n".join(_full_table(journal, found)) + "\n")
    if few := [result for result in found if result.work.name in README_WORKS]:
        (folder / "picture.svg").write_text(draw(few))
    if readme:
        header = "conversion | output | ours | `cp -r` of the output | fastest other tool | memory: ours, theirs"
        refresh(readme, README_SECTION, "\n".join(markdown(header, map(_few_cells, few), texts=(0, 4))))
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


def _few_cells(result: Result) -> Iterator[str]:
    ours, theirs = result.row(OURS), result.peer
    yield result.work.about
    yield f"{result.about['copied_bytes'] / 1e9:.2f} GB"
    yield _seconds(ours)
    yield _seconds(result.row(COPY))
    yield f"{result.work.peer}: {_seconds(theirs)}" if theirs else _no_peer(result)
    yield ", ".join(_megabytes(row) for row in (ours, theirs) if row)


def _section(journal: Journal, found: Sequence[Result], *, is_whole: bool = False) -> Iterator[str]:
    """The page's section; if ``is_whole``, with the note on the method of ``table.md``."""
    yield from _machine(journal)
    if is_whole:
        yield "\n[How it was measured](../../docs/benchmarks.md#how-it-was-measured)."
    yield ""
    header = "work | reads, writes | ours | `cp -r` | ours / cp | fsync | cold | best peer | times faster | memory"
    yield from markdown(header, map(_summary_cells, found), texts=(0, 1, 7))
    codes = _codes(journal)
    if earlier := [result.work.about for result in found if result.about["code"] != codes[-1]]:
        yield f"\nMeasured with an earlier version of ckpt-tools than the others: {'; '.join(earlier)}."
    yield ""
    yield from _promises(found)
    for part in PARTS:
        for record in journal.find(kind=KIND, part=part.name):
            yield from ("", f"## {part.heading}", "", *record["lines"])


def _full_table(journal: Journal, found: Sequence[Result]) -> Iterator[str]:
    yield "# Benchmarks\n"
    yield from _section(journal, found, is_whole=True)
    for result in found:
        yield from _details(result)
    for work in WORKS:
        attempts = journal.find(kind="work", work=work.name)
        if attempts and attempts[-1]["status"] != "done":
            yield f"\n## {work.about}\n\nNot measured: {attempts[-1]['reason']}"


def _machine(journal: Journal) -> Iterator[str]:
    if machines := journal.find(kind="machine"):
        facts = {key: value for key, value in machines[-1].items() if key != "kind"}
        yield "Measured on: " + ", ".join(f"{name} {value}" for name, value in facts.items()) + "."
    if (measured := _codes(journal)) and code() not in measured:
        digests = ", ".join(measured)
        yield f"\nMeasured with other versions of ckpt-tools than this one; digests of their code: {digests}."


def _codes(journal: Journal) -> list[str]:
    """Digests of the code that was measured, that of the last record at the end."""
    latest_first = dict.fromkeys(record["code"] for record in reversed(journal.records) if "code" in record)
    return list(latest_first)[::-1]


def _summary_cells(result: Result) -> Iterator[str]:
    ours, theirs = result.row(OURS), result.peer
    yield result.work.about
    read = f"{ours.median('called_read_bytes') / 1e9:.2f}" if ours else "?"
    yield f"{read}, {result.about['copied_bytes'] / 1e9:.2f} GB"
    yield _seconds(ours)
    yield _seconds(result.row(COPY))
    yield _times(result.ratio(OURS, COPY))
    yield _times(result.ratio(OURS, COPY, FSYNC))
    yield _times(result.ratio(OURS, COPY, COLD))
    yield f"{result.work.peer}, {_seconds(theirs)}" if theirs else _no_peer(result)
    yield _times(result.times_faster, 1)
    yield _megabytes(ours) + (f" / {_megabytes(theirs)}" if theirs else "")


def _no_peer(result: Result) -> str:
    why = result.failures.get(result.work.peer)
    return f"{result.work.peer}: {why}" if why else "none"


def _seconds(row: Row | None) -> str:
    return f"{row.seconds:.2f} s" if row else "–"


def _times(ratio: float | None, digits: int = 2) -> str:
    return f"{ratio:.{digits}f}" if ratio is not None else "–"


def _megabytes(row: Row | None) -> str:
    return f"{row.peak_bytes / 1e6:,.0f} MB" if row else "–"


def _promises(found: Sequence[Result]) -> Iterator[str]:
    yield "Promises, kept or missed:\n"
    for result in found:
        for promise in result.promises():
            yield f"- {result.work.about}: {promise}"
    checks = [(result, name, check) for result in found for name, check in result.checks.items()]
    wrong = [f"{name} in {result.work.about}" for result, name, check in checks if check["status"] != "equal"]
    text = f"{len(checks) - len(wrong)} of {len(checks)} outputs measured are bit for bit equal to their sources"
    yield f"- {verdict(not wrong)}: {text}" + "".join(f"; not {line}" for line in wrong)
    ours = [row for result in found for row in result.rows if row.contestant == OURS and row.runs]
    if peak := max((row.peak_bytes for row in ours), default=0):
        yield f"- {verdict(peak <= MAX_MEMORY_BYTES)}: {peak / 1e6:.0f} MB at the peak of any work (at most 256)"


def _details(result: Result) -> Iterator[str]:
    about = result.about
    source, copied = (f"{about[name] / 1e9:.2f} GB" for name in ("source_bytes", "copied_bytes"))
    yield f"\n## {result.work.about}\n"
    yield f"Source {source}; `cp -r` copies {copied} in {about['copied_files']:,} files.\n"
    header = "who | way | median | min | runs | / cp | / plain | CPU | memory | calls read, wrote"
    header += " | disk read | equal"
    yield from markdown(header, (_detail_cells(result, row) for row in result.rows), texts=(0, 1, 11))


def _detail_cells(result: Result, row: Row) -> Iterator[str]:
    yield row.contestant
    yield row.way
    if not row.runs:
        yield from (row.reason, *("",) * 9)
        return
    yield f"{row.seconds:.2f} s"
    yield f"{min(run['seconds'] for run in row.runs):.2f} s"
    yield str(len(row.runs))
    for other in (COPY, result.work.plain):
        yield _times(result.ratio(row.contestant, other, row.way))
    yield f"{row.median('cpu_seconds'):.2f} s"
    yield _megabytes(row)
    yield f"{row.median('called_read_bytes') / 1e9:.2f}, {row.median('called_write_bytes') / 1e9:.2f} GB"
    yield f"{row.median('disk_read_bytes') / 1e9:.2f} GB"
    check = result.checks.get(row.contestant)
    yield "not checked" if check is None else check["reason"] or check["status"]
