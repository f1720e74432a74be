"""What the loop asks of an engine: five methods, each called by every rank at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.distributed import ProcessGroup

from ..progress import Progress as Progress

Save = Callable[[Path], None]
"""Writes this rank's shards into a folder."""


class Engine(Protocol):
    """A sharded model with its optimizer and schedule, on this rank."""

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One optimizer step on this rank's samples; the mean loss over them, 0-d, detached.

        ``images`` float32 [n, 1, 28, 28], ``labels`` int64 [n], on the engine's device, n the same on every rank.
        """
        ...

    def logits(self, images: Tensor) -> Tensor:
        """Logits in evaluation mode, float32 [n, 10]; collective, so n is the same on every rank."""
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


@runtime_checkable
class StagingEngine(Protocol):
    """An engine that can write a copy of its state while it trains on."""

    def staged(self, progress: Progress, group: ProcessGroup) -> Save:
        """Copy the state to this process' memory. The function that it gives writes the copy in any thread, with
        collectives of ``group``, and has to end before the next call."""
        ...
