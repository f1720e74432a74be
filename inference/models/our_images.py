"""Task of the training package's image models: classify a grey image of 28x28."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..common.training_package import data, evaluation, models
from .prediction import decode_image, embeddings_of, predictions_of
from .results import Prediction
from .task import check_inputs, check_labels, classifier_outputs
from .tensor_specs import BATCH, TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class OurImages:
    """Classifies 8-bit grey images, uint8 [28, 28], in forward passes of the shape that training evaluates with. With
    ``num_features`` the model has no head and gives embeddings of that size."""

    model: nn.Module
    labels: tuple[str, ...] | None = None
    is_exact: bool = True
    num_features: int | None = None
    forward: evaluation.Logits = field(init=False)

    inputs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("image", "UINT8", (BATCH, models.IMAGE_SIZE, models.IMAGE_SIZE)),
    )

    def __post_init__(self) -> None:
        check_labels(self.labels, models.NUM_CLASSES)
        # Once: to set the mode of each of its modules takes as long as to predict two images.
        object.__setattr__(self, "forward", evaluation.plain_logits(self.model))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return classifier_outputs(models.NUM_CLASSES, self.num_features)

    @property
    def max_batch(self) -> int:
        return evaluation.CHUNK

    def decode(self, data: bytes, name: str) -> Tensor:
        return decode_image(BytesIO(data), name)

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        if not inputs:
            return []
        check_inputs(inputs, torch.uint8, (models.IMAGE_SIZE, models.IMAGE_SIZE))
        logits = self._logits(torch.stack(list(inputs)))
        return predictions_of(logits) if self.num_features is None else embeddings_of(logits)

    def _logits(self, pixels: Tensor) -> Tensor:
        like = next(self.model.parameters())

        def logits(images: Tensor) -> Tensor:
            return self.forward(images.to(like.device, like.dtype)).cpu()

        if self.is_exact:
            return evaluation.all_logits(logits, pixels)
        return torch.cat([logits(data.to_input(chunk)) for chunk in pixels.split(evaluation.CHUNK)]).float()
