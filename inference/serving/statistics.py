"""Counters of each version of a model, for ``/metrics``, ``/stats`` and the page."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, fields

from .batching import Execution

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets of the request duration histogram, in seconds."""

REASONS = ("BACKEND", "CANCELED", "REJECTED", "OTHER")
"""Triton's failure reasons: model error, client disconnect, full queue or deadline, bad request."""


@dataclass(slots=True)
class Counts:
    """Counts of one version since it was loaded. Durations are sums in nanoseconds."""

    successes: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    inferences: int = 0
    executions: int = 0
    request_ns: int = 0
    failure_ns: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    last_inference_ms: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> Counts:
        """The sum over replicas with the same version."""
        found = cls()
        for part in parts:
            for name in SUMS:
                setattr(found, name, getattr(found, name) + getattr(part, name))
            found.last_inference_ms = max(found.last_inference_ms, part.last_inference_ms)
            found.failures = {reason: count + part.failures[reason] for reason, count in found.failures.items()}
            found.histogram = [sum(pair) for pair in zip(found.histogram, part.histogram, strict=True)]
        return found


SUMS = tuple(each.name for each in fields(Counts) if each.name not in {"failures", "histogram", "last_inference_ms"})


@dataclass(slots=True)
class Statistics(Counts):
    """Live counts, updated by request threads and the model's thread."""

    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def now(self) -> Counts:
        with self._lock:
            return Counts(**{each.name: copy(getattr(self, each.name)) for each in fields(Counts)})

    def executed(self, execution: Execution) -> None:
        """Count one call of the model; called from its thread."""
        with self._lock:
            self.inferences += execution.num_items
            self.executions += 1
            self.queue_ns += round(execution.queue_seconds * 1e9)
            self.compute_ns += round(execution.work_seconds * execution.num_items * 1e9)
            self.last_inference_ms = round(time.time() * 1e3)

    def succeeded(self, seconds: float) -> None:
        with self._lock:
            self.successes += 1
            self.request_ns += round(seconds * 1e9)
            self.histogram[bisect_left(BOUNDS, seconds)] += 1

    def failed(self, reason: str, seconds: float) -> None:
        with self._lock:
            self.failures[reason] += 1
            self.failure_ns += round(seconds * 1e9)
