"""The learning rate: linear warm-up, then half a cosine or a line down to zero, or no change."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .options import ScheduleName


@dataclass(frozen=True, slots=True)
class Schedule:
    """The factor of the peak learning rate as a function of the number of finished optimizer steps."""

    warmup_steps: int
    total_steps: int
    shape: ScheduleName = "cosine"

    def __post_init__(self) -> None:
        assert 0 <= self.warmup_steps < self.total_steps

    def factor(self, step: int) -> float:
        """In (0, 1] while training; unless it is constant, the step after the last one has 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return {
            "cosine": 0.5 * (1 + math.cos(math.pi * min(done, 1.0))),
            "linear": 1 - min(done, 1.0),
            "constant": 1.0,
        }[self.shape]

    def attach(self, optimizer: Optimizer) -> LambdaLR:
        """A scheduler over the optimizer, to be stepped after each optimizer step.

        The lambda is a plain function on purpose: LambdaLR saves None for it, where a callable object's attributes
        would be saved as part of the checkpoint.
        """
        return LambdaLR(optimizer, lambda step: self.factor(step))


def schedule_for(total_steps: int, warmup_fraction: float, shape: ScheduleName = "cosine") -> Schedule:
    """Warm up over the given part of the run, at most all steps but one."""
    return Schedule(min(round(total_steps * warmup_fraction), total_steps - 1), total_steps, shape)
