"""Short runs of strategies on the ranks of a pool: two epochs of two steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fixtures.launch import pool
from tests.training.checkpoint_jobs import AskedAfter
from tests.training.jobs import SECONDS
from training.config.train_config import TrainConfig
from training.launchers.torchrun import run_rank

BATCH_SIZE = 16
STEPS = 2
EPOCHS = 2


def tiny_config(out: Path, **values: Any) -> TrainConfig:
    """Two epochs of two steps."""
    size = {"num_samples": BATCH_SIZE * STEPS, "batch_size": BATCH_SIZE, "epochs": EPOCHS, "num_workers": 2}
    data = {"dataset": "text"} if str(values.get("model")).startswith(("lm", "hf:")) else {}
    return TrainConfig(out=out, launcher="torchrun", **(size | data | values))


def train_each(num_ranks: int, *configs: TrainConfig, questions: int = sys.maxsize) -> None:
    """Run them one after the other, each as a job of its own, so that a pool that keeps many groups is renewed between
    two of them. Each is asked to stop once its ranks have agreed so many times."""
    for config in configs:
        pool(num_ranks).run(train, config, questions, seconds=SECONDS)


def train(config: TrainConfig, questions: int = sys.maxsize) -> None:
    if torch.distributed.get_rank() == 0:
        config.out.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    forget_groups()  # of jobs of other tests
    run_rank(config, torch.device("cpu"), AskedAfter(questions))
    forget_groups()


def forget_groups() -> None:
    """DeepSpeed keeps the groups of hpZ and of tensor parallelism for the life of a process, and would use them in the
    runs that follow."""
    if "deepspeed" in sys.modules:
        sys.modules["deepspeed.utils.groups"]._release_process_group_references()
