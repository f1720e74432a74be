"""Norms of gradients, and optimizers that resume, on the ranks of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.training.strategy_jobs import forget_groups, tiny_config, train
from training.config.schedule import schedule_for
from training.engines import create_engine
from training.engines.gradients import total_norm


def norm_of_weights(values: dict[str, Any]) -> tuple[float, int]:
    """The norm with the first weights as their own gradients, and the number of collectives for it."""
    config = tiny_config(Path("/run"), num_workers=torch.distributed.get_world_size(), **values)
    engine: Any = create_engine(config, schedule_for(10, 0.1), torch.device("cpu"))
    for weight in engine.model.parameters():
        weight.grad = weight.detach().clone()
    with CommDebugMode() as counted:
        norm = total_norm(weight.grad for weight in engine._counted())
    engine.close()
    return float(norm), counted.get_total_counts()


def fused_after_resuming(out: Path, first: dict[str, Any], others: list[dict[str, Any]]) -> list[bool]:
    """Whether the optimizers of other runs are fused after they resumed the first one."""
    config, found = tiny_config(out, model="cnn", **first), []
    train(config)
    for values in others:
        engine: Any = create_engine(tiny_config(out, model="cnn", **values), schedule_for(10, 0.1), torch.device("cpu"))
        engine.resume(config.out / "checkpoints/epoch_0001")
        owner = engine._engine if hasattr(engine, "_engine") else engine
        [fused] = [group["fused"] for group in owner.optimizer.param_groups]
        found.append(fused)
        engine.close()
    forget_groups()
    return found
