"""The model of `make demo` as a service of BentoML, whose command imports this module."""

from __future__ import annotations

import os
from typing import Any

import bentoml

from benchmarks.demo_model import BATCH, predicting

MAX_LATENCY_MS = 10_000
"""Limit of a whole request: BentoML answers 503 to those that it expects to take longer."""


@bentoml.service(workers=1, traffic={"timeout": 60, "max_concurrency": 1000})
class Demo:
    def __init__(self) -> None:
        self.run = predicting(os.environ["BENCHMARK_MODEL"], int(os.environ["BENCHMARK_THREADS"]))

    @bentoml.api(  # type: ignore[untyped-decorator]
        batchable=True, max_batch_size=BATCH, max_latency_ms=MAX_LATENCY_MS, route="/predict"
    )
    def predict(self, image: list[list[int]]) -> list[dict[str, Any]]:
        return self.run(image)
