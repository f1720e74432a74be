"""What a model is for, and what all tasks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ckpt_tools.errors import FormatError, UsageError

from .results import Prediction
from .tensor_specs import BATCH, TensorSpec

MAX_BATCH = 8
"""Inputs in a forward pass of a model that is not ours."""

LABEL = TensorSpec("label", "INT64", (BATCH,))


class Task(Protocol):
    """From bytes to the input of a forward pass, and from its output to an answer.

    ``labels`` are the names of the classes, if they are known. ``max_batch`` is the number of inputs in each forward
    pass. If ``is_exact``, each pass has that number, so that an answer has the same bits in any company.
    """

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
        """One input of the model, without the batch's dimension. Raises FormatError, with ``name`` in it."""
        ...

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        """An answer for each input, in order. Raises FormatError for an input of another form."""
        ...


def in_passes(rows: Tensor, forward: Callable[[Tensor], Tensor], *, max_batch: int, is_exact: bool) -> Tensor:
    """``forward`` of ``rows``, some of them at a time. An exact pass is filled up with copies of its last row."""

    def one_pass(chunk: Tensor) -> Tensor:
        missing = max_batch - len(chunk) if is_exact else 0
        return forward(torch.cat([chunk, chunk[-1:].expand(missing, *chunk.shape[1:])]))[: len(chunk)]

    return torch.cat([one_pass(chunk) for chunk in rows.split(max_batch)])


def check_inputs(inputs: Sequence[Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises FormatError if one of them has another dtype or shape; -1 in ``shape`` is any number but 0."""
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
    """Raises UsageError if there are not as many as classes."""
    if labels is not None and len(labels) != num_classes:
        raise UsageError(f"there are {len(labels)} labels for the model's {num_classes} classes")


def text_of(data: bytes, name: str) -> str:
    """Raises FormatError if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{name} is not a text in UTF-8 (byte {error.start})") from error


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
