"""Launchers: check a run, and start its ranks with torchrun or Ray Train."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from ckpt_tools.errors import MAX_MESSAGE_CHARS, StoreError

from ..checkpoints.locking import lock_run
from ..checkpoints.run_folder import resume_hint
from ..checkpoints.storage import describe_os_error
from ..checkpoints.weights import export_weights
from ..config.train_config import TrainConfig
from ..loop.result import RunResult
from .checks import check_before_start
from .failures import RunFailedError

# Ray reads these when it is imported: no usage statistics, no metrics exporter.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")


def launch(config: TrainConfig) -> RunResult:
    """Train and write ``OUT/result.json``. Messages of failures during the run end with how to continue."""
    check_before_start(config)
    with lock_run(config) as lock:
        try:
            if config.launcher == "ray":  # imported only for its own runs
                from .ray_train import launch as launch_workers
            else:
                from .torchrun import launch as launch_workers
            result = launch_workers(config, lock)
            export_weights(config, result.checkpoint)
            return result
        except (RunFailedError, StoreError, OSError) as error:
            failed = StoreError(describe_os_error(error)) if isinstance(error, OSError) else error
            hint = resume_hint(config)
            message = failed.message[: MAX_MESSAGE_CHARS - len(hint)] + hint
            raise type(failed)(message, path=failed.path, key=failed.key) from error


def cluster(num_workers: int) -> AbstractContextManager[None]:
    """A Ray cluster for several runs; see :func:`.ray_train.cluster`."""
    from . import ray_train

    return ray_train.cluster(num_workers)
