"""The loop under Ray Train: one ``TorchTrainer``, metrics and sharded checkpoints through ``ray.train.report``.

In ``OUT`` all workers write a checkpoint into one folder, as under torchrun. For a store every worker saves its own
shards into a folder of its own; Ray uploads them all into the same checkpoint, and resuming ``latest`` asks Ray's
record of the run, which lies there too.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.util.queue import Queue

from ckpt_tools.guard import guarded
from ckpt_tools.signals import starting_processes

from ..checkpoints import CHECKPOINTS, checkpoint_name, resume_folder
from ..config import TrainConfig
from ..launchers.failures import Failure
from ..locking import LostStorageError, RunLock
from ..loop import EpochMetrics, Save, Trained, train
from ..result import RunResult
from ..storage import file_system
from .torchrun import publish

# Ray's own default is 30 % of the memory; nothing but a few lines of progress goes through the object store here.
OBJECT_STORE_BYTES = 100 * 2**20
CHECK_SECONDS = 1.0

AT_ONCE = (KeyboardInterrupt, LostStorageError)
"""What ends a run while a thread waits for Ray: nothing is asked of Ray then, and the process ends without teardown."""


def launch(config: TrainConfig, lock: RunLock) -> RunResult:
    """Run on ``config.num_workers`` Ray workers, write ``result.json``; raises what the first failing rank raised."""
    started = time.perf_counter()
    resume_from = resume_folder(config)
    with cluster(config.num_workers, keep_open=[lock.descriptor]), printed_lines() as lines:
        trained = _beside(partial(_fit, config, resume_from, lines), lock.check)
    result = RunResult.of(config, trained, time.perf_counter() - started)
    result.write(config.out)
    return result


@contextmanager
def cluster(num_workers: int, keep_open: Sequence[int] = ()) -> Iterator[None]:
    """The Ray cluster of this process, of ``RAY_ADDRESS``, or else one started here and stopped afterwards.

    For ``keep_open`` see :func:`ckpt_tools.guard.guarded`, which ends all of it if this process is killed or told to
    stop.
    """
    if ray.is_initialized():
        yield
        return
    with guarded(keep_open) as marking:
        with marking(), starting_processes():
            ray.init(**_init_options(num_workers))
        yield from _until_shutdown()


def _until_shutdown() -> Iterator[None]:
    """If the run has to end at once, leave the shutdown out: it does not end while a thread waits for Ray's answer (see
    :func:`_beside`). The guard ends a local cluster, and a remote one ends the work of a driver that is gone."""
    try:
        yield
    except AT_ONCE:
        raise
    except BaseException:
        ray.shutdown()
        raise
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
    printer = threading.Thread(target=_print_until_none, args=(lines,), daemon=True)
    printer.start()
    try:
        yield lines
    except AT_ONCE:
        # The queue ends with the cluster, and the thread with this process.
        raise
    except BaseException:
        _end_lines(lines, printer)
        raise
    _end_lines(lines, printer)


def _end_lines(lines: Queue, printer: threading.Thread) -> None:
    lines.put(None)
    printer.join()
    lines.shutdown()


def _print_until_none(lines: Queue) -> None:
    with suppress(ray.exceptions.RayError):
        while (line := lines.get()) is not None:
            print(line, flush=True)


def _beside(call: Callable[[], Trained], check: Callable[[], None]) -> Trained:
    """What ``call`` gives, run in a thread, so that this one hears signals at once: in the main thread Ray Train would
    answer SIGINT itself. ``check`` is called every second and may raise."""
    done: Future[Trained] = Future()
    threading.Thread(target=_complete, args=(done, call), daemon=True).start()
    while not wait([done], timeout=CHECK_SECONDS).done:
        check()
    return done.result()


def _complete(done: Future[Trained], call: Callable[[], Trained]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:
        done.set_exception(error)


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
    report = partial(_report, config, loop_config["lines"])
    return train(config, ray.train.torch.get_device(), loop_config["resume_from"], report)


def _report(config: TrainConfig, lines: Queue, metrics: EpochMetrics, save: Save | None) -> None:
    """Report an epoch from this worker, with its own shards of the checkpoint where there is to be one."""
    values = {"epoch": metrics.epoch, "loss": metrics.mean_loss, "accuracy": metrics.correct / metrics.total}
    if save is None:
        ray.train.report(values)
    elif config.storage is None:
        _report_local(values, config.out / CHECKPOINTS, checkpoint_name(metrics.epoch), save)
    else:
        _report_uploaded(values, checkpoint_name(metrics.epoch), save)
    if ray.train.get_context().get_world_rank() == 0:
        lines.put(metrics.line(config.last_epoch))


def _report_local(values: dict[str, float], folder: Path, name: str, save: Save) -> None:
    """Written in place and named when it is whole: Ray copies shard after shard under the final name."""
    publish(folder, name, save)
    ray.train.report(
        values,
        ray.train.Checkpoint.from_directory(folder / name),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def _report_uploaded(values: dict[str, float], name: str, save: Save) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        ray.train.report(values, ray.train.Checkpoint.from_directory(folder), checkpoint_dir_name=name)
