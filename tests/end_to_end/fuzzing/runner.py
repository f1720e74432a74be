"""Executions by the million, in as many processes as asked for.

An execution is known by one number, from which the seed, the changes and the result follow; a failure is written as a
checkpoint into a folder, and its number said. A process that hangs is seen by the timer of its own processor time, or
by the parent where even that is not heard.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from ckpt_tools.errors import CkptError
from tests.end_to_end.fuzzing import corpus
from tests.end_to_end.fuzzing.mutations import mutated
from tests.end_to_end.fuzzing.target import Outcome, execute, scan

HANG_SECONDS = 1.0
"""Of processor time, in one execution."""

DEAF_SECONDS = 120.0
"""Without any progress the parent ends a process: it is in a loop that hears no signal."""

MAX_RSS_BYTES = 256 << 20

MAX_ADDRESS_BYTES = 4 << 30
"""A process may ask for no more, so that a failure does not take the machine with it."""

BATCH = 500

SCANNED = 4
"""Each fourth input is scanned as well."""

MAX_SHOWN = 50
"""Failures told in full; more are counted."""


class Hang(BaseException):
    """An execution took longer than it may."""


@dataclass
class Tally:
    """What executions came to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    executions: int = 0
    slowest_seconds: float = 0.0
    peak_rss_bytes: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.outcomes += other.outcomes
        self.executions += other.executions
        self.slowest_seconds = max(self.slowest_seconds, other.slowest_seconds)
        self.peak_rss_bytes = max(self.peak_rss_bytes, other.peak_rss_bytes)
        self.failures += other.failures


def input_of(number: int, names: Sequence[str] = ()) -> dict[str, bytes]:
    """The checkpoint that execution ``number`` reads; made from the seeds of these names, or from all and crashers."""
    random = Random(number)
    pool = [corpus.seeds()[name] for name in names] or [*corpus.seeds().values(), *corpus.crashers().values()]
    return mutated(random.choice(pool), random)


def kind_of(outcome: Outcome) -> str:
    return "read" if outcome.error is None else type(outcome.error).__name__


def run_one(number: int, tally: Tally, names: Sequence[str] = ()) -> None:
    """Count execution ``number``; a failure is kept, not raised."""
    files = input_of(number, names)
    begun = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_SECONDS)
    try:
        kind = kind_of(execute(files))
        if number % SCANNED == 0:
            scan(files)
    except Hang:
        kind = "hang"
        tally.failures.append((number, traceback.format_exc(limit=-6)))
    except (Exception, CkptError):
        kind = "exception"
        tally.failures.append((number, traceback.format_exc(limit=-6)))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    tally.slowest_seconds = max(tally.slowest_seconds, time.process_time() - begun)
    tally.executions += 1
    tally.outcomes[kind] += 1


def run_batch(batch: tuple[int, int, Sequence[str]]) -> Tally:
    """Of the first execution, their count, and the seeds by name."""
    tally, (first, count, names) = Tally(), batch
    for number in range(first, first + count):
        run_one(number, tally, names)
    tally.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return tally


def _on_timer(*_: Any) -> None:
    raise Hang


def watch_time() -> None:
    """Have executions that take too long raise ``Hang``."""
    signal.signal(signal.SIGVTALRM, _on_timer)


def _begin() -> None:
    """Of a process, whose end is its parent's affair."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    watch_time()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> int:
    options = _options()
    begun, total = time.monotonic(), Tally()
    for tally in _tallies(options):
        total.add(tally)
        for number, story in tally.failures[: max(0, MAX_SHOWN - len(total.failures))]:
            _keep(number, story, options)
        _show(total, time.monotonic() - begun, options.executions, end=False)
    _show(total, time.monotonic() - begun, options.executions, end=True)
    too_large = total.peak_rss_bytes > MAX_RSS_BYTES
    return 1 if total.failures or too_large else 0


def _keep(number: int, story: str, options: argparse.Namespace) -> None:
    """Say what failed, and keep the checkpoint that did it."""
    options.findings.mkdir(parents=True, exist_ok=True)
    corpus.pack(options.findings / f"{number}.zip", input_of(number, options.seeds))
    print(f"execution {number}:\n{story}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzz every reader of ckpt-tools.")
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first execution; others follow")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    seeds = "checkpoints to change (default: all, and inputs that once broke a reader)"
    parser.add_argument("--seeds", nargs="+", choices=[*corpus.seeds()], default=[], metavar="NAME", help=seeds)
    return parser.parse_args()


def _tallies(options: argparse.Namespace) -> Iterator[Tally]:
    """Of one batch after the other. One that falls silent ends all processes, and is counted as a hang."""
    stop = options.first + options.executions
    firsts = range(options.first, stop, BATCH)
    batches = [(first, min(BATCH, stop - first), options.seeds) for first in firsts]
    with multiprocessing.get_context("spawn").Pool(options.processes, _begin) as pool:
        tallies = pool.imap(run_batch, batches)
        for first in firsts:
            try:
                yield tallies.next(timeout=DEAF_SECONDS)
            except multiprocessing.TimeoutError:
                yield Tally(failures=[(first, "no progress within this batch")])
                return


def _show(total: Tally, seconds: float, wanted: int, *, end: bool) -> None:
    """A line now and then, and the whole table at the end."""
    if not end and total.executions % (BATCH * 40):
        return
    rate = total.executions / max(seconds, 1e-9) * 3600
    print(
        f"{total.executions:,} of {wanted:,} executions, {rate:,.0f} an hour, slowest {total.slowest_seconds:.3f} s, "
        f"peak RSS {total.peak_rss_bytes / 2**20:.0f} MiB, {len(total.failures)} failures",
        flush=True,
    )
    if end:
        for kind, count in total.outcomes.most_common():
            print(f"  {count:>9,} {kind}")
