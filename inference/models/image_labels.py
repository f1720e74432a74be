"""Image classifiers of torchvision, timm and transformers, with their libraries' preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ckpt_tools.errors import UsageError

from ..common.errors import errors_of_files
from .images import ImageReading, Mode, max_pixels_of
from .passes import InPasses, Passes
from .prediction import Activation, activation_of, answers, embeddings_of, labels_of_config
from .results import BATCH, Array, Columns, Item, TensorSpec
from .task import Task, check_inputs, check_labels, classifier_outputs

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
        return self.prepare(self.reading.pixels(data, name))

    def prepare(self, pixels: Array) -> Array:
        return self.transform(Image.fromarray(pixels)).numpy()

    def predict(self, inputs: Sequence[Item]) -> Columns:
        check_inputs(inputs, np.float32, self.shape)
        logits = self.passes.run(torch.from_numpy(np.stack(inputs)), self._forward, self._random)
        return answers(logits, self.activation) if self.num_features is None else embeddings_of(logits)

    @torch.inference_mode()
    def _forward(self, images: Tensor) -> Tensor:
        like = next(self.model.parameters())
        return self.logits(images.to(like.device, like.dtype)).float().cpu()

    def _random(self, many: int) -> Tensor:
        return torch.randn(many, *self.shape, generator=torch.Generator().manual_seed(0))


def of_torchvision(model: nn.Module, name: str, labels: tuple[str, ...] | None, *, passes: Passes) -> Task:
    """A torchvision classifier, with the class names of its weights if their number fits; a model for another task is
    answered by tensors."""
    from torchvision.models import get_model_weights
    from torchvision.transforms._presets import ImageClassification

    weights: Any = get_model_weights(name)
    known = weights.DEFAULT if hasattr(weights, "DEFAULT") else next(iter(weights))
    transforms = known.transforms()
    if not isinstance(transforms, ImageClassification):
        from .networks import of_torchvision as by_tensors

        return by_tensors(model, transforms, passes)
    return _classifier(model, transforms, known.meta["categories"], labels, passes)


def of_timm(model: Any, labels: tuple[str, ...] | None, *, passes: Passes) -> ImageLabels:
    """A timm classifier, with the preprocessing and the class names of its configuration; one without classes gives
    embeddings. Raises FormatError if the configuration does not fit the model."""
    from timm import data

    # A wrapper that gives maps of features alone has no such attribute.
    num_classes = getattr(model, "num_classes", None)
    with errors_of_files("timm's preparation of images is not usable"):
        settings = data.resolve_model_data_config(model)
        transform = data.create_transform(**settings, is_training=False)
        mode: Mode = "L" if settings["input_size"][0] == 1 else "RGB"
        known = _labels_of_timm(model.pretrained_cfg, num_classes or 0)
        found = _classifier(model, transform, known, labels, passes, mode)
    return replace(found, num_features=found.num_classes) if num_classes == 0 else found


def _labels_of_timm(config: Mapping[str, Any], num_classes: int) -> tuple[str, ...]:
    """Class names in ``label_names``, which is a list, or has numbers as keys and may have gaps."""
    from timm.data import CustomDatasetInfo

    if not config.get("label_names"):
        return ()
    names = CustomDatasetInfo(config["label_names"])
    return tuple(names.index_to_label_name(number) for number in range(num_classes) if names.has_label(number))


def _classifier(
    model: nn.Module,
    prepare: Prepare,
    known: Sequence[str],
    labels: tuple[str, ...] | None,
    passes: Passes,
    mode: Mode = "RGB",
) -> ImageLabels:
    """A classifier whose shapes are found by one forward pass. Raises UsageError if it gives anything but a row of
    numbers for an image."""
    example = prepare(Image.new(mode, (64, 64)))
    like = next(model.parameters())
    with torch.inference_mode():
        logits = model(example.unsqueeze(0).to(like.device, like.dtype))
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise UsageError("the model does not give a number for each class; load it with inference.load_model")
    num_classes = logits.shape[1]
    if labels is None and len(known) == num_classes:
        labels = tuple(known)
    return ImageLabels(model, model, prepare, tuple(example.shape), num_classes, labels, passes, mode=mode)


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
    with errors_of_files(told):
        processor = transformers.AutoImageProcessor.from_pretrained(folder)

    def prepare(image: Image.Image) -> Tensor:
        return processor(images=image, return_tensors="pt")["pixel_values"][0]

    with errors_of_files(told):
        shape = tuple(prepare(Image.new("RGB", (64, 64))).shape)
    return ImageLabels(model, forward, prepare, shape, num_classes, labels, passes, is_upright=True)
