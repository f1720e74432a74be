"""Models of torchvision: classifiers of images, and other tasks by tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_tools.errors import FormatError, UsageError

from ..common.errors import translate_file_errors
from .architectures import Architecture, import_library
from .image_labels import classifier_of
from .prediction import device_of, dtype_of
from .results import BATCH, TensorSpec
from .task import Task, TaskOptions
from .tensors import HOW_TO_BUILD, Network, Shapes, Tensors, call_in_order, tensors_of
from .uninitialized import SkipInitialisation

OF_TORCHVISION: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "ObjectDetection": (("image",), (3, BATCH, BATCH)),
    "SemanticSegmentation": (("image",), (3, BATCH, BATCH)),
    "OpticalFlow": (("image1", "image2"), (3, BATCH, BATCH)),
    "StereoMatching": (("left_image", "right_image"), (3, BATCH, BATCH)),
    "VideoClassification": (("video",), (3, BATCH, BATCH, BATCH)),
}
"""Names and row shape of the inputs of torchvision's models, by the class that prepares them."""


def build_model(architecture: Architecture, folder: Path | None, dtype: torch.dtype | None) -> nn.Module:
    library = import_library("torchvision.models", "torchvision")
    try:
        with translate_file_errors(f"torchvision cannot build {architecture.name}"), SkipInitialisation():
            # Of a backbone it would download the weights, which the checkpoint has.
            has_backbone = "weights_backbone" in signature(library.get_model_builder(architecture.name)).parameters
            weights = {"weights": None} | ({"weights_backbone": None} if has_backbone else {})
            return library.get_model(architecture.name, **weights, **architecture.arguments).to(dtype=dtype)
    except FormatError as error:
        raise UsageError(error.message) from error


def make_task(model: nn.Module, options: TaskOptions) -> Task:
    """A classifier, with the class names of its weights if their number fits; a model for another task is answered by
    tensors."""
    from torchvision.models import get_model_weights
    from torchvision.transforms._presets import ImageClassification

    weights: Any = get_model_weights(options.architecture.name)
    known = weights.DEFAULT if hasattr(weights, "DEFAULT") else next(iter(weights))
    transforms = known.transforms()
    if not isinstance(transforms, ImageClassification):
        return _task_by_tensors(model, transforms, options)
    return classifier_of(model, transforms, known.meta["categories"], options)


def _task_by_tensors(model: nn.Module, transforms: Any, options: TaskOptions) -> Tensors:
    """A model for another task than to classify images, by what ``transforms`` would give it. Raises UsageError if the
    task is unknown."""
    kind, passes = type(transforms).__name__, options.passes()
    if kind not in OF_TORCHVISION:
        raise UsageError(f"a model of torchvision that is prepared by {kind} is not known here; {HOW_TO_BUILD}")
    names, shape = OF_TORCHVISION[kind]
    inputs = tuple(TensorSpec(name, "FP32", (BATCH, *shape)) for name in names)
    is_listed = kind == "ObjectDetection"
    call = (lambda given: model(list(given["image"]))) if is_listed else call_in_order(model)
    examples: tuple[Shapes, Shapes] = ((), ())
    if kind == "VideoClassification":
        (size,) = {*transforms.crop_size}
        # A clip is as much work as many images.
        examples, passes = (((3, 16, size, size),),) * 2, replace(passes, full=1)
    network = Network(inputs, call, device_of(model), dtype_of(model), (), examples, is_listed=is_listed or None)
    return tensors_of(network, passes)
