"""Interface between the loop and an engine; every rank calls each method at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from ..checkpoints.progress import Progress as Progress
from ..config.options import Precision
from ..models.zoo import added_loss_of, logits_of

DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Save = Callable[[Path], None]  # function that writes this rank's shards into a folder


class Engine(Protocol):
    """A sharded model with its optimizer and scheduler, on this rank."""

    @property
    def data_rank(self) -> int:
        """Number of this rank's share of the samples; ranks of a tensor or pipeline group have the same."""

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """One optimizer step on this rank's samples, in ``gradient_accumulation`` micro-batches; the mean loss, 0-d,
        detached. ``inputs`` float32 [n, 1, 28, 28] and ``labels`` int64 [n], or both int64 [n, t] for text; on the
        engine's device, with the same n on every rank."""

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits in evaluation mode, float32 [n, classes] or [n, t, bytes]; collective, with one n for all ranks."""

    def save(self, folder: Path, progress: Progress) -> None:
        """Write this rank's shards into ``folder``, which exists and may differ between ranks."""

    def resume(self, checkpoint: Path | str) -> Progress:
        """Restore model, optimizer and scheduler from a checkpoint of any format and world size, which every rank can
        read. Learning rate, schedule and weight decay stay those of the run. Raises ``CkptError``."""

    def close(self) -> None:
        """Release the framework's resources."""


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """Loss of a model's output, with its auxiliary loss."""
    loss, added = mean_loss(logits_of(output), labels), added_loss_of(output)
    return loss if added is None else loss + added


def mean_of(losses: list[Tensor]) -> Tensor:
    """Mean over the micro-batches of a step, 0-d; a single loss is returned as it is."""
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


@runtime_checkable
class StagingEngine(Protocol):
    """An engine that can save in the background."""

    def staged(self, progress: Progress, group: ProcessGroup) -> Save:
        """Copy the state to CPU memory; the result writes it in any thread, before the next call."""
