"""`python -m benchmarks`: run the works and report.

Runs that are in the journal are not repeated: the same command resumes a suite that was stopped. Figures of the chosen
works with another size or other code of ckpt-tools are dropped first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import inference, machine, report, startup
from benchmarks.inputs import FolderError, claim
from benchmarks.journal import Journal
from benchmarks.suite import WAYS, OutOfTimeError, Runner, Settings, measure_memory, say
from benchmarks.works import WORKS
from ckpt_tools.guard import guarded
from ckpt_tools.signals import exit_code_of, stopping_on_signals

HERE = Path(__file__).parent
RESULTS, DATA = HERE / "results", machine.ROOT / ".cache" / "benchmarks"
MEMORY, START_UP, INFERENCE = "memory", startup.KIND, inference.KIND
STOPPED = "Stopped; the same command resumes."
NAMES = (*(work.name for work in WORKS), MEMORY, START_UP, INFERENCE)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--works", type=_some_of(NAMES), default=NAMES, help=f"works: {', '.join(NAMES)}; default: all")
    made.add_argument("--size", type=float, default=4.5, metavar="GB", help="size of every input")
    made.add_argument("--runs", type=int, default=5, help="runs of each contestant in each way")
    made.add_argument("--ways", type=_some_of(WAYS), default=WAYS, help=f"ways: {', '.join(WAYS)}; default: all")
    made.add_argument("--time-limit", type=float, default=600, metavar="SECONDS", help="time limit of one run")
    made.add_argument("--budget-minutes", type=float, default=float("inf"), help="start no run after so long")
    made.add_argument("--memory-sizes", type=_numbers, default=(1.0, 4.0, 16.0), metavar="GB,GB", help="for memory")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder of the journal, the table and the picture")
    made.add_argument("--data", type=Path, default=DATA, help="folder of inputs and outputs")
    made.add_argument("--fresh", action="store_true", help="drop the figures of these works first")
    made.add_argument("--report", action="store_true", help="write the report without measuring")
    return made


def _some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return names

    return parse


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def main(words: Sequence[str] | None = None) -> None:
    asked = parser().parse_args(words)
    journal = Journal(asked.results / "results.jsonl")
    settings = Settings(
        size_bytes=int(asked.size * 1e9),
        runs=asked.runs,
        time_limit=asked.time_limit,
        data=asked.data.resolve(),
        deadline=time.monotonic() + 60 * asked.budget_minutes,
        ways=asked.ways,
    )
    try:
        if not asked.report:
            _measure(asked, settings, journal)
    finally:
        documents = (report.README, report.PAGE) if asked.results.resolve() == RESULTS else ()
        report.write(journal, asked.results, *documents)
        say(f"{asked.results / 'table.md'}")


def _measure(asked: argparse.Namespace, settings: Settings, journal: Journal) -> None:
    try:
        claim(settings.data)
    except FolderError as error:
        raise SystemExit(f"Error: {error}") from None
    for name in asked.works if asked.fresh else ():
        field = "kind" if name in (MEMORY, START_UP, INFERENCE) else "work"
        journal.forget(keep={"kind": None}, **{field: name})
    facts = {"kind": "machine", **machine.described(settings.data)}
    if not journal.find(**facts):
        journal.add(facts)
    try:
        for work in WORKS:
            if work.name in asked.works:
                Runner(work, settings, journal).run()
        if MEMORY in asked.works:
            measure_memory(asked.memory_sizes, settings, journal)
        if START_UP in asked.works:
            startup.measure_into(journal, settings.runs)
        if INFERENCE in asked.works:
            inference.measure(settings, journal)
    except OutOfTimeError:
        say(STOPPED)


if __name__ == "__main__":
    try:
        with stopping_on_signals(), guarded() as marking, marking():
            main()
    except KeyboardInterrupt as error:
        say(STOPPED)
        sys.exit(exit_code_of(error))
