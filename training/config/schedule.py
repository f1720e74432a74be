"""Learning rate schedule: linear warm-up, then half a cosine or a line down to zero, or a constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ckpt_tools.errors import UsageError

from .references import Reference, arguments_of, called, is_function, resolved, text_of
from .train_config import TrainConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """Factor of the peak learning rate by the number of finished optimizer steps. A function of the user's gets this
    number and that of all steps, and has no other warm-up than its own."""

    warmup_steps: int
    total_steps: int
    shape: Reference = "cosine"

    def __post_init__(self) -> None:
        assert 0 <= self.warmup_steps < self.total_steps

    def factor(self, step: int) -> float:
        """In (0, 1] while training; 0 after the last step, unless it is constant."""
        if callable(self.shape):
            return self._own(step)
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return {
            "cosine": 0.5 * (1 + math.cos(math.pi * min(done, 1.0))),
            "linear": 1 - min(done, 1.0),
            "constant": 1.0,
        }[self.shape]

    def _own(self, step: int) -> float:
        found = called(self.shape, "schedule", step, self.total_steps)
        if not isinstance(found, int | float) or not math.isfinite(found):
            raise UsageError(f"--schedule {text_of(self.shape)} gives {found!r}, and a factor is a finite number")
        return float(found)

    def attach(self, optimizer: Optimizer) -> LambdaLR:
        """Scheduler of the optimizer, to be stepped after each optimizer step. The lambda must be a plain function:
        LambdaLR would save the attributes of a callable object in the checkpoint."""
        return LambdaLR(optimizer, lambda step: self.factor(step))


def schedule_for(total_steps: int, warmup_fraction: float, shape: Reference = "cosine") -> Schedule:
    """Schedule that warms up over this fraction of the run, at most all steps but one."""
    return Schedule(min(round(total_steps * warmup_fraction), total_steps - 1), total_steps, shape)


def schedule_of(config: TrainConfig, total_steps: int) -> Schedule:
    """Schedule of a run. Raises ``UsageError`` if its function cannot be imported."""
    shape: Reference | Callable[..., Any] = config.schedule
    if is_function(shape):
        shape = partial(resolved(shape, "schedule"), **arguments_of(config.schedule_arg, "schedule-arg"))
    return schedule_for(total_steps, config.warmup_fraction, shape)
