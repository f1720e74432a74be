"""The model of `make demo` as LitServe serves it. Its workers import this module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import litserve

from benchmarks.servers import BATCH, WAIT_SECONDS, make_predictor


class DemoApi(litserve.LitAPI):  # type: ignore[misc]
    def __init__(self, model: str, threads: int) -> None:
        super().__init__(max_batch_size=BATCH, batch_timeout=WAIT_SECONDS)
        self.model, self.threads = model, threads

    def setup(self, device: str) -> None:
        self.run = make_predictor(self.model, self.threads)

    def predict(self, inputs: Sequence[Any]) -> list[dict[str, Any]]:
        return self.run([each["image"] for each in inputs])
