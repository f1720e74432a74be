"""When a checkpoint is saved, and how: at once, or from a copy while training goes on.

A :class:`Saver` gives each checkpoint to an :class:`Outlet`, which is the launcher's. The outlet says where the ranks
write, and shows the checkpoint under its name when all of them have written. If it sends files to a store, that is
always done while training goes on. A background save is collective too, in a process group of its own, because its
messages must not meet those of the training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from ckpt_tools.errors import StoreError

from ..checkpoints.progress import Progress
from ..config.train_config import TrainConfig
from ..engines.base import Engine, Save, StagingEngine
from ..models.config_json import write_model_config
from .screen import Status

Values = Mapping[str, float]
"""What was measured, by name."""


class Outlet(Protocol):
    """Where the checkpoints and the figures of a run go. Every rank calls ``begin``, ``finish``, ``announce`` and
    ``report``, all ranks in the same order; the first rank alone calls the others."""

    @property
    def uploads(self) -> bool:
        """Whether ``finish`` sends files away, beside which training goes on."""
        ...

    def begin(self, name: str) -> Path:
        """An empty folder for this rank's shards of a checkpoint that nobody takes for one yet."""
        ...

    def finish(self, name: str) -> None:
        """This rank has written, and on the first one all have; may be called in another thread."""
        ...

    def announce(self, name: str, values: Values) -> None:
        """The checkpoint is complete; ``values`` are the latest figures."""
        ...

    def report(self, values: Values) -> None:
        """An epoch ended without a checkpoint."""
        ...

    def record(self, figures: Mapping[str, Any]) -> None:
        """One line of the run's record."""
        ...

    def say(self, line: str) -> None:
        """To the person who started the run."""
        ...

    def show(self, status: Status) -> None:
        """To the same person, who needs the latest alone."""
        ...


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When to save: after so many epochs, steps and minutes, whichever comes first. The last epoch is always saved, and
    the last step if the run has one."""

    epochs: int
    steps: int | None
    minutes: float | None
    last_epoch: int
    last_step: int | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> SavePolicy:
        every = config.save_every, config.save_every_steps, config.save_every_minutes
        return cls(*every, config.last_epoch, config.max_steps)

    def after_epoch(self, epoch: int) -> bool:
        return epoch == self.last_epoch or epoch % self.epochs == 0

    def after_step(self, step: int) -> bool:
        return step == self.last_step or (self.steps is not None and step % self.steps == 0)

    def after_seconds(self, seconds: float) -> bool:
        """``seconds`` since the last save, or since the start."""
        return self.minutes is not None and seconds >= 60 * self.minutes


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """One save on the first rank. Training stood still for ``stall_seconds``, of which it waited ``waited_seconds`` for
    the save before; after ``seconds`` the checkpoint was complete."""

    checkpoint: str
    step: int
    stall_seconds: float
    waited_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Begun:
    """A save: when it was begun, and how long it has kept the training."""

    name: str
    step: int
    values: Values
    started: float
    waited: float
    stalled: float


class Saver:
    """Saves the checkpoints of a run, on each rank."""

    def __init__(self, config: TrainConfig, engine: Engine, outlet: Outlet, after_save: Callable[[], None]) -> None:
        """``after_save`` is called on the first rank when another checkpoint is complete."""
        self._config = config
        self._engine = engine
        self._outlet = outlet
        self._after_save = after_save
        self._group = _own_group() if config.async_save else None
        self._is_beside = config.async_save or outlet.uploads
        self._pending: tuple[_Begun, Future[float]] | None = None
        self._saved_at = time.monotonic()
        self.records: list[SaveRecord] = []

    @property
    def seconds_since(self) -> float:
        return time.monotonic() - self._saved_at

    @property
    def is_busy(self) -> bool:
        """Whether this rank writes or sends a checkpoint beside the training."""
        return self._pending is not None and not self._pending[1].done()

    @property
    def has_failed(self) -> bool:
        return self._pending is not None and not self.is_busy and self._pending[1].exception() is not None

    def save(self, progress: Progress, values: Values) -> None:
        """Save a checkpoint, or begin to; collective. The next one waits until it is complete."""
        started = time.perf_counter()
        self.collect()
        waited = time.perf_counter() - started
        folder = self._outlet.begin(progress.name)
        done = self._write_now(progress, folder) if self._group is None else self._write_later(progress, folder)
        stalled = time.perf_counter() - started
        self._pending = _Begun(progress.name, progress.step, values, started, waited, stalled), done
        self._saved_at = time.monotonic()
        if not self._is_beside:
            self.collect()

    def _write_now(self, progress: Progress, folder: Path) -> Future[float]:
        self._engine.save(folder, progress)
        self._describe(folder)
        torch.distributed.barrier()
        return (_in_background if self._is_beside else _at_once)(partial(self._finish, progress.name))

    def _write_later(self, progress: Progress, folder: Path) -> Future[float]:
        assert self._group is not None and isinstance(self._engine, StagingEngine)
        write = self._engine.staged(progress, self._group)
        return _in_background(lambda: self._write(write, folder, progress.name))

    def collect(self, *, has_failed: bool = False) -> None:
        """Wait for the save in the background and announce its checkpoint; collective. ``has_failed`` says that one
        rank's has, and the others need not be waited for.

        Raises:
            StoreError: it failed on some rank.
        """
        if self._pending is None:
            return
        (begun, done), self._pending = self._pending, None
        if self._is_beside:
            if not has_failed:
                wait([done])
            _check_all(begun.name, done)
        self._announce(begun, done.result())

    def _write(self, write: Save, folder: Path, name: str) -> float:
        """DCP's own collectives make sure that the first rank ends only when all have written."""
        self._describe(folder)
        write(folder)
        return self._finish(name)

    def _describe(self, folder: Path) -> None:
        """The first rank also says what model the shards are of."""
        if _leads():
            write_model_config(folder, self._config)

    def _finish(self, name: str) -> float:
        self._outlet.finish(name)
        return time.perf_counter()

    def _announce(self, begun: _Begun, ended: float) -> None:
        before = time.perf_counter()
        self._outlet.announce(begun.name, begun.values)
        took = time.perf_counter() - before
        record = SaveRecord(
            begun.name, begun.step, begun.stalled + took, begun.waited, max(ended - begun.started, begun.stalled) + took
        )
        self.records.append(record)
        if _leads():
            self._outlet.record(asdict(record))
            self._after_save()


