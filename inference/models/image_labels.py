"""Image classifiers of torchvision, timm and transformers, with their libraries' preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ckpt_tools.errors import UsageError

from ..common.errors import translate_file_errors
from .images import ImageReading, Mode, max_pixels_of
from .passes import InPasses, Passes
from .prediction import Activation, activation_of, classify_logits, embeddings_of, labels_of_config
from .results import BATCH, Array, Columns, ModelInput, TensorSpec
from .task import TaskOptions, check_inputs, check_labels, classifier_outputs

Prepare = Callable[[Image.Image], Tensor]  # from an image in ``mode`` to float32 [channels, height, width]


@dataclass(frozen=True, slots=True, eq=False)
class ImageLabels(InPasses):
    """Classifies images, float32 of ``shape``. ``logits`` is the forward pass of a batch. With ``num_features`` the
    model has no head and gives embeddings of that size."""

    model: nn.Module
    logits: Callable[[Tensor], Tensor]
    transform: Prepare
    shape: tuple[int, ...]
    num_classes: int
    labels: tuple[str, ...] | None
    passes: Passes
    activation: Activation = "softmax"
    num_features: int | None = None
    is_upright: bool = False
    max_pixels: int | None = None
    mode: Mode = "RGB"

    def __post_init__(self) -> None:
        check_labels(self.labels, self.num_classes)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("image", "FP32", (BATCH, *self.shape)),)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return classifier_outputs(self.num_classes, self.num_features)

    @property
    def reading(self) -> ImageReading:
        most = self.max_pixels or max_pixels_of(prod(self.shape[1:]))
        return ImageReading(self.mode, None, self.is_upright, most)

    def decode(self, data: bytes, name: str) -> Array:
        return self.prepare(self.reading.decode_pixels(data, name))

    def prepare(self, pixels: Array) -> Array:
        return self.transform(Image.fromarray(pixels)).numpy()

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        check_inputs(inputs, np.float32, self.shape)
        logits = self.passes.run(torch.from_numpy(np.stack(inputs)), self._forward, self._random)
        return classify_logits(logits, self.activation) if self.num_features is None else embeddings_of(logits)

    @torch.inference_mode()
    def _forward(self, images: Tensor) -> Tensor:
        like = next(self.model.parameters())
        return self.logits(images.to(like.device, like.dtype)).float().cpu()

    def _random(self, many: int) -> Tensor:
        return torch.randn(many, *self.shape, generator=torch.Generator().manual_seed(0))


def classifier_of(
    model: nn.Module, prepare: Prepare, known: Sequence[str], options: TaskOptions, mode: Mode = "RGB"
) -> ImageLabels:
    """A classifier of a library of images, whose shapes are found by one forward pass; ``known`` are the class names of
    the library's own weights. Raises UsageError if it gives anything but a row of numbers for an image."""
    example = prepare(Image.new(mode, (64, 64)))
    like = next(model.parameters())
    with torch.inference_mode():
        logits = model(example.unsqueeze(0).to(like.device, like.dtype))
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise UsageError("the model does not give a number for each class; load it with inference.load_model")
    num_classes = logits.shape[1]
    labels = tuple(known) if options.labels is None and len(known) == num_classes else options.labels
    return ImageLabels(model, model, prepare, tuple(example.shape), num_classes, labels, options.passes(), mode=mode)


def of_transformers(model: Any, folder: Path, labels: tuple[str, ...] | None, *, passes: Passes) -> ImageLabels:
    """A transformers image classifier. Raises FormatError as ``image_task``; or the model has no classes."""
    found = image_task(
        model,
        lambda images: model(pixel_values=images).logits,
        folder,
        num_classes=model.config.num_labels,
        labels=labels or labels_of_config(model.config),
        passes=passes,
    )
    return replace(found, activation=activation_of(model.config))


def image_task(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    folder: Path,
    *,
    num_classes: int,
    labels: tuple[str, ...] | None,
    passes: Passes,
) -> ImageLabels:
    """The task of a transformers image model, with the image processor beside the weights. Raises FormatError if there
    are no such settings."""
    import transformers

    told = "the preparation of images that preprocessor_config.json beside the weights says is not usable"
    with translate_file_errors(told):
        processor = transformers.AutoImageProcessor.from_pretrained(folder)

    def prepare(image: Image.Image) -> Tensor:
        return processor(images=image, return_tensors="pt")["pixel_values"][0]

    with translate_file_errors(told):
        shape = tuple(prepare(Image.new("RGB", (64, 64))).shape)
    return ImageLabels(model, forward, prepare, shape, num_classes, labels, passes, is_upright=True)
