"""Engines: sharding, optimizer steps and checkpoints of a model, with FSDP2, DDP or DeepSpeed."""

from __future__ import annotations

import os

import torch

from ..config.schedule import Schedule
from ..config.train_config import TrainConfig
from .base import Engine, Progress

__all__ = ["Engine", "Progress", "create_engine"]


def create_engine(config: TrainConfig, schedule: Schedule, device: torch.device) -> Engine:
    """The engine of ``config``, over the default process group. DeepSpeed is imported only for its engines."""
    if config.pp > 1 and config.sharding.framework == "fsdp2":
        from .pipelined import PipelineEngine

        return PipelineEngine(config, schedule, device)
    if config.sharding.framework == "fsdp2":
        from .fsdp2 import Fsdp2Engine

        return Fsdp2Engine(config, schedule, device)
    # DeepSpeed reads it when imported, and warns on a machine without a GPU if it is not set.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if config.pp > 1:
        from .deepspeed_pipeline import DeepSpeedPipelineEngine

        return DeepSpeedPipelineEngine(config, schedule, device)
    from .deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config, schedule, device)
