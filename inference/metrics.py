"""``/metrics`` in Prometheus' text format, with Triton's names for what Triton counts.

It is written here, since Prometheus' own client adds ``_total`` to the name of each counter, and Triton's have none.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path

from .front import Traffic
from .repository import Repository, Version
from .statistics import BOUNDS, Statistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = Iterable[tuple[Mapping[str, str], float]]

COUNTERS: Mapping[str, tuple[str, Callable[[Statistics], float]]] = {
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


def exposition(repository: Repository, traffic: Traffic) -> str:
    """All that is counted, as it is now."""
    return "".join(_lines(repository.versions(), traffic))


def _lines(versions: list[Version], traffic: Traffic) -> Iterator[str]:
    labelled = [({"model": each.name, "version": str(each.number)}, each) for each in versions]
    for name, (text, value) in COUNTERS.items():
        yield from _family(name, "counter", text, [(labels, value(each.statistics)) for labels, each in labelled])
    failures = [
        ({**labels, "reason": reason}, count)
        for labels, each in labelled
        for reason, count in each.statistics.failures.items()
    ]
    yield from _family("nv_inference_request_failure", "counter", "Failed requests, by reason", failures)
    pending = [(labels, each.batcher.num_waiting) for labels, each in labelled]
    yield from _family("nv_inference_pending_request_count", "gauge", "Rows that wait for the model", pending)
    yield from _identities(labelled)
    yield from _histogram(labelled)
    yield from _of_process(traffic)


def _identities(labelled: list[tuple[dict[str, str], Version]]) -> Iterator[str]:
    samples = [
        ({**labels, "digest": each.predictor.identity.digest, "step": str(each.predictor.identity.step)}, 1.0)
        for labels, each in labelled
    ]
    yield from _family("ckpt_tools_model_info", "gauge", "Which weights answer", samples)


def _histogram(labelled: list[tuple[dict[str, str], Version]]) -> Iterator[str]:
    name = "ckpt_tools_request_duration_seconds"
    yield _head(name, "histogram", "Time of successful requests from head to answer")
    for labels, each in labelled:
        counts = list(accumulate(each.statistics.histogram))
        for bound, count in zip([*map(str, BOUNDS), "+Inf"], counts, strict=True):
            yield _sample(f"{name}_bucket", {**labels, "le": bound}, count)
        yield _sample(f"{name}_sum", labels, each.statistics.request_ns / 1e9)
        yield _sample(f"{name}_count", labels, counts[-1])


def _of_process(traffic: Traffic) -> Iterator[str]:
    by_status: Samples = [({"code": str(code)}, count) for code, count in sorted(traffic.by_status.items())]
    yield from _family("ckpt_tools_http_responses_total", "counter", "Answers; 499: the client left", by_status)
    by_code: Samples = [({"code": code}, count) for code, count in sorted(traffic.by_code.items())]
    yield from _family("ckpt_tools_grpc_responses_total", "counter", "Answers over gRPC", by_code)
    in_flight: Samples = [({}, traffic.in_flight)]
    yield from _family("ckpt_tools_http_requests_in_flight", "gauge", "Requests without an answer yet", in_flight)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = usage.ru_utime + usage.ru_stime
    yield from _family("process_cpu_seconds_total", "counter", "Processor time", [({}, seconds)])
    yield from _family("process_resident_memory_bytes", "gauge", "Resident memory", [({}, resident_bytes())])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


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
