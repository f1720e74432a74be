"""Launcher with Ray Train: one ``TorchTrainer``, metrics and checkpoints through ``ray.train.report``.

In ``OUT`` all workers write a checkpoint into one folder, as with torchrun. For ``--storage`` each worker saves into a
folder of its own, and uploads it in the background; when all have, Ray's record in the storage names the checkpoint.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray.train
import ray.train.torch
import torch
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.util.queue import Queue

from ckpt_tools.errors import StoreError
from ckpt_tools.process.guard import guard_processes
from ckpt_tools.process.signals import block_signals_while_starting

from ..checkpoints.locking import LostStorageError, RunLock
from ..checkpoints.run_folder import CHECKPOINTS, find_resume_checkpoint, remove_shards
from ..checkpoints.storage import file_system
from ..config.train_config import TrainConfig
from ..loop.loop import FinishedRun, StoppedRun, train
from ..loop.outlets import MetricsWriter, Outlet, Values
from ..loop.result import RunResult
from ..loop.saving import run_in_background
from ..loop.screen import ProgressDisplay
from ..loop.stopping import RunStoppedError, pass_on_signals
from .devices import check_device, check_gpus, choose_backend, choose_threads
from .failures import BLAME_SECONDS, RankFailure
from .ray_restarts import (
    AttemptFailedError,
    find_cause,
    list_placement_groups,
    remove_placement_groups,
    run_with_restarts,
    schedule_on_this_node,
    watch_stop_requests,
)

OBJECT_STORE_BYTES = 100 * 2**20
"""Ray's default is 30 % of the memory; here the object store holds only lines of progress."""

CHECK_SECONDS = 1.0
RECORD_NAME = "checkpoint_manager_snapshot.json"  # Ray's record of a run, beside the checkpoints

Outcome = FinishedRun | StoppedRun
Result = TypeVar("Result")

ENDING_ERRORS = (KeyboardInterrupt, LostStorageError)
"""Exceptions that end a run while a thread waits for Ray; the process then ends without calling Ray."""


def launch(config: TrainConfig, lock: RunLock) -> RunResult:
    """Run on Ray workers and write ``result.json``. Raises the error of the first failing rank."""
    started = time.perf_counter()
    with cluster(config.num_workers, keep_open=[lock.descriptor]), print_worker_lines(config) as (lines, printing):
        devices = _worker_devices(config)
        stop, stop_requested = make_queue(), threading.Event()
        fit = partial(_run_attempt, devices=devices, lines=lines, stop=stop)
        run = partial(run_with_restarts, config, fit, lambda line: lines.put(("print_line", line)), on_gpus=devices[0])
        check = partial(_check_and_pass_stop, lock, printing, stop_requested, stop)
        with pass_on_signals(stop_requested.set):
            last, outcome = _run_in_thread(run, check)
    if isinstance(outcome, StoppedRun):
        raise RunStoppedError.after_checkpoint(outcome.checkpoint)
    result = RunResult.from_run(last, outcome, time.perf_counter() - started)
    result.write(config.out)
    return result


@contextmanager
def cluster(num_workers: int, keep_open: Sequence[int] = ()) -> Iterator[None]:
    """The Ray cluster of this process or of ``RAY_ADDRESS``, or else a local one for the block.
    :func:`ckpt_tools.process.guard.guard_processes`, which describes ``keep_open``, ends it if this process is
    killed or stopped."""
    if ray.is_initialized():
        yield
        return
    with guard_processes(keep_open) as marking:
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if "RAY_ADDRESS" not in os.environ:
            # At least one CPU per worker: on a smaller machine they share the cores instead of waiting for each other.
            options |= {"address": "local", "num_cpus": max(os.cpu_count() or 1, num_workers)}
            options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        with marking(), block_signals_while_starting():
            ray.init(**options)
        with _call_at_end(ray.shutdown):
            yield


