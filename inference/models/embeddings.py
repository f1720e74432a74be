"""A model that tells classes apart, asked for what its last layer gets instead of the classes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from .task import Task


def as_embeddings(task: Task) -> Task:
    """The same task without the last layer of its model, which is taken out. A task that gives embeddings stays.

    Raises:
        UsageError: the model has no linear layer that gives its classes.
    """
    from .image_labels import ImageLabels
    from .our_images import OurImages
    from .texts import TextLabels

    if not isinstance(task, ImageLabels | OurImages | TextLabels):
        raise UsageError("--embeddings is for a model that tells classes apart, and for an encoder without a head")
    if task.num_features is not None:
        return task
    num_classes = next(spec.shape[1] for spec in task.outputs if spec.name == "probabilities")
    return replace(task, num_features=_take_head(task.model, num_classes), labels=None)


def _take_head(model: nn.Module, num_classes: int) -> int:
    """Put an identity in the place of the last linear layer; how many features go into it."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == num_classes
    ]
    if not found:
        raise UsageError("the model does not end in a linear layer, so it is not clear what an embedding is")
    name, head = found[-1]
    model.set_submodule(name, nn.Identity())
    return head.in_features
