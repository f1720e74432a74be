"""`python -m benchmarks`: measure conversions (works) and parts, and report.

Runs that are in the journal are not repeated: the same command resumes a suite that was stopped. Figures of the chosen
works and parts with another size or other code of ckpt-tools are dropped first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine, parts, report
from benchmarks.inputs import claim
from benchmarks.journal import Journal
from benchmarks.measure import MeasureError
from benchmarks.suite import WAYS, Runner, Settings, say
from benchmarks.works import WORKS
from ckpt_tools.process.guard import guard_processes
from ckpt_tools.process.signals import get_exit_code, raise_on_signals

RESULTS, DATA = Path(__file__).parent / "results", machine.ROOT / ".cache" / "benchmarks"
NAMES = (*(work.name for work in WORKS), *(part.name for part in parts.PARTS))
GIGABYTES_OF_WORKS = 4.5


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(NAMES)
    made.add_argument("--works", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"{known}; default: all")
    made.add_argument("--size", type=float, metavar="GB", help="size of every input; default: 4.5 for conversions")
    made.add_argument("--runs", type=int, default=5, help="runs of each contestant in each way")
    made.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="of conversions; default: all")
    made.add_argument("--time-limit", type=float, default=900, metavar="SECONDS", help="time limit of one run")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder of the journal, the table and the picture")
    made.add_argument("--data", type=Path, default=DATA, help="folder of inputs and outputs")
    made.add_argument("--fresh", action="store_true", help="drop the figures of these works first")
    made.add_argument("--report", action="store_true", help="write the report without measuring")
    return made


def main(words: Sequence[str] | None = None) -> None:
    asked = parser().parse_args(words)
    journal = Journal(asked.results / "results.jsonl")
    try:
        if not asked.report:
            _measure(asked, journal)
    except MeasureError as error:
        raise SystemExit(f"Error: {error}") from None
    finally:
        documents = (report.README, report.PAGE) if asked.results.resolve() == RESULTS else ()
        report.write(journal, asked.results, *documents)
        say(f"{asked.results / 'table.md'}")


def _measure(asked: argparse.Namespace, journal: Journal) -> None:
    size_bytes = int((asked.size or GIGABYTES_OF_WORKS) * 1e9)
    settings = Settings(size_bytes, asked.runs, asked.time_limit, asked.data.resolve(), tuple(asked.ways))
    claim(settings.data)
    for name in asked.works if asked.fresh else ():
        for field in ("work", "part"):
            journal.forget(keep={"kind": None}, **{field: name})
    facts = {"kind": "machine", **machine.described(settings.data)}
    if not journal.find(**facts):
        journal.add(facts)
    for work in WORKS:
        if work.name in asked.works:
            Runner(work, settings, journal).run()
    parts.measure_parts(asked.works, settings, size_bytes if asked.size else None, journal)


if __name__ == "__main__":
    try:
        with raise_on_signals(), guard_processes() as marking, marking():
            main()
    except KeyboardInterrupt as error:
        say("Stopped; the same command resumes.")
        sys.exit(get_exit_code(error))
