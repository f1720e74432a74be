"""Launchers: how the ranks of a run are started, and where they put what they save."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import ckpt_tools

from ..checkpoints import resume_folder
from ..config import TrainConfig, is_url
from ..data import load_dataset
from ..result import RunResult, check_result_file

# Ray reads these when it is imported: it sends no usage statistics, and exports no metrics of its own.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")


def launch(config: TrainConfig) -> RunResult:
    """Run to the end and write ``OUT/result.json``; Ray is imported only where asked for."""
    check_before_start(config)
    if config.launcher == "ray":
        from ..launchers import ray_train

        return ray_train.launch(config)
    from ..launchers import torchrun

    return torchrun.launch(config)


def cluster(num_workers: int) -> AbstractContextManager[None]:
    """A Ray cluster for several runs in turn; see :func:`.ray_train.cluster`."""
    from . import ray_train

    return ray_train.cluster(num_workers)


def check_before_start(config: TrainConfig) -> None:
    """Raise here, in one process, what would otherwise be raised by every worker; makes ``OUT``."""
    resume_folder(config)
    check_result_file(config.out)
    if config.resume is not None and is_url(config.resume):
        ckpt_tools.inspect(config.resume)
    samples = load_dataset(config.dataset, "train", config.data_root).first(config.num_samples)
    config.steps_per_epoch(len(samples))
    config.out.mkdir(parents=True, exist_ok=True)
