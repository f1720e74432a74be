"""Models of timm, with the preparation and the class names of timm's ``config.json`` beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_tools.errors import FormatError, UsageError

from ..common.errors import translate_file_errors
from .architectures import Architecture, import_library, is_timm_name
from .config_folder import CONFIG, read_config
from .image_classifiers import ImageClassifier, make_image_classifier
from .images import ImageMode
from .prediction import find_device, find_dtype
from .results import BATCH, TensorSpec
from .task import Task, TaskOptions
from .tensors import Network, call_in_order, make_tensor_task
from .uninitialized import SkipInitialisation


def build_model(architecture: Architecture, folder: Path | None, dtype: torch.dtype | None) -> nn.Module:
    library, name = import_library("timm", "timm"), architecture.name
    described_name = read_config(folder).get("architecture")
    is_described = is_timm_name(described_name)
    # A name may end in a tag of weights: resnet18.a1_in1k
    if is_described and described_name != name.partition(".")[0]:
        raise UsageError(f"{folder}/{CONFIG} says that the weights are of timm:{described_name}, not of timm:{name}")
    where = f" as {folder}/{CONFIG} says" if is_described else ""
    try:
        with translate_file_errors(f"timm cannot build {name}{where}"), SkipInitialisation():
            place = f"local-dir:{folder}" if is_described else name
            return library.create_model(place, pretrained=False, **architecture.arguments).to(dtype=dtype)
    except FormatError as error:
        if is_described:
            raise
        raise UsageError(error.message) from error


def make_task(model: Any, options: TaskOptions) -> Task:
    """A classifier, with the preprocessing and the class names of its configuration; one without classes gives
    embeddings, or is answered by tensors. Raises FormatError if the configuration does not fit the model."""
    if getattr(model, "num_classes", 0) or options.model.embeddings:
        return _make_classifier(model, options)
    from timm import data

    size = data.resolve_model_data_config(model)["input_size"]
    inputs = (TensorSpec("image", "FP32", (BATCH, *size)),)
    network = Network(inputs, call_in_order(model), find_device(model), find_dtype(model))
    return make_tensor_task(network, options.make_passes())


def _make_classifier(model: Any, options: TaskOptions) -> ImageClassifier:
    from timm import data

    # A wrapper that gives maps of features alone has no such attribute.
    num_classes = getattr(model, "num_classes", None)
    with translate_file_errors("timm's preparation of images is not usable"):
        settings = data.resolve_model_data_config(model)
        transform = data.create_transform(**settings, is_training=False)
        mode: ImageMode = "L" if settings["input_size"][0] == 1 else "RGB"
        names = _read_class_names(model.pretrained_cfg, num_classes or 0)
        task = make_image_classifier(model, transform, names, options, mode)
    return replace(task, num_features=task.num_classes) if num_classes == 0 else task


def _read_class_names(config: Mapping[str, Any], num_classes: int) -> tuple[str, ...]:
    """Class names in ``label_names``, which is a list, or has numbers as keys and may have gaps."""
    from timm.data import CustomDatasetInfo

    if not config.get("label_names"):
        return ()
    names = CustomDatasetInfo(config["label_names"])
    return tuple(names.index_to_label_name(number) for number in range(num_classes) if names.has_label(number))
