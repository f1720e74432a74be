"""The task of the training package's own model: a grey image of 28x28 to one of its classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import ClassVar

import torch
from torch import Tensor, nn

from ckpt_tools.errors import FormatError, UsageError

from .prediction import decode_image, predictions_of
from .results import Prediction
from .tensor_specs import BATCH, TensorSpec
from .training_package import data, evaluation, models


@dataclass(frozen=True, slots=True, eq=False)
class OurImages:
    """Labels 8-bit grey images, uint8 [28, 28], in forward passes of the shape that training evaluates with."""

    model: nn.Module
    labels: tuple[str, ...] | None = None
    is_exact: bool = True
    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("image", "UINT8", (BATCH, models.IMAGE_SIZE, models.IMAGE_SIZE)),
    )

    outputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("label", "INT64", (BATCH,)),
        TensorSpec("probabilities", "FP32", (BATCH, models.NUM_CLASSES)),
    )

    def __post_init__(self) -> None:
        if self.labels is not None and len(self.labels) != models.NUM_CLASSES:
            raise UsageError(f"there are {len(self.labels)} labels for the model's {models.NUM_CLASSES} classes")

    @property
    def max_batch(self) -> int:
        return evaluation.CHUNK

    def decode(self, data: bytes, name: str) -> Tensor:
        return decode_image(BytesIO(data), name)

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        if not inputs:
            return []
        check_inputs(inputs, torch.uint8, (models.IMAGE_SIZE, models.IMAGE_SIZE))
        return predictions_of(self._logits(torch.stack(list(inputs))))

    def _logits(self, pixels: Tensor) -> Tensor:
        like = next(self.model.parameters())
        forward = evaluation.plain_logits(self.model)

        def logits(images: Tensor) -> Tensor:
            return forward(images.to(like.device, like.dtype)).cpu()

        if self.is_exact:
            return evaluation.all_logits(logits, pixels)
        return torch.cat([logits(data.to_input(chunk)) for chunk in pixels.split(evaluation.CHUNK)]).float()


def check_inputs(inputs: Sequence[Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises FormatError if one of them has another dtype or shape."""
    for number, tensor in enumerate(inputs):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise FormatError(
                f"input {number} is {_words(tensor.dtype)} {list(tensor.shape)}; "
                f"the model takes {_words(dtype)} {list(shape)}"
            )


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
