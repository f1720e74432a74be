"""The norm of all gradients, clipping, and the scale under which fp16 loses none of them."""

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
    """The 2-norm over all elements on all ranks, 0-d, the same on every rank.

    Norms are gathered mesh by mesh: under tensor parallelism not every parameter is on the same one.
    """
    by_mesh: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    norms = [torch.stack([_whole(torch.linalg.vector_norm(one.float())) for one in same]) for same in by_mesh.values()]
    return torch.linalg.vector_norm(torch.cat(norms))


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def multiply(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    """Every gradient by the same factor, in place."""
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)


@dataclass(slots=True)
class LossScaler:
    """fp16 has no gradients under 6e-8. The loss is multiplied by a power of two. If a gradient overflows, the step is
    left out and the power is halved; after many good steps it is doubled. All ranks decide by the same norm."""

    scale: float = 2.0**16
    good_steps: int = 0

    GROWTH_STEPS = 2000

    def update(self, is_finite: bool) -> None:
        """After a step: ``is_finite`` says whether its gradients were."""
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.GROWTH_STEPS == 0:
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
