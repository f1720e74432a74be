"""What one process of the service has counted, as it is at a moment: a value that processes send each other."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .front import Traffic
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
    """Of a process; ``worker`` is its number if there are several."""

    worker: int | None
    versions: tuple[VersionSnapshot, ...]
    in_flight: int
    by_status: Mapping[int, int]
    by_code: Mapping[str, int]
    cpu_seconds: float
    resident_bytes: int

    @classmethod
    def of(cls, repository: Repository, traffic: Traffic, worker: int | None = None) -> Snapshot:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(
            worker,
            tuple(map(VersionSnapshot.of, repository.versions())),
            traffic.in_flight,
            dict(traffic.by_status),
            dict(traffic.by_code),
            usage.ru_utime + usage.ru_stime,
            resident_bytes(),
        )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
