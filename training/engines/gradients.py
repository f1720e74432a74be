"""Norm, clipping and loss scale of the gradients of an engine that has no framework for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """2-norm over all ranks, float32, 0-d, on the device of the gradients, with one all-reduce: ``get_total_norm`` of
    DTensors has one a tensor, and refuses several meshes. Each of the ranks with the same shard adds its part of the
    square."""
    shards: defaultdict[int, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        shards[_copies(gradient)].append(_local(gradient))
    squares = [get_total_norm(same).double().square() / copies for copies, same in shards.items()]
    square = torch.stack(squares).sum()
    torch.distributed.all_reduce(square)
    return square.sqrt().float()


def _copies(gradient: Tensor) -> int:
    """Number of ranks with the same shard. Gradients of DDP are the same on all."""
    if not isinstance(gradient, DTensor):
        return torch.distributed.get_world_size()
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


@torch.no_grad()
def multiply(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply in place, without waiting for the device."""
    torch._foreach_mul_([_local(gradient) for gradient in gradients], factor)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Factor for the gradients, 0-d: at most 1, NaN if the norm is. 1e-6 is torch's value, and DeepSpeed's."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


@dataclass(slots=True)
class LossScaler:
    """Dynamic loss scale, because fp16 has no gradients under 6e-8. It is halved when a gradient overflows (that step
    is skipped), and doubled after GROWTH_STEPS good steps. All ranks use the same norm."""

    scale: float = 2.0**16
    good_steps: int = 0

    GROWTH_STEPS = 2000

    def update(self, is_finite: bool) -> None:
        """Called after each step; ``is_finite``: whether its gradients were."""
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.GROWTH_STEPS == 0:
            self.scale *= 2
