"""Interface between the loop and an engine; every rank calls each method at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..checkpoints.progress import Progress as Progress
from ..config.options import Precision

DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Metrics = Callable[[Callable[..., Any], Any], Mapping[str, Tensor]]
"""Metrics of a batch, from what computes the model, and the batch: a value of each sample [n], or their mean, 0-d."""

Save = Callable[[Path], None]  # function that writes this rank's shards into a folder


class Engine(Protocol):
    """A sharded model with its optimizer and scheduler, on this rank."""

    data_rank: int
    """Number of this rank's share of the samples; ranks of a tensor or pipeline group have the same."""

    loss: Callable[[Callable[..., Any], Any], Tensor]
    """Loss of a batch, from what computes the model and the batch."""

    def step(self, batch: Any) -> Tensor:
        """One optimizer step on this rank's samples, in ``gradient_accumulation`` micro-batches; the mean loss, 0-d,
        detached. ``batch`` is a tree of tensors [n, ...] on the engine's device, with the same n on every rank."""

    def evaluated(self, metrics: Metrics, batch: Any) -> Mapping[str, Tensor]:
        """``metrics`` of the model in evaluation mode and the batch; collective."""

    def save(self, folder: Path, progress: Progress) -> None:
        """Write this rank's shards into ``folder``, which exists and may differ between ranks."""

    def resume(self, checkpoint: Path | str) -> Progress:
        """Restore model, optimizer and scheduler from a checkpoint of any format and world size, which every rank can
        read. Learning rate, schedule and weight decay stay those of the run. Raises ``CkptError``."""

    def close(self) -> None:
        """Release the framework's resources."""


def micro_batches(batch: Any, parts: int) -> list[Any]:
    """The batch cut into parts of equal size."""
    if parts == 1:
        return [batch]
    leaves, tree = tree_flatten(batch)
    return [tree_unflatten(list(each), tree) for each in zip(*(leaf.chunk(parts) for leaf in leaves), strict=True)]


def mean_of(losses: list[Tensor]) -> Tensor:
    """Mean over the micro-batches of a step, 0-d; a single loss is returned as it is."""
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]
