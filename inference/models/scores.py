"""From logits to an answer, as the pipelines of transformers do it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ckpt_tools.errors import FormatError

from .prediction import predictions_of
from .results import Prediction

Activation = Literal["softmax", "sigmoid"]


def answers(logits: Tensor, activation: Activation) -> list[Prediction]:
    """The answer for each row of float32 [n, classes]. A sigmoid gives each class a probability of its own."""
    if activation == "softmax":
        return predictions_of(logits)
    # Row by row: of many elements at once, vector instructions take some and not the rest, which rounds otherwise.
    rows = [torch.sigmoid(row).tolist() for row in logits]
    return [Prediction(label, tuple(row)) for label, row in zip(logits.argmax(1).tolist(), rows, strict=True)]


def activation_of(config: Any) -> Activation:
    """What a configuration of transformers asks for. Raises FormatError for a regression, which has no classes."""
    if config.problem_type == "regression":
        raise FormatError("the model is a regression, which has no classes to predict")
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def labels_of_config(config: Any) -> tuple[str, ...] | None:
    """The names of the classes, if ``id2label`` has one for each."""
    found = {int(number): str(label) for number, label in (config.id2label or {}).items()}
    return tuple(found[number] for number in range(len(found))) if set(found) == set(range(config.num_labels)) else None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
