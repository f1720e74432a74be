"""Tasks of the training package's models: classify a grey image of 28x28, continue a text byte by byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import ClassVar

import torch
from torch import Tensor, nn

from ckpt_tools.errors import FormatError

from ..common.training_package import data, evaluation, language_model, model_names
from .prediction import decode_image, embeddings_of, predictions_of
from .results import BATCH, Prediction, TensorSpec
from .task import MAX_BATCH, check_inputs, check_labels, classifier_outputs, device_of, in_passes, text_of
from .texts import NEW_TOKENS, grouped


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
        TensorSpec("image", "UINT8", (BATCH, model_names.IMAGE_SIZE, model_names.IMAGE_SIZE)),
    )

    def __post_init__(self) -> None:
        check_labels(self.labels, model_names.NUM_CLASSES)
        # Once: to set the mode of each of its modules takes as long as to predict two images.
        object.__setattr__(self, "forward", evaluation.plain_logits(self.model))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return classifier_outputs(model_names.NUM_CLASSES, self.num_features)

    @property
    def max_batch(self) -> int:
        return evaluation.CHUNK

    def decode(self, data: bytes, name: str) -> Tensor:
        return decode_image(BytesIO(data), name)

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        if not inputs:
            return []
        check_inputs(inputs, torch.uint8, (model_names.IMAGE_SIZE, model_names.IMAGE_SIZE))
        logits = self._logits(torch.stack(list(inputs)))
        return predictions_of(logits) if self.num_features is None else embeddings_of(logits)

    def _logits(self, pixels: Tensor) -> Tensor:
        like = next(self.model.parameters())

        def logits(images: Tensor) -> Tensor:
            return self.forward(images.to(like.device, like.dtype)).cpu()

        if self.is_exact:
            return evaluation.all_logits(logits, pixels)
        return torch.cat([logits(data.to_input(chunk)) for chunk in pixels.split(evaluation.CHUNK)]).float()


@dataclass(frozen=True, slots=True, eq=False)
class OurTexts:
    """Continues texts with the most probable byte each time, from the last ``CONTEXT`` bytes. Texts of one length are
    continued together. The experts of a mixture get the tokens of a whole batch at once, so ``has_experts`` gives each
    text a forward pass of its own."""

    model: nn.Module
    has_experts: bool = False
    new_bytes: int = NEW_TOKENS
    is_exact: bool = True

    inputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", "BYTES", (BATCH,)),)
    outputs: ClassVar[tuple[TensorSpec, ...]] = (TensorSpec("text", "BYTES", (BATCH,)),)
    labels: ClassVar[None] = None

    @property
    def max_batch(self) -> int:
        return 1 if self.has_experts else MAX_BATCH

    def decode(self, data: bytes, name: str) -> Tensor:
        """int64 [bytes]. Raises FormatError if not UTF-8, or empty."""
        if not text_of(data, name):
            raise FormatError(f"{name} is an empty text")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int64)

    def predict(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        check_inputs(inputs, torch.int64, (BATCH,))
        return grouped([each[-language_model.CONTEXT :] for each in inputs], len, self._continued)

    def _continued(self, inputs: Sequence[Tensor], length: int) -> Iterable[Prediction]:
        texts = torch.stack(list(inputs))
        written = in_passes(texts, self._written, max_batch=self.max_batch, is_exact=self.is_exact)[:, length:]
        # A text may end within a character.
        return [Prediction(text=bytes(row).decode(errors="replace")) for row in written.tolist()]

    @torch.inference_mode()
    def _written(self, texts: Tensor) -> Tensor:
        texts = texts.to(device_of(self.model))
        for _ in range(self.new_bytes):
            best = self.model(texts[:, -language_model.CONTEXT :])[:, -1].argmax(-1, keepdim=True)
            texts = torch.cat([texts, best], dim=1)
        return texts.cpu()
