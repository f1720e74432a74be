"""The loop under Ray Train: one ``TorchTrainer``, metrics and sharded checkpoints through ``ray.train.report``.

In ``OUT`` all workers write a checkpoint into one folder, as under torchrun. For a store every worker saves its own
shards into a folder of its own, and uploads them into the same checkpoint while training goes on. Ray records it when
all have uploaded. Resuming ``latest`` asks that record, which lies there too.
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
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray.train
import ray.train.torch
import torch
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.util.queue import Queue

from ckpt_tools.guard import guarded
from ckpt_tools.signals import starting_processes

from ..checkpoints.locking import LostStorageError, RunLock
from ..checkpoints.run_folder import CHECKPOINTS, remove_shards, resume_folder
from ..checkpoints.storage import drop_missing, file_system
from ..config.options import RESUME_AUTO
from ..config.train_config import TrainConfig
from ..loop.loop import Interrupted, Trained, train
from ..loop.metrics import Journal
from ..loop.outlets import FolderOutlet
from ..loop.result import RunResult
from ..loop.saving import Outlet, Values
from ..loop.screen import Screen, Status, command_screen
from ..loop.stopping import RunStoppedError, passed_on
from .failures import Failure
from .ray_control import Control, is_asked, new_control
from .ray_restarts import AttemptFailedError, on_this_node, with_restarts

# Ray's own default is 30 % of the memory; nothing but a few lines of progress goes through the object store here.
OBJECT_STORE_BYTES = 100 * 2**20
CHECK_SECONDS = 1.0

Outcome = Trained | Interrupted
Result = TypeVar("Result")

AT_ONCE = (KeyboardInterrupt, LostStorageError)
"""What ends a run while a thread waits for Ray: nothing is asked of Ray then, and the process ends without teardown."""


def launch(config: TrainConfig, lock: RunLock) -> RunResult:
    """Run on ``config.num_workers`` Ray workers, write ``result.json``; raises what the first failing rank raised."""
    started = time.perf_counter()
    resume_from = resume_folder(config)
    with cluster(config.num_workers, keep_open=[lock.descriptor]), printed_lines(config) as lines:
        control, asked = new_control(), threading.Event()
        fit = partial(_fit, resume_from=resume_from, lines=lines, control=control)
        with passed_on(asked.set):
            last, trained = _beside(
                partial(with_restarts, config, fit, lines.put), partial(_check, lock, asked, control)
            )
    if isinstance(trained, Interrupted):
        raise RunStoppedError.at(trained.checkpoint)
    result = RunResult.of(last, trained, time.perf_counter() - started)
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
def printed_lines(config: TrainConfig) -> Iterator[Queue]:
    """A queue whose lines, put there by any worker on any machine, are shown or recorded here as they come."""
    lines = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": on_this_node()})
    with command_screen() as screen:
        journal = Journal(config.out, tensorboard=config.tensorboard)
        printer = threading.Thread(target=_print_until_none, args=(lines, screen, journal), daemon=True)
        printer.start()
        yield from _until_printed(lines, printer)


def _until_printed(lines: Queue, printer: threading.Thread) -> Iterator[Queue]:
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


def _print_until_none(lines: Queue, screen: Screen, journal: Journal) -> None:
    """A line to say, a status to show, or figures to record."""
    with suppress(ray.exceptions.RayError):
        while (line := lines.get()) is not None:
            if isinstance(line, Status):
                screen.show(line)
            elif isinstance(line, dict):
                journal.record(line)
            else:
                screen.say(line)


def _check(lock: RunLock, asked: threading.Event, control: Control) -> None:
    lock.check()
    if asked.is_set():
        asked.clear()
        control.ask.remote()


def _beside(call: Callable[[], Result], check: Callable[[], None]) -> Result:
    """What ``call`` gives, run in a thread, so that this one hears signals at once: in the main thread Ray Train would
    answer SIGINT itself. ``check`` is called every second and may raise."""
    done: Future[Result] = Future()
    threading.Thread(target=_complete, args=(done, call), daemon=True).start()
    while not wait([done], timeout=CHECK_SECONDS).done:
        check()
    return done.result()


def _complete(done: Future[Result], call: Callable[[], Result]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:
        done.set_exception(error)


def _fit(config: TrainConfig, resume_from: Path | str | None, lines: Queue, control: Control) -> Outcome:
    """One attempt. Raises AttemptFailedError."""
    if config.storage is None:
        drop_missing(config.out / CHECKPOINTS)
    trainer = ray.train.torch.TorchTrainer(
        _work,
        train_loop_config={"config": config, "resume_from": resume_from, "lines": lines, "control": control},
        scaling_config=ray.train.ScalingConfig(num_workers=config.num_workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(
            name=CHECKPOINTS,
            **_ray_storage(config),
            worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
            failure_config=_failure_config(config),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
    )
    try:
        outcome: Outcome = trainer.fit().return_value
        return outcome
    except ray.train.WorkerGroupError as error:
        raise AttemptFailedError(_first_failure(error)) from error
    except ray.train.ControllerError as error:
        raise AttemptFailedError(Failure.of(0, error.controller_failure)) from error
    except ray.train.TrainingFailedError as error:
        raise AttemptFailedError(Failure.of(0, error)) from error


def _failure_config(config: TrainConfig) -> ray.train.FailureConfig:
    """Restarts are ours (:mod:`.ray_restarts`). Ray waits for machines alone, if the number of workers is fixed."""
    waits = config.min_workers is None
    return ray.train.FailureConfig(max_failures=0, controller_failure_limit=-1 if waits else 0)


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


def _work(loop_config: dict[str, Any]) -> Outcome:
    """Be one rank of the run."""
    config: TrainConfig = loop_config["config"]
    outlet = _outlet(config, loop_config["lines"])
    control: Control = loop_config["control"]
    resume_from = loop_config["resume_from"]
    if _is_restart(control):
        config = replace(config, resume=RESUME_AUTO)
        resume_from = _found_by_first_rank(config)
    return train(config, ray.train.torch.get_device(), resume_from, outlet, is_asked(control))


def _is_restart(control: Control) -> bool:
    """Whether Ray has started the workers again."""
    leads = ray.train.get_context().get_world_rank() == 0
    found = [leads and ray.get(control.begin.remote()) > 1]
    torch.distributed.broadcast_object_list(found)
    return found[0]


def _found_by_first_rank(config: TrainConfig) -> Path | str | None:
    found = [resume_folder(config) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(found)
    return found[0]


def _outlet(config: TrainConfig, lines: Queue) -> Outlet:
    return RayFolderOutlet(config, lines) if config.storage is None else RayStorageOutlet(config, lines)


class RayFolderOutlet(FolderOutlet):
    """Written in place and named when it is whole: Ray would copy shard after shard under the final name."""

    def __init__(self, config: TrainConfig, lines: Queue) -> None:
        super().__init__(config.out, tensorboard=config.tensorboard)
        self._lines = lines

    def announce(self, name: str, values: Values) -> None:
        ray.train.report(
            dict(values),
            ray.train.Checkpoint.from_directory(self._folder / name),
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )

    def report(self, values: Values) -> None:
        ray.train.report(dict(values))

    def say(self, line: str) -> None:
        self._lines.put(line)

    def show(self, status: Status) -> None:
        self._lines.put(status)


class RayStorageOutlet:
    """Each rank writes into a temporary folder of its own, and uploads it into the same folder of the storage. Ray
    keeps the figures of the run beside it."""

    uploads = True

    def __init__(self, config: TrainConfig, lines: Queue) -> None:
        self._config = config
        self._lines = lines
        self._storage = ray.train.get_context().get_storage()
        self._folders: dict[str, Path] = {}
        self._uploaded: dict[str, ray.train.Checkpoint] = {}

    def begin(self, name: str) -> Path:
        if torch.distributed.get_rank() == 0:
            remove_shards(self._config, name)
        self._folders[name] = Path(tempfile.mkdtemp())
        return self._folders[name]

    def finish(self, name: str) -> None:
        """It is complete when Ray has recorded it."""
        folder = self._folders.pop(name)
        try:
            local = ray.train.Checkpoint.from_directory(folder)
            self._uploaded[name] = self._storage.persist_current_checkpoint(local, name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def announce(self, name: str, values: Values) -> None:
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(dict(values), self._uploaded.pop(name), checkpoint_upload_mode=mode)

    def report(self, values: Values) -> None:
        ray.train.report(dict(values))

    def record(self, figures: Mapping[str, Any]) -> None:
        """In ``OUT``, which is the command's."""
        self._lines.put(dict(figures))

    def say(self, line: str) -> None:
        self._lines.put(line)

    def show(self, status: Status) -> None:
        self._lines.put(status)
