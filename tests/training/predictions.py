"""Logits of a whole model, computed as a run evaluates."""

import torch
from torch import Tensor

from training.data.datasets import to_input
from training.loop.evaluation import CHUNK, Logits, pad_rows


def all_logits(logits: Logits, pixels: Tensor) -> Tensor:
    """Logits of uint8 [n, 28, 28], float32 [n, 10], computed in chunks in this process."""
    return torch.cat([logits(chunk) for chunk in to_input(pad_rows(pixels)).split(CHUNK)])[: len(pixels)].float()
