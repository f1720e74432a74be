"""The optimizer of a run: torch's, by name, or one that a function of the user's makes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ckpt_tools.errors import UsageError

from ..config.options import OptimizerName
from ..config.references import Reference, call_function, import_function, is_function, parse_arguments, text_of
from ..config.train_config import TrainConfig

CLASSES: Mapping[OptimizerName, type[Optimizer]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD}


def is_fused(config: TrainConfig, device: torch.device) -> bool:
    """Whether torch's optimizers run as one kernel: on CUDA, and for offloaded state, where AdamW is as fast as
    DeepSpeed's CPU Adam. On a CPU alone they do not: there the last bits depend on how a shard is cut."""
    return device.type == "cuda" or (device.type == "cpu" and (config.cpu_offload or config.sharding.offload))


def make_optimizer(config: TrainConfig, groups: Sequence[Mapping[str, Any]], device: torch.device) -> Optimizer:
    """The optimizer over these groups of parameters. Raises ``UsageError`` if it takes other arguments."""
    arguments = optimizer_arguments(config)
    if not is_function(config.optimizer):
        plain = {} if "foreach" in arguments else {"fused": is_fused(config, device)}
        kind: Any = CLASSES[text_of(config.optimizer)]  # type: ignore[index]
        return call_function(kind, "optimizer", list(groups), **plain | arguments)
    optimizer = call_function(config.optimizer, "optimizer", list(groups), **arguments)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"--optimizer {text_of(config.optimizer)} gives {type(optimizer).__name__}, not an Optimizer")
    return optimizer


def optimizer_arguments(config: TrainConfig) -> dict[str, Any]:
    """Keyword arguments, as torch names them. Raises ``UsageError``."""
    arguments = parse_arguments(config.optimizer_arg, "optimizer-arg")
    for name, option in (("lr", "learning-rate"), ("weight_decay", "weight-decay")):
        if name in arguments:
            raise UsageError(f"--optimizer-arg {name}: give --{option}")
    return {"lr": config.learning_rate, "weight_decay": config.weight_decay, **arguments}


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """Factor of the peak learning rate by the number of finished optimizer steps. A function of the user's gets this
    number and that of all steps, and has no other warm-up than its own."""

    warmup_steps: int
    total_steps: int
    shape: Reference = "cosine"

    def __post_init__(self) -> None:
        assert 0 <= self.warmup_steps < self.total_steps

    def compute_factor(self, step: int) -> float:
        """In (0, 1] while training; 0 after the last step, unless it is constant."""
        if callable(self.shape):
            return self._call_own_function(step)
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return {
            "cosine": 0.5 * (1 + math.cos(math.pi * min(done, 1.0))),
            "linear": 1 - min(done, 1.0),
            "constant": 1.0,
        }[self.shape]

    def _call_own_function(self, step: int) -> float:
        factor = call_function(self.shape, "schedule", step, self.total_steps)
        if not isinstance(factor, int | float) or not math.isfinite(factor):
            raise UsageError(f"--schedule {text_of(self.shape)} gives {factor!r}, and a factor is a finite number")
        return float(factor)

    def make_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """Scheduler of the optimizer, to be stepped after each optimizer step. The lambda must be a plain function:
        LambdaLR would save the attributes of a callable object in the checkpoint."""
        return LambdaLR(optimizer, lambda step: self.compute_factor(step))


def make_warmup_schedule(total_steps: int, warmup_fraction: float, shape: Reference = "cosine") -> LearningRateSchedule:
    """Schedule that warms up over this fraction of the run, at most all steps but one."""
    return LearningRateSchedule(min(round(total_steps * warmup_fraction), total_steps - 1), total_steps, shape)


def make_schedule(config: TrainConfig, total_steps: int) -> LearningRateSchedule:
    """Schedule of a run. Raises ``UsageError`` if its function cannot be imported."""
    shape: Reference | Callable[..., Any] = config.schedule
    if is_function(shape):
        shape = partial(import_function(shape, "schedule"), **parse_arguments(config.schedule_arg, "schedule-arg"))
    return make_warmup_schedule(total_steps, config.warmup_fraction, shape)


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """2-norm over all ranks, float32, 0-d, on the device of the gradients, with one all-reduce: ``get_total_norm`` of
    DTensors has one a tensor, and refuses several meshes. Each of the ranks with the same shard adds its part of the
    square."""
    shards: defaultdict[int, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        shards[_count_copies(gradient)].append(_local_part(gradient))
    squares = [get_total_norm(same).double().square() / copies for copies, same in shards.items()]
    square = torch.stack(squares).sum()
    torch.distributed.all_reduce(square)
    return square.sqrt().float()


def _count_copies(gradient: Tensor) -> int:
    """Number of ranks with the same shard. Gradients of DDP are the same on all."""
    if not isinstance(gradient, DTensor):
        return torch.distributed.get_world_size()
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


@torch.no_grad()
def scale_gradients(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply in place, without waiting for the device."""
    torch._foreach_mul_([_local_part(gradient) for gradient in gradients], factor)


def _local_part(gradient: Tensor) -> Tensor:
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

    def update_scale(self, is_finite: bool) -> None:
        """Called after each step; ``is_finite``: whether its gradients were."""
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.GROWTH_STEPS == 0:
            self.scale *= 2
