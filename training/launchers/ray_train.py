"""The loop under Ray Train: one ``TorchTrainer``, metrics and sharded checkpoints through ``ray.train.report``.

Every worker saves its own shards into a folder of its own and reports it; Ray uploads them all into the same
checkpoint of the run's storage, ``OUT`` or a store. Resuming ``latest`` asks Ray, whose record of the run lies in that
storage too.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.util.queue import Queue

from ..checkpoints import CHECKPOINTS, checkpoint_name, checkpoint_of, resume_folder
from ..config import TrainConfig
from ..launchers.failures import Failure
from ..loop import EpochMetrics, Save, Trained, train
from ..result import RunResult
from ..storage import file_system

# Ray's own default is 30 % of the memory; nothing but a few lines of progress goes through the object store here.
OBJECT_STORE_BYTES = 100 * 2**20


def launch(config: TrainConfig) -> RunResult:
    """Run on ``config.num_workers`` Ray workers, write ``result.json``; raises what the first failing rank raised."""
    started = time.perf_counter()
    resume_from = resume_folder(config)
    with cluster(config.num_workers), printed_lines() as lines:
        trained = _fit(config, resume_from, lines)
    result = RunResult.of(config, trained, time.perf_counter() - started)
    result.write(config.out)
    return result


@contextmanager
def cluster(num_workers: int) -> Iterator[None]:
    """The Ray cluster of this process, of ``RAY_ADDRESS``, or else one started here and stopped afterwards."""
    if ray.is_initialized():
        yield
        return
    ray.init(**_init_options(num_workers))
    try:
        yield
    finally:
        ray.shutdown()


def _init_options(num_workers: int) -> dict[str, Any]:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if "RAY_ADDRESS" in os.environ:
        return quiet
    # As many CPUs as workers even on a smaller machine: they share the cores instead of waiting for each other.
    cpus = max(os.cpu_count() or 1, num_workers)
    local = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    return quiet | local | {"address": "local"}


@contextmanager
def printed_lines() -> Iterator[Queue]:
    """A queue whose lines, put there by any worker on any machine, are printed here as they come."""
    lines = Queue(actor_options={"num_cpus": 0})
    printer = threading.Thread(target=_print_until_none, args=(lines,))
    printer.start()
    try:
        yield lines
    finally:
        lines.put(None)
        printer.join()
        lines.shutdown()


def _print_until_none(lines: Queue) -> None:
    while (line := lines.get()) is not None:
        print(line, flush=True)


def _fit(config: TrainConfig, resume_from: Path | str | None, lines: Queue) -> Trained:
    trainer = ray.train.torch.TorchTrainer(
        _work,
        train_loop_config={"config": config, "resume_from": resume_from, "lines": lines},
        scaling_config=ray.train.ScalingConfig(num_workers=config.num_workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(
            name=CHECKPOINTS,
            **_ray_storage(config),
            worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
    )
    try:
        return trainer.fit().return_value
    except ray.train.WorkerGroupError as error:
        raise _first_failure(error).to_error(config.out) from error
    except ray.train.TrainingFailedError as error:
        raise Failure.of(0, error).to_error(config.out) from error


def _ray_storage(config: TrainConfig) -> dict[str, Any]:
    """The part of Ray's ``RunConfig`` that says where checkpoints and the record of the run lie.

    Not Arrow's own S3 client, which Ray would take for a URL: it resolves endpoint and region by rules of its own, and
    leaves an empty object for each folder.
    """
    if config.storage is None:
        return {"storage_path": str(config.out)}
    fs, path = file_system(config.storage)
    return {"storage_path": path, "storage_filesystem": PyFileSystem(FSSpecHandler(fs))}


def _first_failure(error: ray.train.WorkerGroupError) -> Failure:
    """The lowest rank's: Ray collects the failures of one poll without saying which came first."""
    rank, cause = min(error.worker_failures.items(), key=lambda item: item[0])
    return Failure.of(rank, cause)


def _work(loop_config: dict[str, Any]) -> Trained:
    """Be one rank of the run."""
    config: TrainConfig = loop_config["config"]
    resume_from = _latest_of_ray(config) or loop_config["resume_from"]
    report = partial(_report, config, loop_config["lines"])
    return train(config, ray.train.torch.get_device(), resume_from, report)


def _latest_of_ray(config: TrainConfig) -> Path | str | None:
    """This run's last checkpoint by Ray's record, read where it lies instead of from a copy that Ray would make."""
    latest = ray.train.get_checkpoint()
    return None if latest is None else checkpoint_of(config, PurePosixPath(latest.path).name)


def _report(config: TrainConfig, lines: Queue, metrics: EpochMetrics, save: Save | None) -> None:
    """Report an epoch from this worker, with its own shards of the checkpoint where there is to be one."""
    values = {"epoch": metrics.epoch, "loss": metrics.mean_loss, "accuracy": metrics.correct / metrics.total}
    if save is None:
        ray.train.report(values)
    else:
        _report_checkpoint(values, checkpoint_name(metrics.epoch), save)
    if ray.train.get_context().get_world_rank() == 0:
        lines.put(metrics.line(config.last_epoch))


def _report_checkpoint(values: dict[str, float], name: str, save: Save) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        ray.train.report(values, ray.train.Checkpoint.from_directory(folder), checkpoint_dir_name=name)