@contextmanager
def _call_at_end(end: Callable[[], None]) -> Iterator[None]:
    """Calls ``end`` after the block, but not if the run has to end at once: Ray does not respond while a thread waits
    for it (:func:`_run_in_thread`). The guard ends a local cluster; a remote one ends the work of a lost driver."""
    with ExitStack() as ending:
        ending.callback(end)
        try:
            yield
        except ENDING_ERRORS:
            ending.pop_all()
            raise


def make_queue() -> Queue:
    """A queue on the machine of the command, as long as that lives."""
    return Queue(actor_options={"num_cpus": 0, "scheduling_strategy": schedule_on_this_node()})


@contextmanager
def print_worker_lines(config: TrainConfig) -> Iterator[tuple[Queue, Future[None]]]:
    """A queue of what workers on any machine print, show or record here: name of the method, and the value. And the
    future of its reader."""
    lines = make_queue()

    def end_printing() -> None:
        lines.put(None)
        printing.result()
        lines.shutdown()

    with closing(ProgressDisplay()) as display:
        printing = run_in_background(partial(_print_until_none, lines, display, MetricsWriter(config)))
        with _call_at_end(end_printing):
            yield lines, printing


def _print_until_none(lines: Queue, display: ProgressDisplay, writer: MetricsWriter) -> None:
    calls: dict[str, Callable[[Any], None]] = {"print_line": display.print_line, "show_status": display.show_status}
    calls["record_metrics"] = writer.write_line
    with suppress(ray.exceptions.RayError):
        while (line := lines.get()) is not None:
            name, value = line
            calls[name](value)


def _check_and_pass_stop(lock: RunLock, printing: Future[None], stop_requested: threading.Event, stop: Queue) -> None:
    try:
        if lock.claim is not None:
            lock.claim.check()
        if printing.done():
            printing.result()
    except StoreError as error:
        raise LostStorageError(error.message) from error
    if stop_requested.is_set():
        stop_requested.clear()
        run_in_background(partial(stop.put, True))


def _run_in_thread(call: Callable[[], Result], check: Callable[[], None]) -> Result:
    """Result of ``call``, run in a thread so that this one handles signals: in the main thread Ray Train would handle
    SIGINT. ``check`` is called every second and may raise."""
    done = run_in_background(call)
    while not wait([done], timeout=CHECK_SECONDS).done:
        check()
    return done.result()


def _worker_devices(config: TrainConfig) -> tuple[bool, dict[str, str]]:
    """Whether workers have GPUs, and their environment, by the cluster's resources: this machine may have no GPU.
    Raises UsageError if there are too few, or if a machine lacks what the frameworks need."""
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0)) if torch.backends.cuda.is_built() else 0
    check_gpus(config.num_workers, gpus, "the cluster")
    if "RAY_ADDRESS" in os.environ:  # a machine that has what a worker needs
        try:
            ray.get(ray.remote(num_gpus=min(gpus, 1), max_retries=0)(check_device).remote(config))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
    sharing = gpus or config.num_workers
    return gpus > 0, choose_threads(config, sharing, resources.get("CPU", sharing), on_gpu=gpus > 0)


