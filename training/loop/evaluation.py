"""Predictions in fixed chunks, so that a run's own accuracy and that of the file made from it can be compared exactly.

A matrix product may choose another kernel, and so another rounding, for another number of rows; near a tie that moves
a prediction. Every forward pass here has the same shape, ``CHUNK`` images: chunk ``k`` holds samples ``k * CHUNK`` on,
and the last one is padded with copies of its last image. A run deals whole chunks to its ranks, so rank and world
size change who computes a chunk and never what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.datasets import Samples, to_input

# 360 held-out digits are 12 chunks, an even deal for 2, 3 and 4 ranks; a posted image costs one chunk, about 15 ms.
CHUNK = 30

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How many of ``total`` held-out samples were predicted right, and every prediction in dataset order."""

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
    """The forward pass of an unsharded model in evaluation mode."""
    model.eval()

    @torch.no_grad()
    def logits(images: Tensor) -> Tensor:
        return model(images)

    return logits


def all_logits(logits: Logits, pixels: Tensor) -> Tensor:
    """Logits of uint8 [n, 28, 28], float32 [n, 10], one chunk at a time in this process."""
    return torch.cat([logits(chunk) for chunk in to_input(padded(pixels)).split(CHUNK)])[: len(pixels)].float()


def padded(images: Tensor) -> Tensor:
    """Images up to whole chunks, the last of which is filled up with copies of its last image."""
    missing = -len(images) % CHUNK
    return torch.cat([images, images[-1:].expand(missing, *images.shape[1:])]) if missing else images


def evaluate(logits: Logits, samples: Samples, device: torch.device, *, rank: int, world_size: int) -> Evaluation:
    """Evaluate over all ranks of the default process group; every sample counts once, on every rank the same result.

    ``rank`` of ``world_size`` says which chunks are this rank's. Ranks that share chunks find the same predictions.
    """
    predicted = rank_predictions(logits, samples.pixels, device, rank=rank, world_size=world_size)
    torch.distributed.all_reduce(predicted, torch.distributed.ReduceOp.MAX)
    return evaluation_of(predicted.cpu().flatten(), samples.labels.flatten())


def rank_predictions(logits: Logits, pixels: Tensor, device: torch.device, *, rank: int, world_size: int) -> Tensor:
    """Predictions of this rank's chunks, int64 [n], or [n, t] of a text; 0 for the samples of other ranks, so that the
    highest over all ranks are all of them.

    A forward pass of a sharded model is collective: each rank makes as many as the others, so a rank without a chunk
    left repeats the first one and its answer is not used.
    """
    chunks = pixels.split(CHUNK)
    each = pixels.shape[1:] if pixels.ndim == 2 else ()
    predicted = torch.zeros((len(pixels), *each), dtype=torch.int64, device=device)
    for mine in range(rank, rank + len(chunks), world_size):
        chunk = chunks[mine if mine < len(chunks) else 0]
        answer = logits(to_input(padded(chunk)).to(device)).argmax(-1)
        if mine < len(chunks):
            predicted[mine * CHUNK :][: len(chunk)] = answer[: len(chunk)]
    return predicted
