"""Launchers: how the ranks of a run are started, and where they put what they save."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import ckpt_tools

from ..checkpoints import resume_folder
from ..config import TrainConfig, is_url
from ..data import load_dataset
from ..locking import check_no_other_run, only_run
from ..result import RunResult

# Ray reads these when it is imported: it sends no usage statistics, and exports no metrics of its own.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")


def launch(config: TrainConfig) -> RunResult:
    """Run to the end and write ``OUT/result.json``; Ray is imported only where asked for."""
    check_before_start(config)
    with only_run(config) as lock:
        if config.launcher == "ray":
            from ..launchers import ray_train

            return ray_train.launch(config, lock)
        from ..launchers import torchrun

        return torchrun.launch(config, lock)


def cluster(num_workers: int) -> AbstractContextManager[None]:
    """A Ray cluster for several runs in turn; see :func:`.ray_train.cluster`."""
    from . import ray_train

    return ray_train.cluster(num_workers)


def check_before_start(config: TrainConfig) -> None:
    """Raise here, in one process, what would otherwise be raised by every worker. Makes nothing."""
    check_no_other_run(config.out)
    resume_folder(config)
    if config.resume is not None and is_url(config.resume):
        ckpt_tools.inspect(config.resume)
    samples = load_dataset(config.dataset, "train", config.data_root).first(config.num_samples)
    config.steps_per_epoch(len(samples))
