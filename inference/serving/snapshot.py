"""What one process of the service has counted, as it is at a moment: a value that processes send each other."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .http.middleware import Traffic
from .repository import Repository, Version
from .statistics import Counts


@dataclass(frozen=True, slots=True)
class VersionSnapshot:
    """Of one version of a model."""

    name: str
    number: int
    digest: str
    step: int | None
    num_waiting: int
    counts: Counts

    @classmethod
    def of(cls, version: Version) -> VersionSnapshot:
        known = version.predictor.identity
        waiting, counts = version.batcher.num_waiting, version.statistics.now()
        return cls(version.name, version.number, known.digest, known.step, waiting, counts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Of a process, with that of its models; ``worker`` is its number if there are several."""

    worker: int | None
    versions: tuple[VersionSnapshot, ...]
    in_flight: int
    by_status: Mapping[int, int]
    by_code: Mapping[str, int]
    cpu_seconds: float
    resident_bytes: int

    @classmethod
    def of(cls, repository: Repository, traffic: Traffic) -> Snapshot:
        return cls(
            None,
            tuple(map(VersionSnapshot.of, repository.versions())),
            traffic.in_flight,
            dict(traffic.by_status),
            dict(traffic.by_code),
            *usage(),
        )


def usage() -> tuple[float, int]:
    """Seconds of processor time and bytes of resident memory, of this process and of that of its models."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    cpu, memory = own.ru_utime + own.ru_stime, resident_bytes("self")
    for number in _children():
        with suppress(OSError):
            # proc(5): utime and stime are the fields 14 and 15, behind a name in parentheses that may hold anything.
            numbers = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            cpu += sum(map(int, numbers[11:13])) / os.sysconf("SC_CLK_TCK")
            memory += resident_bytes(number)
    return cpu, memory


def _children() -> list[str]:
    return [number for each in Path("/proc/self/task").glob("*/children") for number in each.read_text().split()]


def resident_bytes(process: str) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
