"""The model of `make demo` as LitServe serves it. Its workers import this module.

Without ``from __future__ import annotations``, because LitServe reads the annotation of a request.
"""

from typing import Any

import litserve
from fastapi import Request

from benchmarks.demo_model import BATCH, WAIT_SECONDS, Answer, predicting


class Api(litserve.LitAPI):  # type: ignore[misc]
    def __init__(self, model: str, threads: int) -> None:
        super().__init__(max_batch_size=BATCH, batch_timeout=WAIT_SECONDS)
        self.given = model, threads

    def setup(self, device: str) -> None:
        self.run = predicting(*self.given)

    def decode_request(self, request: Request) -> Any:
        given: Any = request
        return given["image"]

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, inputs: list[Any]) -> list[Answer]:
        return self.run(inputs)

    def unbatch(self, output: list[Answer]) -> list[Answer]:
        return output

    def encode_response(self, output: Answer) -> Answer:
        return output