def _in_background(call: Callable[[], float]) -> Future[float]:
    """In a thread that a process which fails does not wait for: its peers may be gone."""
    done: Future[float] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, name="save", daemon=True).start()
    return done


def _at_once(call: Callable[[], float]) -> Future[float]:
    done: Future[float] = Future()
    done.set_result(call())
    return done


def _check_all(name: str, done: Future[float]) -> None:
    """Raise StoreError on every rank with the reason of the first one that failed; collective."""
    error = done.exception() if done.done() else None
    reasons: list[str | None] = [None] * torch.distributed.get_world_size()
    mine = None if error is None else f"{type(error).__name__}: {error}"
    torch.distributed.all_gather_object(reasons, mine)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise StoreError(f"{name} could not be saved: rank {rank}: {reason}") from error


def _own_group() -> ProcessGroup:
    """All ranks, on the CPU; its messages do not meet those of the training."""
    group = torch.distributed.new_group(backend="gloo")
    assert isinstance(group, ProcessGroup)
    return group


def _leads() -> bool:
    return torch.distributed.get_rank() == 0


class Agreement:
    """All ranks decide the same at each step, whichever of them knows a reason; collective, on the CPU."""

    def __init__(self) -> None:
        is_gloo = torch.distributed.get_backend() == "gloo"
        self._group = None if is_gloo else _own_group()

    def any(self, *reasons: bool) -> tuple[bool, ...]:
        """For each reason, whether any rank has it; at most eight.

        They are the bits of one element, because Gloo sends each rank's part of a tensor for itself: of several
        elements it is twice as many messages, and each step pays for them.
        """
        known = torch.tensor(sum(reason << at for at, reason in enumerate(reasons)), dtype=torch.uint8)
        torch.distributed.all_reduce(known, torch.distributed.ReduceOp.BOR, group=self._group)
        found = int(known)
        return tuple(bool(found >> at & 1) for at in range(len(reasons)))

    def gathered(self, *values: float) -> list[list[float]]:
        """The values of every rank."""
        mine = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(found, mine, group=self._group)
        return [each.tolist() for each in found]
