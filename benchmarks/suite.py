"""Runs works: each contestant in turn, in a random order for each round, and notes every run at once.

Ratios are of medians within one work, whose runs alternate within minutes: a machine that is slow for a while is slow
for all. A contestant that fails or takes too long is noted with the reason and not run again.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import caching, machine
from benchmarks.inputs import Cache
from benchmarks.journal import Journal, Record
from benchmarks.measure import MeasureError, Usage, measured, reason_of_failure
from benchmarks.peers import COMMANDS
from benchmarks.works import COPY, OURS, Work

ROOT = machine.ROOT

INPUT_ROOM, WORK_ROOM = 1.3, 3.6
"""Disk space in sizes of the state: for an input, and for a work: the copied output and the new one, which of
`ds_to_universal` with its temporary files is 2.4 times its input."""

MAX_REASON = 200

WAYS = WARM, COLD, FSYNC = "warm", "cold", "fsync"
"""With the input in memory, with it on the disk, and warm with fsync."""

BALLAST = 2
"""Memory kept from the host, in sizes of the state: an output, and its writers' memory."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Size of the inputs, number of runs of a contestant, and seconds that one may take."""

    size_bytes: int
    runs: int
    time_limit: float
    data: Path
    ways: tuple[str, ...] = WAYS


def slots(work: Work, ways: Collection[str] = WAYS) -> list[tuple[str, str]]:
    """Contestants and their ways in alphabetical order. Peers have no option for fsync."""
    return sorted((who, way) for who in work.contestants for way in ways if way != FSYNC or who not in COMMANDS)


class Runner:
    """Measures what the journal lacks of one work of one size."""

    def __init__(self, work: Work, settings: Settings, journal: Journal) -> None:
        self.work, self.settings, self.journal = work, settings, journal
        self.inputs = Cache(settings.data / "inputs")
        self.size_bytes = settings.size_bytes
        self.source = self.inputs.path(work.source, self.size_bytes)
        self.copied = settings.data / "copied"
        self.out = settings.data / "out"
        self.key: Record = {"work": work.name, "size_bytes": self.size_bytes, "code": machine.code()}
        journal.forget(keep=self.key, work=work.name)

    def run(self) -> None:
        if not list(self._missing()):
            return
        try:
            self._prepare()
            with caching.ballast(BALLAST * self.size_bytes):
                for number, contestant, way in list(self._missing()):
                    if contestant not in self._failed():
                        self._run(number, contestant, way)
        except (MeasureError, OSError, ValueError, subprocess.SubprocessError) as error:
            self._note("work", status="failed", reason=_short(str(error)))
        finally:
            _delete(self.copied)
            _delete(self.out)

    def _missing(self) -> Iterator[tuple[int, str, str]]:
        """Runs to do, round by round, in a random order for each round."""
        done = {(run["round"], run["contestant"], run["way"]) for run in self._found("run")}
        failed = self._failed()
        for number in range(self.settings.runs):
            order = slots(self.work, self.settings.ways)
            random.Random(f"{self.work.name} {number}").shuffle(order)
            for contestant, way in order:
                if (number, contestant, way) not in done and contestant not in failed:
                    yield number, contestant, way

    def _found(self, kind: str) -> list[Record]:
        return self.journal.find(kind=kind, **self.key)

    def _failed(self) -> set[str]:
        return {record["contestant"] for record in self._found("run") if record["status"] != "done"}

    def _note(self, kind: str, **fields: object) -> Record:
        return self.journal.add({"kind": kind, **self.key, **fields})

    def _prepare(self) -> None:
        """The input, and what `cp -r` copies: an output of ours, which is first compared with the input."""
        room = WORK_ROOM + INPUT_ROOM * (not self.source.exists())
        if not self.inputs.make_room(int(room * self.size_bytes), keep=self.source):
            raise OSError(f"the disk has no {room * self.size_bytes / 1e9:.1f} GB free")
        say(f"{self.work.name}: {self.work.about}")
        self.inputs.get(self.work.source, self.size_bytes)
        self._cool_others()
        _delete(self.copied)
        _, reason, _ = self._measure(OURS, WARM)
        if reason:
            raise OSError(reason)
        self._check(OURS)
        self.out.rename(self.copied)
        sizes = {"source_bytes": caching.size_of(self.source), "copied_bytes": caching.size_of(self.copied)}
        self._note("work", status="done", **sizes, copied_files=len(list(caching.files_of(self.copied))))

    def _cool_others(self) -> None:
        """Drop other inputs from memory, so that the kernel does not reclaim it while something is measured."""
        for path in self.inputs.root.iterdir():
            if path != self.source:
                caching.cool(path)

    def _run(self, number: int, contestant: str, way: str) -> None:
        usage, reason, share = self._measure(contestant, way)
        status = "timed out" if usage.timed_out else "failed" if reason else "done"
        place = {"round": number, "contestant": contestant, "way": way, "cached_share": round(share, 4)}
        say(f"  {number} {contestant:32} {way:5} {usage.seconds:.2f} s {status}")
        if status == "done" and contestant not in {check["contestant"] for check in self._found("check")}:
            self._check(contestant)
        self._note("run", status=status, reason=reason, **place, **asdict(usage))
        _delete(self.out)

    def _measure(self, contestant: str, way: str) -> tuple[Usage, str, float]:
        """Usage, reason of a failure, and the share of its input that was in memory before."""
        _delete(self.out)
        if contestant != COPY:
            self.out.mkdir(parents=True)
        command = self.work.command(contestant, self.source, self.copied, self.out, synced=way == FSYNC)
        read = self.copied if contestant == COPY else self.source
        os.sync()
        self._cool_others()
        (caching.cool if way == COLD else caching.warm)(read)
        share = caching.cached_share(read)
        return *call(command, self.settings), share

    def _check(self, contestant: str) -> None:
        """Note whether the output holds the input's tensors bit for bit."""
        _, reason = call(self.work.verification(contestant, self.source, self.out), self.settings)
        self._note("check", contestant=contestant, status="failed" if reason else "equal", reason=reason)


def call(command: list[str], settings: Settings) -> tuple[Usage, str]:
    """The command's usage, and the reason of its failure, empty if it succeeded."""
    settings.data.mkdir(parents=True, exist_ok=True)
    log = settings.data / "log"
    # Without accelerator and network, and with Python's compiled modules kept, as where programs are installed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    usage = measured(command, log, time_limit=settings.time_limit, cwd=ROOT, env=env)
    return usage, _short(reason_of_failure(usage, log, settings.time_limit))


def printed_lines(command: list[str], settings: Settings) -> list[str]:
    """Output of the command. Raises MeasureError if it fails."""
    _, reason = call(command, settings)
    if reason:
        raise MeasureError(f"{' '.join(command[1:4])} failed: {reason}")
    return (settings.data / "log").read_text().splitlines()


def say(line: str) -> None:
    print(line, flush=True)


def _delete(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _short(text: str) -> str:
    return text.replace(f"{ROOT}/", "")[:MAX_REASON]
