"""Launchers: check a run, and start its ranks with torchrun or Ray Train."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import Dataset

from ckpt_tools.errors import MAX_MESSAGE_CHARS, CkptError, StoreError, UsageError

from ..checkpoints.locking import check_no_other_run, only_run
from ..checkpoints.run_folder import resume_folder, resume_hint
from ..checkpoints.settings import lines_before_start
from ..checkpoints.weights import check_export, check_recipe, export
from ..checkpoints.writing import sentence_of
from ..config.references import is_function, resolved, text_of
from ..config.train_config import TrainConfig
from ..data.datasets import PARTS
from ..data.loading import dataset_of, length_of
from ..data.texts import lines_of_text
from ..loop.result import RunResult, check_result_file
from .devices import check_device, check_gpus
from .failures import RunFailedError

# Ray reads these when it is imported: no usage statistics, no metrics exporter.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")


def launch(config: TrainConfig) -> RunResult:
    """Train and write ``OUT/result.json``. Messages of failures during the run end with how to continue."""
    check_before_start(config)
    with only_run(config) as lock:
        try:
            if config.launcher == "ray":  # imported only for its own runs
                from .ray_train import launch as launch_workers
            else:
                from .torchrun import launch as launch_workers
            result = launch_workers(config, lock)
            export(config, result.checkpoint)
            return result
        except (RunFailedError, StoreError) as error:
            raise _with_hint(error, config) from error
        except OSError as error:
            raise _with_hint(StoreError(sentence_of(error)), config) from error


def cluster(num_workers: int) -> AbstractContextManager[None]:
    """A Ray cluster for several runs; see :func:`.ray_train.cluster`."""
    from . import ray_train

    return ray_train.cluster(num_workers)


def check_before_start(config: TrainConfig) -> None:
    """Check in one process what would fail on every worker; prints messages about the checkpoint to resume."""
    check_no_other_run(config.out)
    checkpoint = resume_folder(config)
    check_result_file(config.out)
    check_recipe(config)
    check_export(config)
    if config.launcher == "torchrun":
        check_gpus(config.num_workers, torch.cuda.device_count(), "this machine")
    lines = lines_before_start(config, checkpoint) + lines_of_text(config)
    parts = _checked_parts(config)
    check_frameworks(config)
    if any(map(is_function, (config.model, config.dataset, config.optimizer, config.metrics))):
        from .first_batch import try_out

        try_out(config, *parts)
    for line in lines:
        print(line, flush=True)


def _checked_parts(config: TrainConfig) -> tuple[Dataset[Any], Dataset[Any] | None]:
    samples, held_out = (dataset_of(config, part) for part in PARTS)
    assert samples is not None, "only the held-out part may be missing"
    length = length_of(samples)
    if config.num_samples is not None and length is not None and config.num_samples > length:
        name = text_of(config.dataset)
        raise UsageError(f"--num-samples is {config.num_samples} and {name} has {length} to train on")
    config.steps_per_epoch(length)
    return samples, held_out


def _with_hint(error: CkptError, config: TrainConfig) -> CkptError:
    ending = resume_hint(config)
    message = error.message[: MAX_MESSAGE_CHARS - len(ending)] + ending
    return type(error)(message, path=error.path, key=error.key)


def check_frameworks(config: TrainConfig) -> None:
    """Raises ``UsageError`` or ``FormatError`` for a run that its frameworks would refuse on every worker."""
    _check_model(config)
    if config.launcher != "ray" or "RAY_ADDRESS" not in os.environ:  # a remote cluster's machines are asked when joined
        check_device(config)


def _check_model(config: TrainConfig) -> None:
    """Build a model of ours or of transformers without memory, and call or import the functions of the user's."""
    from ..config.schedule import schedule_of
    from ..engines.optimizers import optimizer_of
    from ..models.zoo import spec_of

    if not is_function(config.model):
        with torch.device("meta") as device:
            optimizer_of(config, spec_of(config).make().parameters(), device)
    schedule_of(config, 2).factor(0)
    for each in config.callback:
        resolved(each, "callback")
