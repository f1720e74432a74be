"""The optimizer of a run: torch's, by name, or one that a function of the user's makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from ckpt_tools.errors import UsageError

from ..config.options import OptimizerName
from ..config.references import arguments_of, called, is_function, text_of
from ..config.train_config import TrainConfig

CLASSES: Mapping[OptimizerName, type[Optimizer]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD}


def is_fused(config: TrainConfig, device: torch.device) -> bool:
    """Whether torch's optimizers run as one kernel: on CUDA, and for offloaded state, where AdamW is as fast as
    DeepSpeed's CPU Adam. On a CPU alone they do not: there the last bits depend on how a shard is cut."""
    return device.type == "cuda" or (device.type == "cpu" and (config.cpu_offload or config.sharding.offload))


def optimizer_of(config: TrainConfig, groups: Sequence[Mapping[str, Any]], device: torch.device) -> Optimizer:
    """The optimizer over these groups of parameters. Raises ``UsageError`` if it takes other arguments."""
    arguments = optimizer_arguments(config)
    if not is_function(config.optimizer):
        plain = {} if "foreach" in arguments else {"fused": is_fused(config, device)}
        kind: Any = CLASSES[text_of(config.optimizer)]  # type: ignore[index]
        return called(kind, "optimizer", list(groups), **plain | arguments)
    found = called(config.optimizer, "optimizer", list(groups), **arguments)
    if not isinstance(found, Optimizer):
        raise UsageError(f"--optimizer {text_of(config.optimizer)} gives {type(found).__name__}, not an Optimizer")
    return found


def optimizer_arguments(config: TrainConfig) -> dict[str, Any]:
    """Keyword arguments, as torch names them. Raises ``UsageError``."""
    given = arguments_of(config.optimizer_arg, "optimizer-arg")
    for name, option in (("lr", "learning-rate"), ("weight_decay", "weight-decay")):
        if name in given:
            raise UsageError(f"--optimizer-arg {name}: give --{option}")
    return {"lr": config.learning_rate, "weight_decay": config.weight_decay, **given}
