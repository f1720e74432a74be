"""Standard loss and metrics of a batch, for models that say none of their own.

A batch is a pair of inputs and labels, or a mapping of the model's keyword arguments, as of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ckpt_tools.errors import UsageError

Call = Callable[..., Any]  # the model, or what computes it


def get_logits(output: Any) -> Tensor:
    """Logits in a model's output, which transformers wraps."""
    answer = output[0] if isinstance(output, tuple) else output
    return answer if isinstance(answer, Tensor) else answer.logits


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [n, ..., classes] and labels int64 [n, ...]."""
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def standard_loss(model: Call, batch: Any) -> Tensor:
    """Loss of a batch: for a pair, the cross entropy, plus the second value if the model gives a tuple (the balance of
    experts); for a mapping, the ``loss`` that the model gives. Raises ``UsageError`` if there is none."""
    if isinstance(batch, Mapping):
        return _own_loss(model(**batch))
    inputs, labels = unpack_pair(batch)
    output = model(inputs)
    loss = mean_loss(get_logits(output), labels)
    return loss + output[1] if isinstance(output, tuple) else loss


def _own_loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UsageError("the model gives no loss for a batch that is a mapping: return one with the model's function")
    return loss


def unpack_pair(batch: Any) -> tuple[Any, Tensor]:
    """Raises ``UsageError`` if the batch is not a pair of inputs and labels."""
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not is_pair or not isinstance(batch[1], Tensor) or batch[1].dtype != torch.int64:
        raise UsageError(
            "a batch is a pair of inputs and numbers of classes (int64), or a mapping of the model's arguments; for "
            "another one, let the function of the model return its loss too"
        )
    return batch[0], batch[1]


def standard_metrics(model: Call, batch: Any, loss: Callable[[Call, Any], Tensor]) -> dict[str, Tensor]:
    """Values of each sample, float [n]: of a pair with labels of classes, ``loss``, ``accuracy`` and, int64 [n, ...],
    ``predicted``; else the loss of the batch, 0-d."""
    if loss is not standard_loss or isinstance(batch, Mapping):
        return {"loss": loss(model, batch)}
    inputs, labels = unpack_pair(batch)
    logits = get_logits(model(inputs)).float()
    losses = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view_as(labels)
    predicted = logits.argmax(-1)
    right = (predicted == labels).double()
    return {
        "loss": losses.double().flatten(1).mean(1) if labels.ndim > 1 else losses,
        "accuracy": right.flatten(1).mean(1) if labels.ndim > 1 else right,
        "predicted": predicted,
    }


def batch_tensors(batch: Any) -> list[Tensor]:
    """Tensors of a batch."""
    return [each for each in torch.utils._pytree.tree_leaves(batch) if isinstance(each, Tensor)]
