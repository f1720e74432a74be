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
from .images import ImageMode, ImageReading, choose_max_pixels
from .passes import BatchedTask, ForwardPasses
from .prediction import Activation, choose_activation, classify_logits, make_embeddings, read_config_labels
from .results import BATCH, Array, Columns, ModelInput, TensorSpec
from .task import TaskOptions, check_inputs, check_labels, list_classifier_outputs

ImagePreparation = Callable[[Image.Image], Tensor]  # from an image in ``mode`` to float32 [channels, height, width]


@dataclass(frozen=True, slots=True, eq=False)
class ImageClassifier(BatchedTask):
    """Classifies images, float32 of ``shape``. ``logits`` is the forward pass of a batch. With ``num_features`` the
    model has no head and gives embeddings of that size."""

    model: nn.Module
    logits: Callable[[Tensor], Tensor]
    transform: ImagePreparation
    shape: tuple[int, ...]
    num_classes: int
    labels: tuple[str, ...] | None
    passes: ForwardPasses
    activation: Activation = "softmax"
    num_features: int | None = None
    is_upright: bool = False
    max_pixels: int | None = None
    mode: ImageMode = "RGB"

    def __post_init__(self) -> None:
        check_labels(self.labels, self.num_classes)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("image", "FP32", (BATCH, *self.shape)),)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return list_classifier_outputs(self.num_classes, self.num_features)

    @property
    def reading(self) -> ImageReading:
        most = self.max_pixels or choose_max_pixels(prod(self.shape[1:]))
        return ImageReading(self.mode, None, self.is_upright, most)

    def decode(self, data: bytes, name: str) -> Array:
        return self.prepare(self.reading.decode_pixels(data, name))

    def prepare(self, pixels: Array) -> Array:
        return self.transform(Image.fromarray(pixels)).numpy()

    def predict(self, inputs: Sequence[ModelInput]) -> Columns:
        check_inputs(inputs, np.float32, self.shape)
        logits = self.passes.run(torch.from_numpy(np.stack(inputs)), self._forward, self._draw_images)
        return classify_logits(logits, self.activation) if self.num_features is None else make_embeddings(logits)

    @torch.inference_mode()
    def _forward(self, images: Tensor) -> Tensor:
        weight = next(self.model.parameters())
        return self.logits(images.to(weight.device, weight.dtype)).float().cpu()

    def _draw_images(self, num_images: int) -> Tensor:
        return torch.randn(num_images, *self.shape, generator=torch.Generator().manual_seed(0))


def make_image_classifier(
    model: nn.Module, prepare: ImagePreparation, names: Sequence[str], options: TaskOptions, mode: ImageMode = "RGB"
) -> ImageClassifier:
    """A classifier of a library of images, whose shapes are found by one forward pass; ``names`` are the class names of
    the library's own weights. Raises UsageError if it gives anything but a row of numbers for an image."""
    example = prepare(Image.new(mode, (64, 64)))
    weight = next(model.parameters())
    with torch.inference_mode():
        logits = model(example.unsqueeze(0).to(weight.device, weight.dtype))
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise UsageError("the model does not give a number for each class; load it with inference.load_model")
    num_classes = logits.shape[1]
    labels = tuple(names) if options.labels is None and len(names) == num_classes else options.labels
    shape, passes = tuple(example.shape), options.make_passes()
    return ImageClassifier(model, model, prepare, shape, num_classes, labels, passes, mode=mode)


def make_hf_classifier(
    model: Any, folder: Path, labels: tuple[str, ...] | None, *, passes: ForwardPasses
) -> ImageClassifier:
    """A transformers image classifier. Raises FormatError as ``make_image_task``; or the model has no classes."""
    task = make_image_task(
        model,
        lambda images: model(pixel_values=images).logits,
        folder,
        num_classes=model.config.num_labels,
        labels=labels or read_config_labels(model.config),
        passes=passes,
    )
    return replace(task, activation=choose_activation(model.config))


def make_image_task(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    folder: Path,
    *,
    num_classes: int,
    labels: tuple[str, ...] | None,
    passes: ForwardPasses,
) -> ImageClassifier:
    """The task of a transformers image model, with the image processor beside the weights. Raises FormatError if there
    are no such settings."""
    import transformers

    refusal = "the preparation of images that preprocessor_config.json beside the weights says is not usable"
    with translate_file_errors(refusal):
        processor = transformers.AutoImageProcessor.from_pretrained(folder)

    def prepare(image: Image.Image) -> Tensor:
        return processor(images=image, return_tensors="pt")["pixel_values"][0]

    with translate_file_errors(refusal):
        shape = tuple(prepare(Image.new("RGB", (64, 64))).shape)
    return ImageClassifier(model, forward, prepare, shape, num_classes, labels, passes, is_upright=True)
