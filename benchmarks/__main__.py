"""`python -m benchmarks`: measure conversions (works) and parts, and report.

What is in the journal is not measured again: the same command resumes a suite that was stopped. Figures of the chosen
works with another size or other code of ckpt-tools are replaced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.conversions import WORKS
from benchmarks.inputs import claim_data_folder
from benchmarks.measure import ROOT, MeasureError
from benchmarks.runner import PARTS, WAYS, Benchmark, BenchmarkJournal, RunSettings, measure_benchmarks, say
from ckpt_tools.process.guard import guard_processes
from ckpt_tools.process.signals import get_exit_code, raise_on_signals

RESULTS, DATA = Path(__file__).parent / "results", ROOT / ".cache" / "benchmarks"
CONVERSIONS = [Benchmark(work.name, "conversions:measure_conversion", work.about, 4.5) for work in WORKS.values()]
BENCHMARKS = {benchmark.name: benchmark for benchmark in (*CONVERSIONS, *PARTS)}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, names = parser.add_argument, ", ".join(BENCHMARKS)
    add("--works", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, metavar="NAME", help=f"{names}; default: all")
    add("--size", type=float, metavar="GB", help="size of every input; default: 4.5 for conversions")
    add("--runs", type=int, default=5, help="runs of each contestant in each way")
    add("--ways", nargs="+", choices=WAYS, default=WAYS, help="of conversions; default: all")
    add("--time-limit", type=float, default=900, metavar="SECONDS", help="time limit of one run")
    add("--results", type=Path, default=RESULTS, help="folder of the journal, the table and the picture")
    add("--data", type=Path, default=DATA, help="folder of inputs and outputs")
    add("--fresh", action="store_true", help="measure these works again")
    add("--report", action="store_true", help="write the report without measuring")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(words)
    journal = BenchmarkJournal(options.results / "results.jsonl")
    try:
        if not options.report:
            size_bytes = int(options.size * 1e9) if options.size else None
            data = options.data.resolve()
            settings = RunSettings(size_bytes or 0, options.runs, options.time_limit, data, options.ways)
            claim_data_folder(data)
            chosen = [benchmark for name, benchmark in BENCHMARKS.items() if name in options.works]
            measure_benchmarks(chosen, settings, size_bytes, journal, fresh=options.fresh)
    except MeasureError as error:
        raise SystemExit(f"Error: {error}") from None
    finally:
        documents = (report.README, report.PAGE) if options.results.resolve() == RESULTS else ()
        report.write_report(journal, options.results, *documents)
        say(f"{options.results / 'table.md'}")


if __name__ == "__main__":
    try:
        with raise_on_signals(), guard_processes() as marking, marking():
            main()
    except KeyboardInterrupt as error:
        say("Stopped; the same command resumes.")
        sys.exit(get_exit_code(error))
