"""Short runs of strategies on the ranks of a pool: two epochs of two steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.training.checkpoint_jobs import AskedAfter
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


def train_each(*configs: TrainConfig, questions: int = sys.maxsize) -> None:
    """Run them one after the other on this rank. Each is asked to stop once its ranks have agreed so many times."""
    for config in configs:
        if torch.distributed.get_rank() == 0:
            config.out.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        _forget_groups()
        run_rank(config, torch.device("cpu"), AskedAfter(questions))
    _forget_groups()


def stop_each(questions: int, *configs: TrainConfig) -> None:
    """Run them until they have agreed so many times, and stop."""
    train_each(*configs, questions=questions)


def _forget_groups() -> None:
    """DeepSpeed keeps the groups of hpZ and of tensor parallelism for the life of a process, and would use them in the
    runs that follow."""
    if "deepspeed" in sys.modules:
        sys.modules["deepspeed.utils.groups"]._release_process_group_references()
