"""Evaluation in chunks of a fixed size, so predictions of a run and of the file made from it are exactly equal.

For another number of rows a matrix product may use another kernel and round differently, which may change a prediction.
Every forward pass here has ``CHUNK`` samples; the last chunk is padded with copies of its last sample. Each rank
computes whole chunks, so results do not depend on the world size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.datasets import Samples, to_input

# 360 held-out digits are 12 chunks, which 2, 3 and 4 ranks divide evenly; one chunk takes about 15 ms.
CHUNK = 30

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Number of correct predictions of ``total`` held-out samples, and all predictions in dataset order."""

    correct: int
    total: int
    predicted: tuple[int, ...]

    def __post_init__(self) -> None:
        assert 0 <= self.correct <= self.total == len(self.predicted)

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


def evaluation_of(predicted: Tensor, labels: Tensor) -> Evaluation:
    """Compare predictions with labels, both int64 [n]."""
    correct = int((predicted == labels).sum())
    return Evaluation(correct, len(labels), tuple(predicted.tolist()))


def plain_logits(model: nn.Module) -> Logits:
    """Forward pass of an unsharded model in evaluation mode."""
    model.eval()

    @torch.no_grad()
    def logits(images: Tensor) -> Tensor:
        return model(images)

    return logits


def all_logits(logits: Logits, pixels: Tensor) -> Tensor:
    """Logits of uint8 [n, 28, 28], float32 [n, 10], computed in chunks in this process."""
    return torch.cat([logits(chunk) for chunk in to_input(padded(pixels)).split(CHUNK)])[: len(pixels)].float()


def padded(images: Tensor) -> Tensor:
    """Images padded to whole chunks with copies of the last one."""
    missing = -len(images) % CHUNK
    return torch.cat([images, images[-1:].expand(missing, *images.shape[1:])]) if missing else images


def evaluate(logits: Logits, samples: Samples, device: torch.device, *, rank: int, world_size: int) -> Evaluation:
    """Evaluate on all ranks of the default process group, with the same result on each. ``rank`` and ``world_size``
    select this rank's chunks. Ranks with the same ``rank`` make the same predictions."""
    predicted = rank_predictions(logits, samples.pixels, device, rank=rank, world_size=world_size)
    torch.distributed.all_reduce(predicted, torch.distributed.ReduceOp.MAX)
    return evaluation_of(predicted.cpu().flatten(), samples.labels.flatten())


def rank_predictions(logits: Logits, pixels: Tensor, device: torch.device, *, rank: int, world_size: int) -> Tensor:
    """Predictions of this rank's chunks, int64 [n] or [n, t], and 0 elsewhere: the maximum over ranks has all of them.
    A forward pass of a sharded model is collective, so each rank makes the same number: a rank without a chunk left
    repeats the first one."""
    chunks = pixels.split(CHUNK)
    each = pixels.shape[1:] if pixels.ndim == 2 else ()
    predicted = torch.zeros((len(pixels), *each), dtype=torch.int64, device=device)
    for mine in range(rank, rank + len(chunks), world_size):
        chunk = chunks[mine if mine < len(chunks) else 0]
        answer = logits(to_input(padded(chunk)).to(device)).argmax(-1)
        if mine < len(chunks):
            predicted[mine * CHUNK :][: len(chunk)] = answer[: len(chunk)]
    return predicted
