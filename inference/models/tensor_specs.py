"""Tensors that go in and come out of a model, in the words of the Open Inference Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Datatype = Literal["FP32", "UINT8", "INT64", "BYTES"]

BATCH = -1
"""In a shape: as many as are asked for."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The first dimension is the batch.

    An input of ``BYTES`` has an element for each thing that is asked about, which is a text in UTF-8, and which
    ``Predictor.decode`` turns into what ``Predictor.predict`` takes. An output is named as the field of ``Prediction``.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.shape[:1] == (BATCH,), self.shape

    @property
    def row_bytes(self) -> int | None:
        """Of one input or output; None if they are not all of one size."""
        if self.datatype == "BYTES" or BATCH in self.shape[1:]:
            return None
        return prod(self.shape[1:]) * {"FP32": 4, "UINT8": 1, "INT64": 8}[self.datatype]


def embedding_spec(num_features: int) -> TensorSpec:
    """The output of a model that gives what its last layer gets."""
    return TensorSpec("embedding", "FP32", (BATCH, num_features))
