"""Logits of a whole model, computed as a run evaluates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from training.data.datasets import to_input
from training.loop.evaluation import CHUNK, padded

Logits = Callable[[Tensor], Tensor]


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
