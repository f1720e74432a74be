"""``/metrics`` in Prometheus' text format, with Triton's names where Triton has the metric.

Written here because Prometheus' client appends ``_total`` to counters, which Triton's names do not have.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from .batching import BOUNDS, Counts
from .http.middleware import Traffic
from .repository import Repository, Version

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = Iterable[tuple[Mapping[str, str], float]]

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


def exposition(snapshots: Sequence[Snapshot]) -> str:
    return "".join(_lines(snapshots))


def _lines(snapshots: Sequence[Snapshot]) -> Iterator[str]:
    labelled = [
        ({"model": version.name, "version": str(version.number), **_of_worker(each)}, version)
        for each in snapshots
        for version in each.versions
    ]
    for name, (text, value) in COUNTERS.items():
        yield from _family(name, "counter", text, [(labels, value(each.counts)) for labels, each in labelled])
    failures = [
        ({**labels, "reason": reason}, count)
        for labels, each in labelled
        for reason, count in each.counts.failures.items()
    ]
    yield from _family("nv_inference_request_failure", "counter", "Failed requests, by reason", failures)
    pending = [(labels, each.num_waiting) for labels, each in labelled]
    yield from _family("nv_inference_pending_request_count", "gauge", "Rows that wait for the model", pending)
    weights = [({**labels, "digest": each.digest, "step": str(each.step)}, 1.0) for labels, each in labelled]
    yield from _family("ckpt_tools_model_info", "gauge", "Which weights answer", weights)
    yield from _histogram(labelled)
    yield from _of_processes(snapshots)


def _of_worker(snapshot: Snapshot) -> dict[str, str]:
    return {} if snapshot.worker is None else {"worker": str(snapshot.worker)}


def _histogram(labelled: list[tuple[dict[str, str], VersionSnapshot]]) -> Iterator[str]:
    name = "ckpt_tools_request_duration_seconds"
    yield _head(name, "histogram", "Time of successful requests from head to answer")
    for labels, each in labelled:
        counts = list(accumulate(each.counts.histogram))
        for bound, count in zip([*map(str, BOUNDS), "+Inf"], counts, strict=True):
            yield _sample(f"{name}_bucket", {**labels, "le": bound}, count)
        yield _sample(f"{name}_sum", labels, each.counts.request_ns / 1e9)
        yield _sample(f"{name}_count", labels, counts[-1])


def _of_processes(snapshots: Sequence[Snapshot]) -> Iterator[str]:
    labelled = [(_of_worker(each), each) for each in snapshots]
    answers: dict[str, Callable[[Snapshot], Mapping[Any, int]]] = {
        "ckpt_tools_http_responses_total": lambda each: each.by_status,
        "ckpt_tools_grpc_responses_total": lambda each: each.by_code,
    }
    texts = ("Answers; 499: the client left", "Answers over gRPC")
    for (name, counted), text in zip(answers.items(), texts, strict=True):
        samples = [
            ({**labels, "code": str(code)}, count)
            for labels, each in labelled
            for code, count in sorted(counted(each).items())
        ]
        yield from _family(name, "counter", text, samples)
    gauges: dict[str, tuple[str, str, Callable[[Snapshot], float]]] = {
        "ckpt_tools_http_requests_in_flight": ("gauge", "Requests without an answer yet", lambda each: each.in_flight),
        "process_cpu_seconds_total": ("counter", "Processor time", lambda each: each.cpu_seconds),
        "process_resident_memory_bytes": ("gauge", "Resident memory", lambda each: each.resident_bytes),
    }
    for name, (kind, text, value) in gauges.items():
        yield from _family(name, kind, text, [(labels, value(each)) for labels, each in labelled])


def _family(name: str, kind: str, text: str, samples: Samples) -> Iterator[str]:
    yield _head(name, kind, text)
    for labels, value in samples:
        yield _sample(name, labels, value)


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value}\n" if shown else f"{name} {value}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
