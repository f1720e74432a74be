"""What the loop asks of an engine: five methods and a number, each method called by every rank at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from ..checkpoints.progress import Progress as Progress
from ..models.zoo import added_loss_of, logits_of

Save = Callable[[Path], None]
"""Writes this rank's shards into a folder."""


class Engine(Protocol):
    """A sharded model with its optimizer and schedule, on this rank."""

    @property
    def data_rank(self) -> int:
        """Which share of the samples is this rank's; ranks of tensor and pipeline parallelism share one."""
        ...

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """One optimizer step on this rank's samples, in as many micro-batches as the run says; the mean loss over them,
        0-d, detached.

        ``inputs`` float32 [n, 1, 28, 28] and ``labels`` int64 [n], or both int64 [n, t] of a text; on the engine's
        device, n the same on every rank.
        """
        ...

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits in evaluation mode, float32 [n, classes] or [n, t, bytes]; collective: n is the same on every rank."""
        ...

    def save(self, folder: Path, progress: Progress) -> None:
        """Write this rank's shards into ``folder``, which exists and may be another folder on every rank."""
        ...

    def resume(self, checkpoint: Path | str) -> Progress:
        """Restore model, optimizer and schedule from a checkpoint of any format and world size at a path or URL, all
        of which every rank can read. Learning rate, schedule and weight decay are then the run's own, whatever the
        checkpoint says. Raises ``CkptError``."""
        ...

    def close(self) -> None:
        """Let go of what the framework keeps alive."""
        ...


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of every label, in float32."""
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """Of what a model returned, as it is differentiated."""
    loss, added = mean_loss(logits_of(output), labels), added_loss_of(output)
    return loss if added is None else loss + added


def mean_of(losses: list[Tensor]) -> Tensor:
    """Of the micro-batches of a step, 0-d. Of one alone nothing is computed."""
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


@runtime_checkable
class StagingEngine(Protocol):
    """An engine that can write a copy of its state while it trains on."""

    def staged(self, progress: Progress, group: ProcessGroup) -> Save:
        """Copy the state to this process' memory. The function that it gives writes the copy in any thread, with
        collectives of ``group``, and has to end before the next call."""
        ...
