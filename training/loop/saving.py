"""Saving of checkpoints, synchronously or in the background.

A :class:`CheckpointSaver` passes each checkpoint to the launcher's :class:`~.outlets.Outlet`; uploads always run in the
background. A background save is collective, in a separate process group, so its messages do not mix with training.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

import ckpt_tools
from ckpt_tools.errors import FormatError, SourceNotFoundError, StoreError, UsageError

from ..checkpoints.collectives import make_cpu_group
from ..checkpoints.run_folder import CHECKPOINTS, empty_partial, find_unknown_files, is_checkpoint_name, partial_folder
from ..checkpoints.settings import RunProgress
from ..checkpoints.storage import find_root_cause, report_failed_writes
from ..config.train_config import TrainConfig
from ..engines.base import Engine, Save
from ..models.config_json import write_model_config
from .outlets import Outlet, Values

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """Times of a save on the first rank: training stopped for ``stall_seconds``, including ``waited_seconds`` for the
    previous save; the checkpoint was complete after ``seconds``."""

    checkpoint: str
    step: int
    stall_seconds: float
    waited_seconds: float
    seconds: float


class CheckpointSaver:
    """Saves checkpoints; each rank has one."""

    def __init__(self, config: TrainConfig, engine: Engine, outlet: Outlet) -> None:
        self._config, self._engine, self._outlet = config, engine, outlet
        self._group = make_cpu_group() if config.async_save else None
        self._pending: tuple[SaveRecord, Values, float, Future[float]] | None = None
        self.saved_at = time.monotonic()
        self.records: list[SaveRecord] = []

    @property
    def is_busy(self) -> bool:
        """Whether this rank saves in the background now."""
        return self._pending is not None and not self._pending[-1].done()

    @property
    def has_failed(self) -> bool:
        return self._pending is not None and not self.is_busy and self._pending[-1].exception() is not None

    def save(self, progress: RunProgress, values: Values) -> None:
        """Save a checkpoint, or begin to; collective. Waits for the previous save."""
        started = time.perf_counter()
        self.finish_pending()
        waited = time.perf_counter() - started
        folder = self._outlet.begin_checkpoint(progress.name)
        write = partial(self._write_shards, self._engine.prepare_save(progress, self._group), folder)
        if self._group is None:
            write()
            torch.distributed.barrier()
            done = run_in_background(partial(self._complete_save, progress.name))
        else:
            # DCP's collectives ensure that the first rank returns only when all have written.
            done = run_in_background(partial(self._complete_save, progress.name, write))
        record = SaveRecord(progress.name, progress.step, time.perf_counter() - started, waited, 0.0)
        self._pending = record, values, started, done
        self.saved_at = time.monotonic()
        if self._group is None and not self._outlet.uploads:
            self.finish_pending()

    def finish_pending(self, *, has_failed: bool = False) -> None:
        """Wait for the background save and announce its checkpoint; collective. With ``has_failed``, some rank's save
        has failed, and the others are not awaited. Raises StoreError if it failed on any rank.
        """
        if self._pending is None:
            return
        (begun, values, started, done), self._pending = self._pending, None
        if not has_failed:
            wait([done])
        _check_all(begun.checkpoint, done)
        before, stalled = time.perf_counter(), begun.stall_seconds
        self._outlet.announce_checkpoint(begun.checkpoint, values)
        took = time.perf_counter() - before
        seconds = max(done.result() - started, stalled) + took
        self.records.append(replace(begun, stall_seconds=stalled + took, seconds=seconds))
        if torch.distributed.get_rank() == 0:
            self._outlet.record_metrics(asdict(self.records[-1]))
            remove_old_checkpoints(self._config)

    def _write_shards(self, write: Save, folder: Path) -> None:
        with report_failed_writes(folder):
            if torch.distributed.get_rank() == 0:
                write_model_config(folder, self._config)
            write(folder)

    def _complete_save(self, name: str, write: Callable[[], None] = lambda: None) -> float:
        write()
        self._outlet.finish_checkpoint(name)
        return time.perf_counter()


def run_in_background(call: Callable[[], Result]) -> Future[Result]:
    """Call in a daemon thread: a failing process does not wait for it, because its peers may be gone."""
    done: Future[Result] = Future()

    def run_call() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run_call, daemon=True).start()
    return done


def _check_all(name: str, done: Future[float]) -> None:
    """Raise StoreError on every rank with the reason of the first one that failed; collective."""
    error = done.exception() if done.done() else None
    cause = None if error is None else find_root_cause(error)
    own_reason = cause.message if isinstance(cause, StoreError) else f"{type(cause).__name__}: {cause}"
    reasons: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reasons, own_reason if cause else None)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise StoreError(f"{name} could not be saved: rank {rank}: {reason}") from error


def remove_old_checkpoints(config: TrainConfig) -> None:
    """Remove the checkpoints in ``config.out`` that are neither among the newest nor the best. A warning says if the
    newest hold less than older ones, as after a change of the model: then all stay."""
    if config.keep_last is None:
        return
    try:
        report = ckpt_tools.prune(config.out, keep_last=config.keep_last, keep_best=config.keep_best)
    except (UsageError, SourceNotFoundError):
        return  # none is measured or complete yet
    except FormatError as error:
        warnings.warn(f"old checkpoints stay: {error}", stacklevel=2)
        return
    for each in reversed(report.checkpoints):
        folder = config.out / each.name
        is_own = folder.parent.name == CHECKPOINTS and is_checkpoint_name(folder.name) and not folder.is_symlink()
        if not each.stays and is_own and not find_unknown_files(folder):
            hidden = folder.rename(partial_folder(folder.parent, folder.name))
            empty_partial(hidden)
            hidden.rmdir()
