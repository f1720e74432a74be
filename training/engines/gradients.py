"""Gradient norm, scaling of gradients, and the loss scale of fp16."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """2-norm over all ranks, 0-d. With tensor parallelism, parameters are on several meshes, so norms are stacked for
    each mesh."""
    by_mesh: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    norms = [torch.stack([_whole(torch.linalg.vector_norm(one.float())) for one in same]) for same in by_mesh.values()]
    return torch.linalg.vector_norm(torch.cat(norms))


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def multiply(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply every gradient in place."""
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)


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

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
