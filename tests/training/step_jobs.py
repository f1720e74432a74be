"""Parts of a step on the ranks of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_tools.errors import UsageError
from tests.training.strategy_jobs import tiny_config
from training.config.schedule import schedule_for
from training.engines import create_engine
from training.engines.blocks import RunningAverages
from training.loop.saving import any_rank


def agree(reasons: list[tuple[bool, ...]]) -> tuple[tuple[bool, ...], int]:
    """Each rank knows its own reasons. What they agree on, and the elements that they exchange for it."""
    exchanged: list[int] = []
    all_reduce = torch.distributed.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        exchanged.append(tensor.numel())
        return all_reduce(tensor, *args, **keywords)

    torch.distributed.all_reduce = counted
    try:
        found = any_rank(*reasons[torch.distributed.get_rank()])
    finally:
        torch.distributed.all_reduce = all_reduce
    return found, sum(exchanged)


class Averages(nn.Module):
    """A running average, a count and a constant, on each rank its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((2,), float(rank)))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("constant", torch.tensor(float(rank)), persistent=False)


def average() -> list[tuple[list[float], int, float]]:
    """After each of two steps. A checkpoint that is loaded between them puts another tensor in the place of one."""
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(1, 1), Averages(rank))
    averages, found = RunningAverages(model), []
    for step in range(2):
        averages.average()
        own = model[1]
        found.append((own.mean.tolist(), int(own.count), float(own.constant)))
        own.mean = torch.full((2,), 10.0 * rank + step)
    return found


def refused_length() -> str:
    """Two workers compute each layer together, and a text has an odd number of bytes."""
    config = tiny_config(Path("/run"), model="lm", strategy="no_shard", tp=2)
    engine = create_engine(config, schedule_for(10, 0.1), torch.device("cpu"))
    words = torch.zeros(1, 33, dtype=torch.int64)
    try:
        engine.step((words, words))
    except UsageError as error:
        return str(error)
    finally:
        engine.close()
    return ""
