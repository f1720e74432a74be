"""``/metrics`` in Prometheus' text format, with Triton's names where Triton has the metric, and Triton's statistics."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from ..models.predictor import Identity
    from .batching import Execution

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REASONS = ("BACKEND", "CANCELED", "REJECTED", "OTHER")
"""Triton's failure reasons: model error, client disconnect, full queue or deadline, bad request."""

TOTAL_OF_TRITONS = re.compile(rb"^(# (?:HELP|TYPE) )?(nv_\w+?)_total\b", re.MULTILINE)
"""Triton's counters do not have the suffix that Prometheus' client writes."""

disable_created_metrics()  # They would double the page.


OF_VERSION = ("model", "version")

COUNTERS = {
    "nv_inference_request_success": "Successful requests",
    "nv_inference_count": "Rows predicted",
    "nv_inference_exec_count": "Forward passes, each for all that waited",
    "nv_inference_request_duration_us": "Time of requests from head to answer, in microseconds",
    "nv_inference_queue_duration_us": "Time that rows waited for the model, in microseconds",
    "nv_inference_compute_infer_duration_us": "Time that rows were in a forward pass, in microseconds",
    "ckpt_tools_request_failure_duration_us": "Time of failed requests, in microseconds",
}
"""Counters of each version of a model."""


class ServiceMetrics:
    """Metrics of one service, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.counters = {name: counter(name, text, OF_VERSION) for name, text in COUNTERS.items()}
        self.failures = counter("nv_inference_request_failure", "Failed requests, by reason", (*OF_VERSION, "reason"))
        self.waiting = gauge("nv_inference_pending_request_count", "Rows that wait for the model", OF_VERSION)
        self.last = gauge("ckpt_tools_last_inference_seconds", "Time of the last forward pass", OF_VERSION)
        self.weights = gauge("ckpt_tools_model_info", "Which weights answer", (*OF_VERSION, "digest", "step"))
        text = "Time of successful requests from head to answer"
        self.seconds = Histogram("ckpt_tools_request_duration_seconds", text, OF_VERSION, registry=self.registry)
        self.http_responses = counter("ckpt_tools_http_responses", "Answers; 499: the client left", ("code",))
        self.grpc_responses = counter("ckpt_tools_grpc_responses", "Answers over gRPC", ("code",))
        self.in_flight = gauge("ckpt_tools_http_requests_in_flight", "Requests without an answer yet")
        self.registry.register(_ProcessTree())

    def families(self) -> list[Metric]:
        return list(self.registry.collect())

    def forget(self, model: str, number: int) -> None:
        """Remove what belongs to a version that is not served any more."""
        others = self.failures, self.waiting, self.last, self.weights, self.seconds
        for metric in (*self.counters.values(), *others):
            metric.remove_by_labels({"model": model, "version": str(number)})


class VersionMetrics:
    """Metrics of one version of a model."""

    def __init__(self, metrics: ServiceMetrics, model: str, number: int, weights: Identity) -> None:
        labels = (model, str(number))
        self._counters = {name: metric.labels(*labels) for name, metric in metrics.counters.items()}
        self._failures = {reason: metrics.failures.labels(*labels, reason) for reason in REASONS}
        self._last, self._seconds = metrics.last.labels(*labels), metrics.seconds.labels(*labels)
        self.waiting = metrics.waiting.labels(*labels)
        metrics.weights.labels(*labels, weights.digest, str(weights.step)).set(1)

    def count_execution(self, execution: Execution) -> None:
        """Count one call of the model."""
        self._counters["nv_inference_count"].inc(execution.num_items)
        self._counters["nv_inference_exec_count"].inc()
        self._counters["nv_inference_queue_duration_us"].inc(execution.queue_seconds * 1e6)
        compute_us = execution.work_seconds * execution.num_items * 1e6
        self._counters["nv_inference_compute_infer_duration_us"].inc(compute_us)
        self._last.set(time.time())

    def count_success(self, seconds: float) -> None:
        self._counters["nv_inference_request_success"].inc()
        self._counters["nv_inference_request_duration_us"].inc(seconds * 1e6)
        self._seconds.observe(seconds)

    def count_failure(self, reason: str, seconds: float) -> None:
        self._failures[reason].inc()
        self._counters["ckpt_tools_request_failure_duration_us"].inc(seconds * 1e6)


class _ProcessTree(Collector):
    """Processor time and memory of this process and its children. The client's own collector has one process alone."""

    def collect(self) -> Iterator[Metric]:
        cpu, memory = 0.0, 0
        for process in [own := psutil.Process(), *own.children()]:
            try:
                times, resident = process.cpu_times(), process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            cpu, memory = cpu + times.user + times.system, memory + resident
        yield CounterMetricFamily("process_cpu_seconds", "Processor time", cpu)
        yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory", memory)


def merge_replicas(replicas: Mapping[int, Iterable[Metric]]) -> list[Metric]:
    """The families of all replicas, with the label ``worker``."""
    merged: dict[str, Metric] = {}
    for number, families in replicas.items():
        for family in families:
            whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            worker = {"worker": str(number)}
            whole.samples += [sample._replace(labels={**sample.labels, **worker}) for sample in family.samples]
    return list(merged.values())


def write_exposition(families: Iterable[Metric]) -> bytes:
    class Families(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    return TOTAL_OF_TRITONS.sub(rb"\1\2", generate_latest(Families()))


def triton_statistics(families: Iterable[Metric], model: str, number: int) -> dict[str, Any]:
    """Triton's statistics of a version, over all replicas."""
    wanted = {"model": model, "version": str(number)}.items()
    samples = [each for family in families for each in family.samples if wanted <= each.labels.items()]

    def value(name: str, combine: Callable[[Iterable[float]], float] = sum, scale: float = 1) -> int:
        return round(combine([0, *(each.value for each in samples if each.name == name)]) * scale)

    def sums(count: str, duration: str) -> dict[str, int]:
        return {"count": value(f"nv_inference_{count}_total"), "ns": value(f"{duration}_duration_us_total", scale=1e3)}

    return {
        "name": model,
        "version": str(number),
        "last_inference": value("ckpt_tools_last_inference_seconds", max, 1e3),
        "inference_count": value("nv_inference_count_total"),
        "execution_count": value("nv_inference_exec_count_total"),
        "inference_stats": {
            "success": sums("request_success", "nv_inference_request"),
            "fail": sums("request_failure", "ckpt_tools_request_failure"),
            "queue": sums("count", "nv_inference_queue"),
            "compute_infer": sums("count", "nv_inference_compute_infer"),
        },
        "pending_request_count": value("nv_inference_pending_request_count"),
    }
