"""The task of the training package's own model: a grey image of 28x28 to one of its classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import ClassVar

import torch
from torch import Tensor, nn

from .prediction import decode_image, predictions_of
from .results import Prediction
from .task import LABEL, check_inputs, check_labels
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
        LABEL,
        TensorSpec("probabilities", "FP32", (BATCH, models.NUM_CLASSES)),
    )

    def __post_init__(self) -> None:
        check_labels(self.labels, models.NUM_CLASSES)

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
