"""Launchers: start the ranks of a run with torchrun or Ray Train."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from ckpt_tools.errors import MAX_MESSAGE_CHARS, CkptError, StoreError, UsageError

from ..checkpoints.locking import RunLock, check_no_other_run, only_run
from ..checkpoints.run_folder import resume_folder, resume_hint
from ..checkpoints.settings import lines_before_start
from ..checkpoints.weights import check_export, export
from ..config.train_config import TrainConfig
from ..data.datasets import PARTS, load_dataset
from ..engines.frameworks import check_frameworks
from ..loop.result import RunResult, check_result_file
from .failures import RunFailedError

# Ray reads these when it is imported: no usage statistics, no metrics exporter.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")


def launch(config: TrainConfig) -> RunResult:
    """Train and write ``OUT/result.json``. Messages of failures during the run end with how to continue."""
    check_before_start(config)
    with only_run(config) as lock:
        try:
            result = _launch(config, lock)
            export(config, result.checkpoint)
            return result
        except (RunFailedError, StoreError) as error:
            raise _with_hint(error, config) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise _with_hint(StoreError(f"{where}{error.strerror or error}"), config) from error


def _launch(config: TrainConfig, lock: RunLock) -> RunResult:
    """Run with the chosen launcher; Ray is imported only for its own."""
    if config.launcher == "ray":
        from . import ray_train

        return ray_train.launch(config, lock)
    from . import torchrun

    return torchrun.launch(config, lock)


def cluster(num_workers: int) -> AbstractContextManager[None]:
    """A Ray cluster for several runs; see :func:`.ray_train.cluster`."""
    from . import ray_train

    return ray_train.cluster(num_workers)


def check_before_start(config: TrainConfig) -> None:
    """Check in one process what would otherwise fail on every worker. Writes nothing; prints messages about the
    checkpoint to resume."""
    check_no_other_run(config.out)
    checkpoint = resume_folder(config)
    check_result_file(config.out)
    check_export(config)
    lines = lines_before_start(config, checkpoint)
    _check_samples(config)
    check_frameworks(config)
    for line in lines:
        print(line, flush=True)


def _check_samples(config: TrainConfig) -> None:
    samples, _ = (load_dataset(config.dataset, part, config.data_root) for part in PARTS)
    if config.num_samples is not None and config.num_samples > len(samples):
        raise UsageError(f"--num-samples is {config.num_samples} and {config.dataset} has {len(samples)} to train on")
    config.steps_per_epoch(len(samples.first(config.num_samples)))


def _with_hint(error: CkptError, config: TrainConfig) -> CkptError:
    ending = resume_hint(config)
    message = error.message[: MAX_MESSAGE_CHARS - len(ending)] + ending
    return type(error)(message, path=error.path, key=error.key)
