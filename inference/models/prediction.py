"""From logits to predictions, as transformers' pipelines do it."""

from __future__ import annotations

from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ckpt_tools.errors import FormatError

from .results import Columns

Activation = Literal["softmax", "sigmoid"]


def answers(logits: Tensor, activation: Activation = "softmax") -> Columns:
    """Label and probabilities for each row of float32 [n, classes]; a sigmoid gives independent ones."""
    if activation == "softmax":
        probabilities = torch.softmax(logits, dim=1)
    else:
        # Row by row: of many elements at once, vector instructions take some and not the rest, which rounds otherwise.
        probabilities = torch.stack([torch.sigmoid(row) for row in logits])
    return {"label": logits.argmax(1).numpy(), "probabilities": probabilities.numpy()}


def embeddings_of(features: Tensor) -> Columns:
    """An embedding for each row of float32 [n, features]."""
    return {"embedding": features.numpy()}


def activation_of(config: Any) -> Activation:
    """The activation of a transformers configuration. Raises FormatError for a regression."""
    if config.problem_type == "regression":
        raise FormatError("the model is a regression, which has no classes to predict")
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def labels_of_config(config: Any) -> tuple[str, ...] | None:
    """Class names of ``id2label``, if it has one for each class."""
    found = {int(number): str(label) for number, label in (config.id2label or {}).items()}
    return tuple(found[number] for number in range(len(found))) if set(found) == set(range(config.num_labels)) else None


def device_of(model: nn.Module) -> torch.device:
    return next((each.device for each in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