def _run_attempt(config: TrainConfig, devices: tuple[bool, dict[str, str]], lines: Queue, stop: Queue) -> Outcome:
    """One attempt. Raises AttemptFailedError."""
    resume_from, (on_gpus, environment) = find_resume_checkpoint(config), devices
    if config.storage is None:
        # Ray would read its record of earlier starts, and refuse it if it names a removed checkpoint.
        (config.out / CHECKPOINTS / RECORD_NAME).unlink(missing_ok=True)
    trainer = ray.train.torch.TorchTrainer(
        _run_worker,
        train_loop_config={"config": config, "resume_from": resume_from, "lines": lines, "stop": stop},
        torch_config=ray.train.torch.TorchConfig(backend=choose_backend("cuda" if on_gpus else "cpu")),
        scaling_config=ray.train.ScalingConfig(num_workers=config.num_workers, use_gpu=on_gpus),
        run_config=ray.train.RunConfig(
            name=CHECKPOINTS,
            **_ray_storage(config),
            worker_runtime_env={"env_vars": environment},
            # Ray waits for machines only if the number of workers is fixed; restarts are those of :mod:`.ray_restarts`.
            failure_config=ray.train.FailureConfig(
                max_failures=0,
                max_preemption_failures=0,
                controller_failure_limit=-1 if config.min_workers is None else 0,
            ),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
    )
    known = list_placement_groups()
    try:
        outcome: Outcome = trainer.fit().return_value
        return outcome
    except ray.train.WorkerGroupError as error:
        raise AttemptFailedError(find_cause(error.worker_failures)) from error
    except ray.train.TrainingFailedError as error:
        remove_placement_groups(list_placement_groups() - known)
        raise AttemptFailedError(RankFailure.from_error(0, getattr(error, "controller_failure", error))) from error


def _ray_storage(config: TrainConfig) -> dict[str, Any]:
    """Storage options of ``RunConfig``; Arrow's S3 client would resolve endpoint and region differently."""
    if config.storage is None:
        return {"storage_path": str(config.out)}
    fs, path = file_system(config.storage)
    return {"storage_path": path, "storage_filesystem": PyFileSystem(FSSpecHandler(fs))}


def _run_worker(loop_config: dict[str, Any]) -> Outcome:
    try:
        config: TrainConfig = loop_config["config"]
        outlet = (RayFolderOutlet if config.storage is None else RayStorageOutlet)(config, loop_config["lines"])
        device, is_asked_to_stop = ray.train.torch.get_device(), watch_stop_requests(loop_config["stop"])
        return train(config, device, loop_config["resume_from"], outlet, is_asked_to_stop)
    except BaseException as error:  # torch's CheckpointException is none of Exception's
        time.sleep(BLAME_SECONDS)
        raise AttemptFailedError(RankFailure.from_error(torch.distributed.get_rank(), error)) from None


class _RayOutlet(Outlet):
    """Reports values to Ray, and sends lines and statuses to the command."""

    _checkpoint: Callable[[str], ray.train.Checkpoint]

    def __init__(self, config: TrainConfig, lines: Queue) -> None:
        super().__init__(config)
        self._lines = lines

    def report_values(self, values: Values) -> None:
        ray.train.report(dict(values))

    def announce_checkpoint(self, name: str, values: Values) -> None:
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(dict(values), self._checkpoint(name), checkpoint_upload_mode=mode)

    def print_line(self, line: str) -> None:
        self._lines.put(("print_line", line))

    def show_status(self, status: str) -> None:
        self._lines.put(("show_status", status))


class RayFolderOutlet(_RayOutlet):
    """Writes checkpoints in place: Ray would copy shard after shard into a folder with the final name."""

    def __init__(self, config: TrainConfig, lines: Queue) -> None:
        super().__init__(config, lines)
        self._checkpoint = lambda name: ray.train.Checkpoint.from_directory(self._folder / name)


class RayStorageOutlet(_RayOutlet):
    """Each rank writes into its own temporary folder, and uploads it into one folder of the storage."""

    uploads = True

    def __init__(self, config: TrainConfig, lines: Queue) -> None:
        super().__init__(config, lines)
        self._config = config
        self._storage = ray.train.get_context().get_storage()
        self._folders: dict[str, Path] = {}
        self._uploaded: dict[str, ray.train.Checkpoint] = {}
        self._checkpoint = self._uploaded.pop

    def begin_checkpoint(self, name: str) -> Path:
        if torch.distributed.get_rank() == 0:
            remove_shards(self._config, name)
        self._folders[name] = Path(tempfile.mkdtemp())
        return self._folders[name]

    def finish_checkpoint(self, name: str) -> None:
        """Upload. The checkpoint is complete when Ray has recorded it."""
        folder = self._folders.pop(name)
        try:
            local = ray.train.Checkpoint.from_directory(folder)
            self._uploaded[name] = self._storage.persist_current_checkpoint(local, name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def record_metrics(self, figures: Mapping[str, Any]) -> None:
        """Send the values to the command, which writes to ``OUT``."""
        self._lines.put(("record_metrics", dict(figures)))
        self.callbacks(figures)
