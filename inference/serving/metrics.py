"""``/metrics`` in Prometheus' text format, with Triton's names where Triton has the metric."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

from prometheus_client import generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .batching import BOUNDS, Counts
from .http.middleware import Traffic
from .repository import Repository, Version

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TOTAL_OF_TRITONS = re.compile(rb"^(# (?:HELP|TYPE) nv_\w+)_total ", re.MULTILINE)
"""The suffix that Prometheus' client writes in these lines of every counter. Triton's names do not have it."""

Samples = Iterable[tuple[dict[str, str], float]]

COUNTERS: Mapping[str, tuple[str, Callable[[Counts], float]]] = {
    "nv_inference_request_success": ("Successful requests", lambda counts: counts.successes),
    "nv_inference_count": ("Rows predicted", lambda counts: counts.inferences),
    "nv_inference_exec_count": ("Forward passes, each for all that waited", lambda counts: counts.executions),
    "nv_inference_request_duration_us": (
        "Time of requests from head to answer, in microseconds",
        lambda counts: counts.request_ns // 1000,
    ),
    "nv_inference_queue_duration_us": (
        "Time that rows waited for the model, in microseconds",
        lambda counts: counts.queue_ns // 1000,
    ),
    "nv_inference_compute_infer_duration_us": (
        "Time that rows were in a forward pass, in microseconds",
        lambda counts: counts.compute_ns // 1000,
    ),
}


@dataclass(frozen=True, slots=True)
class VersionSnapshot:
    """Counts of one version of a model."""

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
    """Counts of a service process and of its models' process; ``worker`` numbers replicas."""

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
    """CPU seconds and resident bytes of this process and its children."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    cpu, memory = own.ru_utime + own.ru_stime, resident_bytes("self")
    children = (each.read_text().split() for each in Path("/proc/self/task").glob("*/children"))
    for number in chain.from_iterable(children):
        with suppress(OSError):
            # proc(5): utime and stime are the fields 14 and 15, behind a name in parentheses that may hold anything.
            numbers = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            cpu += sum(map(int, numbers[11:13])) / os.sysconf("SC_CLK_TCK")
            memory += resident_bytes(number)
    return cpu, memory


def resident_bytes(process: str) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


def exposition(snapshots: Sequence[Snapshot]) -> bytes:
    return TOTAL_OF_TRITONS.sub(rb"\1 ", generate_latest(_Families(snapshots)))


class _Families(Collector):
    """Metrics made of snapshots, for one scrape: nothing is kept between scrapes."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self.snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        labelled = [
            ({"model": version.name, "version": str(version.number), **_of_worker(each)}, version)
            for each in self.snapshots
            for version in each.versions
        ]
        yield from _of_versions(labelled)
        yield from _of_processes([(_of_worker(each), each) for each in self.snapshots])


def _of_worker(snapshot: Snapshot) -> dict[str, str]:
    return {} if snapshot.worker is None else {"worker": str(snapshot.worker)}


def _of_versions(labelled: Sequence[tuple[dict[str, str], VersionSnapshot]]) -> Iterator[Metric]:
    for name, (text, value) in COUNTERS.items():
        yield _family(name, "counter", text, [(labels, value(each.counts)) for labels, each in labelled])
    failures = [
        ({**labels, "reason": reason}, count)
        for labels, each in labelled
        for reason, count in each.counts.failures.items()
    ]
    yield _family("nv_inference_request_failure", "counter", "Failed requests, by reason", failures)
    pending = [(labels, each.num_waiting) for labels, each in labelled]
    yield _family("nv_inference_pending_request_count", "gauge", "Rows that wait for the model", pending)
    weights = [({**labels, "digest": each.digest, "step": str(each.step)}, 1.0) for labels, each in labelled]
    yield _family("ckpt_tools_model_info", "gauge", "Which weights answer", weights)
    names = list(labelled[0][0]) if labelled else []
    text = "Time of successful requests from head to answer"
    seconds = HistogramMetricFamily("ckpt_tools_request_duration_seconds", text, labels=names)
    for labels, each in labelled:
        buckets = list(zip([*map(str, BOUNDS), "+Inf"], accumulate(each.counts.histogram), strict=True))
        seconds.add_metric(list(labels.values()), buckets, each.counts.request_ns / 1e9)
    yield seconds


def _of_processes(labelled: Sequence[tuple[dict[str, str], Snapshot]]) -> Iterator[Metric]:
    answers: dict[str, tuple[str, Callable[[Snapshot], Mapping[Any, int]]]] = {
        "ckpt_tools_http_responses_total": ("Answers; 499: the client left", lambda each: each.by_status),
        "ckpt_tools_grpc_responses_total": ("Answers over gRPC", lambda each: each.by_code),
    }
    for name, (text, counted) in answers.items():
        samples = [
            ({**labels, "code": str(code)}, count)
            for labels, each in labelled
            for code, count in sorted(counted(each).items())
        ]
        yield _family(name, "counter", text, samples)
    in_flight = [(labels, each.in_flight) for labels, each in labelled]
    yield _family("ckpt_tools_http_requests_in_flight", "gauge", "Requests without an answer yet", in_flight)
    cpu = [(labels, each.cpu_seconds) for labels, each in labelled]
    yield _family("process_cpu_seconds_total", "counter", "Processor time", cpu)
    memory = [(labels, each.resident_bytes) for labels, each in labelled]
    yield _family("process_resident_memory_bytes", "gauge", "Resident memory", memory)


def _family(name: str, kind: Literal["counter", "gauge"], text: str, samples: Samples) -> Metric:
    """A metric whose samples have this very name."""
    family = Metric(name.removesuffix("_total"), text, kind)
    for labels, value in samples:
        family.add_sample(name, labels, value)
    return family
