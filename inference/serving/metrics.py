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
    from ..models.predictor import ModelIdentity
    from .batching import Execution

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FAILURE_REASONS = ("BACKEND", "CANCELED", "REJECTED", "OTHER")
"""Triton's failure reasons: model error, client disconnect, full queue or deadline, bad request."""

TRITON_COUNTER = re.compile(rb"^(# (?:HELP|TYPE) )?(nv_\w+?)_total\b", re.MULTILINE)
"""Triton's counters do not have the suffix that Prometheus' client writes."""

disable_created_metrics()  # They would double the page.


LABELS = ("model", "version")

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
        self.counters = {name: counter(name, text, LABELS) for name, text in COUNTERS.items()}
        self.failures = counter("nv_inference_request_failure", "Failed requests, by reason", (*LABELS, "reason"))
        self.pending_rows = gauge("nv_inference_pending_request_count", "Rows that wait for the model", LABELS)
        self.last_inference = gauge("ckpt_tools_last_inference_seconds", "Time of the last forward pass", LABELS)
        self.model_info = gauge("ckpt_tools_model_info", "Which weights answer", (*LABELS, "digest", "step"))
        text = "Time of successful requests from head to answer"
        self.request_seconds = Histogram("ckpt_tools_request_duration_seconds", text, LABELS, registry=self.registry)
        self.http_responses = counter("ckpt_tools_http_responses", "Answers; 499: the client left", ("code",))
        self.grpc_responses = counter("ckpt_tools_grpc_responses", "Answers over gRPC", ("code",))
        self.in_flight = gauge("ckpt_tools_http_requests_in_flight", "Requests without an answer yet")
        self.registry.register(_ProcessTree())

    def collect_families(self) -> list[Metric]:
        return list(self.registry.collect())

    def remove_version(self, model: str, number: int) -> None:
        """Remove what belongs to a version that is not served any more."""
        others = self.failures, self.pending_rows, self.last_inference, self.model_info, self.request_seconds
        for metric in (*self.counters.values(), *others):
            metric.remove_by_labels({"model": model, "version": str(number)})


class VersionMetrics:
    """Metrics of one version of a model."""

    def __init__(self, metrics: ServiceMetrics, model: str, number: int, weights: ModelIdentity) -> None:
        labels = (model, str(number))
        self._counters = {name: metric.labels(*labels) for name, metric in metrics.counters.items()}
        self._failures = {reason: metrics.failures.labels(*labels, reason) for reason in FAILURE_REASONS}
        self._last_inference = metrics.last_inference.labels(*labels)
        self._request_seconds = metrics.request_seconds.labels(*labels)
        self.pending_rows = metrics.pending_rows.labels(*labels)
        metrics.model_info.labels(*labels, weights.digest, str(weights.step)).set(1)

    def count_execution(self, execution: Execution) -> None:
        """Count one call of the model."""
        self._counters["nv_inference_count"].inc(execution.num_items)
        self._counters["nv_inference_exec_count"].inc()
        self._counters["nv_inference_queue_duration_us"].inc(execution.queue_seconds * 1e6)
        compute_us = execution.work_seconds * execution.num_items * 1e6
        self._counters["nv_inference_compute_infer_duration_us"].inc(compute_us)
        self._last_inference.set(time.time())

    def count_success(self, seconds: float) -> None:
        self._counters["nv_inference_request_success"].inc()
        self._counters["nv_inference_request_duration_us"].inc(seconds * 1e6)
        self._request_seconds.observe(seconds)

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
            merged_family = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            worker = {"worker": str(number)}
            merged_family.samples += [sample._replace(labels={**sample.labels, **worker}) for sample in family.samples]
    return list(merged.values())


def write_exposition(families: Iterable[Metric]) -> bytes:
    class FamiliesCollector(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    return TRITON_COUNTER.sub(rb"\1\2", generate_latest(FamiliesCollector()))


def compute_triton_statistics(families: Iterable[Metric], model: str, number: int) -> dict[str, Any]:
    """Triton's statistics of a version, over all replicas."""
    labels = {"model": model, "version": str(number)}.items()
    samples = [each for family in families for each in family.samples if labels <= each.labels.items()]

    def value(name: str, combine: Callable[[Iterable[float]], float] = sum, scale: float = 1) -> int:
        return round(combine([0, *(each.value for each in samples if each.name == name)]) * scale)

    def count_and_time(count: str, duration: str) -> dict[str, int]:
        return {"count": value(f"nv_inference_{count}_total"), "ns": value(f"{duration}_duration_us_total", scale=1e3)}

    return {
        "name": model,
        "version": str(number),
        "last_inference": value("ckpt_tools_last_inference_seconds", max, 1e3),
        "inference_count": value("nv_inference_count_total"),
        "execution_count": value("nv_inference_exec_count_total"),
        "inference_stats": {
            "success": count_and_time("request_success", "nv_inference_request"),
            "fail": count_and_time("request_failure", "ckpt_tools_request_failure"),
            "queue": count_and_time("count", "nv_inference_queue"),
            "compute_infer": count_and_time("count", "nv_inference_compute_infer"),
        },
        "pending_request_count": value("nv_inference_pending_request_count"),
    }
