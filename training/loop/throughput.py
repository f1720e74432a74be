"""Tokens and arithmetic of a sample, for tokens a second and the model FLOPs utilization (MFU) in the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from ..config.train_config import TrainConfig
from ..models.losses import leaves
from ..models.zoo import spec_of

PEAK_TFLOPS = {
    "A100": 312,
    "H100 PCIe": 756,
    "H100": 989,
    "H200": 989,
    "L40S": 362,
    "B200": 2250,
}
"""Dense peak in bf16 and fp16 by a part of the GPU's name, from NVIDIA's data sheets."""

BACKWARD = 2  # times the arithmetic of the forward pass


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of a sample, 0 if it is no text, and the share of a worker's peak for each sample a second; 0 if the peak
    or the arithmetic is not known."""

    tokens: int = 0
    share: float = 0.0

    def entries(self, samples_per_second: float) -> dict[str, float]:
        found = {"tokens_per_second": self.tokens, "mfu": self.share}
        return {name: each * samples_per_second for name, each in found.items() if each}


def work_of(config: TrainConfig, batch: Any) -> Work:
    """From the first batch of a run."""
    tensors = leaves(batch)
    words = next((each for each in tensors if each.ndim == 2 and each.dtype == torch.int64), None)
    tokens = 0 if words is None else words.shape[1]
    peak = config.peak_tflops or _known_peak(config)
    flops = flops_of(config, batch) / len(tensors[0]) if peak else 0.0
    return Work(tokens, flops / (peak * 1e12 * config.num_workers) if peak else 0.0)


def _known_peak(config: TrainConfig) -> float:
    if not torch.cuda.is_available() or config.precision == "fp32":
        return 0.0
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_TFLOPS.items() if all(word in name for word in part.split())), 0.0)


def flops_of(config: TrainConfig, batch: Any) -> float:
    """FLOPs of matrix products of a step on this batch, without what activation checkpointing computes again. They are
    counted on a model without memory; 0 if that cannot compute, as one that reads values of its tensors."""
    empty = tree_map_only(Tensor, lambda each: torch.empty_like(each, device="meta"), batch)
    try:
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            made = spec_of(config).make()
            made.loss(made.module, empty)
    except Exception:
        # A model of the user's may raise anything.
        return 0.0
    return float((1 + BACKWARD) * counter.get_total_flops())
