"""The protocol of tasks (from bytes to predictions), and functions that tasks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ckpt_tools.errors import FormatError, UsageError

from .results import BATCH, Prediction, TensorSpec

MAX_BATCH = 8  # inputs per forward pass of library models


def classifier_outputs(num_classes: int, num_features: int | None) -> tuple[TensorSpec, ...]:
    """Outputs of a classifier, or with ``num_features`` of one without its head."""
    if num_features is not None:
        return (TensorSpec("embedding", "FP32", (BATCH, num_features)),)
    return TensorSpec("label", "INT64", (BATCH,)), TensorSpec("probabilities", "FP32", (BATCH, num_classes))


class Task(Protocol):
    """Maps bytes to inputs, and inputs to predictions. ``labels`` are the class names, if known. ``max_batch`` is the
    number of inputs in each forward pass. If ``is_exact``, each pass has that number, so that an answer has the same
    bits whatever else is in the batch."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def labels(self) -> tuple[str, ...] | None: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def is_exact(self) -> bool: ...

    def decode(self, data: bytes, name: str) -> Tensor:
        """Decode one input, without the batch dimension. Raises FormatError, with ``name`` in it."""

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        """Predict each input, in order. Raises FormatError for another shape or dtype."""


def in_passes(rows: Tensor, forward: Callable[[Tensor], Tensor], *, max_batch: int, is_exact: bool) -> Tensor:
    """``forward`` on batches of ``rows``. An exact pass is padded with copies of its last row."""

    def one_pass(chunk: Tensor) -> Tensor:
        missing = max_batch - len(chunk) if is_exact else 0
        return forward(torch.cat([chunk, chunk[-1:].expand(missing, *chunk.shape[1:])]))[: len(chunk)]

    return torch.cat([one_pass(chunk) for chunk in rows.split(max_batch)])


def check_inputs(inputs: Sequence[Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises FormatError for another dtype or shape; -1 in ``shape`` is any size except 0."""
    for number, tensor in enumerate(inputs):
        if tensor.dtype == dtype and tensor.shape == shape:
            continue
        fits = tensor.dim() == len(shape) and all(
            have == want or (want == BATCH and have) for have, want in zip(tensor.shape, shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            raise FormatError(
                f"input {number} is {_words(tensor.dtype)} {list(tensor.shape)}; "
                f"the model takes {_words(dtype)} {list(shape)}"
            )


def check_labels(labels: tuple[str, ...] | None, num_classes: int) -> None:
    """Raises UsageError if their number is not ``num_classes``."""
    if labels is not None and len(labels) != num_classes:
        raise UsageError(f"there are {len(labels)} labels for the model's {num_classes} classes")


def text_of(data: bytes, name: str) -> str:
    """Decode UTF-8. Raises FormatError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{name} is not a text in UTF-8 (byte {error.start})") from error


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
