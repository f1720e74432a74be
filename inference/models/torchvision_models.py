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
from .image_classifiers import make_image_classifier
from .prediction import find_device, find_dtype
from .results import BATCH, TensorSpec
from .task import Task, TaskOptions
from .tensors import HOW_TO_BUILD, Network, RowShapes, TensorTask, call_in_order, make_tensor_task
from .uninitialized import SkipInitialisation

INPUTS_BY_TRANSFORMS: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
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
    default = weights.DEFAULT if hasattr(weights, "DEFAULT") else next(iter(weights))
    transforms = default.transforms()
    if not isinstance(transforms, ImageClassification):
        return _make_tensor_task(model, transforms, options)
    return make_image_classifier(model, transforms, default.meta["categories"], options)


def _make_tensor_task(model: nn.Module, transforms: Any, options: TaskOptions) -> TensorTask:
    """A model for another task than to classify images, by what ``transforms`` would give it. Raises UsageError if the
    task is unknown."""
    kind, passes = type(transforms).__name__, options.make_passes()
    if kind not in INPUTS_BY_TRANSFORMS:
        raise UsageError(f"a model of torchvision that is prepared by {kind} is not known here; {HOW_TO_BUILD}")
    names, shape = INPUTS_BY_TRANSFORMS[kind]
    inputs = tuple(TensorSpec(name, "FP32", (BATCH, *shape)) for name in names)
    gives_list = kind == "ObjectDetection"
    call = (lambda tensors: model(list(tensors["image"]))) if gives_list else call_in_order(model)
    examples: tuple[RowShapes, RowShapes] = ((), ())
    if kind == "VideoClassification":
        (size,) = {*transforms.crop_size}
        # A clip is as much work as many images.
        examples, passes = (((3, 16, size, size),),) * 2, replace(passes, full_size=1)
    network = Network(inputs, call, find_device(model), find_dtype(model), (), examples, gives_list=gives_list or None)
    return make_tensor_task(network, passes)
