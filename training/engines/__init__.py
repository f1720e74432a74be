"""Engines: sharding, optimizer steps and checkpoints of a model, with FSDP2, DDP or DeepSpeed."""

from __future__ import annotations

import os

import torch

from ..config.train_config import TrainConfig
from .base import Engine, RunProgress
from .optimizers import LearningRateSchedule

__all__ = ["Engine", "RunProgress", "create_engine"]


def create_engine(config: TrainConfig, schedule: LearningRateSchedule, device: torch.device) -> Engine:
    """The engine of ``config``, over the default process group. DeepSpeed is imported only for its engines."""
    # torch's precision of float32 products and its determinism are those of the whole process.
    torch.set_float32_matmul_precision(config.matmul_precision)
    torch.backends.cudnn.allow_tf32 = config.matmul_precision != "highest"  # convolutions; True is the default
    torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    if config.pp > 1 and config.sharding.framework == "fsdp2":
        from .fsdp2_pipeline import Fsdp2PipelineEngine

        return Fsdp2PipelineEngine(config, schedule, device)
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
