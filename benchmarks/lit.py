"""The model of `make demo` as LitServe serves it. Its workers import this module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import litserve

from benchmarks.demo_model import BATCH, WAIT_SECONDS, Answer, predicting


class Api(litserve.LitAPI):  # type: ignore[misc]
    def __init__(self, model: str, threads: int) -> None:
        super().__init__(max_batch_size=BATCH, batch_timeout=WAIT_SECONDS)
        self.given = model, threads

    def setup(self, device: str) -> None:
        self.run = predicting(*self.given)

    def predict(self, inputs: Sequence[Any]) -> list[Answer]:
        return self.run([each["image"] for each in inputs])
