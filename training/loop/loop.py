"""The training loop, for every engine and launcher.

It runs on each rank of an existing process group. The launcher provides the checkpoint to resume, the destination of
checkpoints (:class:`.outlets.Outlet`) and the request to stop. After each step all ranks agree whether to save, stop or
continue, so every rank saves between the same two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ckpt_tools.errors import UsageError

from ..checkpoints.collectives import any_rank_has, leader_first
from ..config.options import RESUME_AUTO
from ..config.train_config import TrainConfig
from ..data.datasets import PARTS
from ..data.loading import Batches, EpochPosition, count_samples, make_dataset, seed_generators
from ..engines import Engine, RunProgress, create_engine
from ..engines.optimizers import LearningRateSchedule, make_schedule
from .evaluation import Evaluation, Evaluator, check_keep_best, choose_metrics, rename_loss
from .measuring import StepLog, profile_steps, work_per_sample
from .outlets import Outlet
from .saving import CheckpointSaver, SaveRecord


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """Metrics of an epoch, or of its part up to ``--max-steps``: mean loss over all ranks at each step, and the metrics
    of the held-out samples at its end. If the run was resumed within the epoch, ``losses`` has only its own steps;
    ``earlier_loss`` is the sum of those of the ``earlier_steps``."""

    epoch: int
    losses: tuple[float, ...]
    held_out: Mapping[str, float]
    seconds: float
    earlier_steps: int = 0
    earlier_loss: float = 0.0

    @property
    def mean_loss(self) -> float:
        """Mean over the whole epoch, added in the order of steps, so resuming does not change the last bit."""
        return add_in_order(self.earlier_loss, self.losses) / (self.earlier_steps + len(self.losses))

    def format_line(self, last_epoch: int) -> str:
        held_out = "".join(f"  held-out {name} {value:.4f}" for name, value in self.held_out.items())
        return f"epoch {self.epoch:2d}/{last_epoch}  loss {self.mean_loss:.4f}{held_out}  {self.seconds:.1f} s"

    def to_values(self) -> dict[str, float]:
        return {"epoch": self.epoch, "loss": self.mean_loss, **rename_loss(self.held_out)}


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Result of a run: its end position, the epochs it trained, the final evaluation, and times of its saves."""

    end: RunProgress
    history: tuple[EpochMetrics, ...]
    evaluation: Evaluation | None
    saves: tuple[SaveRecord, ...]


@dataclass(frozen=True, slots=True)
class StoppedRun:
    """A run that stopped on request, and the name of its checkpoint; None before the first step."""

    checkpoint: str | None


IsAskedToStop = Callable[[], bool]  # whether this rank knows of a request to save and stop


def train(
    config: TrainConfig,
    device: torch.device,
    resume_from: Path | str | None,
    outlet: Outlet,
    is_asked_to_stop: IsAskedToStop,
) -> FinishedRun | StoppedRun:
    """Train to ``config.last_epoch`` or ``config.max_steps`` on this rank, from the start or from a checkpoint."""
    with leader_first():  # so only the first rank of each machine downloads
        samples, held_out = (make_dataset(config, part) for part in PARTS)
    assert samples is not None, "only the held-out part may be missing"
    schedule = make_schedule(config, config.epochs * config.steps_per_epoch(count_samples(samples)))
    with closing(create_engine(config, schedule, device)) as engine, outlet.callbacks:
        progress = _resume_engine(engine, resume_from, outlet) if resume_from else RunProgress()
        _check_something_left(config, progress)
        ranks = torch.distributed.get_world_size() // (config.tp * config.pp)
        batches = Batches(config, samples, engine.data_rank, ranks, device)
        evaluator = None if held_out is None else _make_evaluator(config, engine, held_out, batches)
        with profile_steps(config) as end_step:
            run = TrainingRun(
                config, engine, batches, evaluator, outlet, is_asked_to_stop, progress, schedule, end_step
            )
            return run.run_to_end()


def _make_evaluator(config: TrainConfig, engine: Engine, held_out: Dataset[Any], batches: Batches) -> Evaluator:
    """Evaluator of the held-out samples; the first of the ranks that compute the same samples counts. Collective."""
    shares: list[int] = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(shares, batches.rank)
    counts = shares.index(batches.rank) == torch.distributed.get_rank()
    place = (batches.device, batches.rank, batches.world_size)
    return Evaluator(held_out, choose_metrics(config.metrics, engine.loss), config.eval_batch_size, *place, counts)


def _resume_engine(engine: Engine, checkpoint: Path | str, outlet: Outlet) -> RunProgress:
    started = time.perf_counter()
    progress = engine.resume(checkpoint)
    if torch.distributed.get_rank() == 0:
        seconds = time.perf_counter() - started
        outlet.record_metrics({"resumed": progress.name, "step": progress.step, "resume_seconds": seconds})
    return progress


def _check_something_left(config: TrainConfig, progress: RunProgress) -> None:
    """With ``--resume auto`` nothing may be left: a run that was ended after its last checkpoint only evaluates."""
    if config.resume == RESUME_AUTO:
        return
    if config.max_steps is not None and progress.step >= config.max_steps:
        finished = f"{progress.step} steps and --max-steps is {config.max_steps}"
    elif progress.epoch >= config.last_epoch:
        finished = f"{progress.epoch} epochs and the run ends after {config.last_epoch}"
    else:
        return
    raise UsageError(f"the checkpoint has finished {finished}: nothing is left to train")


def last_step(config: TrainConfig, progress: RunProgress, steps_per_epoch: int) -> int:
    """Last step of a run that begins at ``progress``. Only its remaining epochs have ``steps_per_epoch``: the epochs
    before differ with ``--override num-samples`` or ``batch-size``."""
    last = progress.step - progress.batch + (config.last_epoch - progress.epoch) * steps_per_epoch
    return last if config.max_steps is None else min(last, config.max_steps)


class _StopAgreedError(Exception):
    """The ranks have agreed to stop, and have saved."""


@dataclass
class TrainingRun:
    """A run on this rank, between its start and its end."""

    config: TrainConfig
    engine: Engine
    batches: Batches
    evaluator: Evaluator | None
    outlet: Outlet
    is_asked_to_stop: IsAskedToStop
    progress: RunProgress
    schedule: LearningRateSchedule
    end_step: Callable[[], None]
    last_evaluation: Evaluation | None = None
    is_due: bool = False
    """Whether a checkpoint was due at the last step of an epoch, whose end is saved instead."""

    def __post_init__(self) -> None:
        self.leads, self.world_size = torch.distributed.get_rank() == 0, torch.distributed.get_world_size()
        self.steps = self.config.steps_per_epoch(count_samples(self.batches.dataset))
        end = last_step(self.config, self.progress, self.steps)
        self.saver = CheckpointSaver(self.config, self.engine, self.outlet)
        self.log = StepLog(self.config, self.schedule, self.outlet, end)
        self.saved = self.progress
        """Position of the last checkpoint, resumed or saved."""

    def run_to_end(self) -> FinishedRun | StoppedRun:
        history = []
        try:
            self.stop_between_epochs()
            while not self.is_at_end:
                history.append(self.run_epoch())
                self.stop_between_epochs()
        except _StopAgreedError:
            self.saver.finish_pending()
            return StoppedRun(self.saved.name if self.saved.step else None)
        self.saver.finish_pending()
        evaluation = self.last_evaluation if history else self.evaluate()
        return FinishedRun(self.progress, tuple(history), evaluation, tuple(self.saver.records))

    @property
    def is_at_end(self) -> bool:
        """Whether all is trained. A complete epoch is still evaluated and saved, also after resuming."""
        ends_within = self.has_last_step and self.progress.batch < self.steps
        return self.progress.epoch >= self.config.last_epoch or ends_within

    @property
    def has_last_step(self) -> bool:
        return self.config.max_steps is not None and self.progress.step >= self.config.max_steps

    def run_epoch(self) -> EpochMetrics:
        """Train the rest of an epoch, evaluate, and save if due. With ``--max-steps`` the run may end within it."""
        started, before = time.perf_counter(), self.progress
        losses = self.mean_over_ranks(self.train_steps(before))
        evaluation = self.evaluate()
        seconds = time.perf_counter() - started
        epoch, held_out = before.epoch + 1, {} if evaluation is None else evaluation.values
        metrics = EpochMetrics(epoch, losses, held_out, seconds, before.batch, before.loss_sum)
        line = metrics.format_line(self.config.last_epoch)
        if self.progress.batch == self.steps:
            self.progress = RunProgress(epoch, self.progress.step)
            values = metrics.to_values()
            self.record_metrics({**values, "seconds": seconds})  # before the checkpoint: ``--keep-best`` reads it
            if self.config.saves_after_epoch(epoch) or self.is_due:
                self.save_checkpoint(self.progress, values)
            else:
                self.outlet.report_values(values)
        else:
            line += f"  ended within it, after step {self.progress.step}"
        if self.leads:
            self.outlet.print_line(line)
        check_keep_best(self.config, held_out)  # a model whose shapes depend on values was not tried before the start
        return metrics

    def record_metrics(self, figures: Mapping[str, float]) -> None:
        if self.leads:
            self.outlet.record_metrics({"step": self.progress.step, **figures})

    def train_steps(self, before: RunProgress) -> list[Tensor]:
        """Train the rest of an epoch after ``before``; this rank's loss at each step."""
        losses: list[Tensor] = []
        batches = self.batches.iterate_epoch(EpochPosition(before.epoch, before.batch, before.data))
        for batch, state in islice(batches, self.steps - before.batch):
            if self.leads and self.log.work is None:
                self.log.work = work_per_sample(self.config, batch)
            accuracy = None if self.last_evaluation is None else self.last_evaluation.accuracy
            seed_generators(self.config.seed, self.progress.step, self.batches.rank)
            losses.append(self.engine.step(batch))
            done = self.progress
            self.progress = replace(done, step=done.step + 1, batch=done.batch + 1, data=state)
            self.log.after_step(self.progress, losses[-1], self.saver.records, accuracy)
            with self.log.meter.pause():
                self.end_step()
            self.save_or_stop_if_due(before, losses)
            if self.has_last_step:
                return losses
        if self.progress.batch < self.steps:
            raise UsageError(
                f"the dataset ended after {self.progress.batch} batches of {self.config.batch_size}, and an epoch has "
                f"{self.steps} steps"
            )
        return losses

    def save_or_stop_if_due(self, before: RunProgress, losses: list[Tensor]) -> None:
        """After a step, save or stop if due. At the last step of an epoch, its end is saved instead."""
        is_asked, is_time = self.exchange_requests()
        is_due = is_time or self.config.saves_after_step(self.progress.step)
        ends = self.progress.batch == self.steps
        every = self.config.eval_every_steps
        if every is not None and self.progress.step % every == 0 and not (ends or self.has_last_step):
            evaluation = self.evaluate()
            if evaluation is not None:
                self.record_metrics(rename_loss(evaluation.values))
        if is_asked or (is_due and not ends):
            loss_sum = add_in_order(before.loss_sum, self.mean_over_ranks(losses))
            self.save_checkpoint(replace(self.progress, loss_sum=loss_sum), {"epoch": self.progress.epoch})
        self.is_due = is_due and ends
        if is_asked:
            raise _StopAgreedError

    def stop_between_epochs(self) -> None:
        """Stop if requested, before the first step and after an evaluation."""
        is_asked, _ = self.exchange_requests()
        if is_asked:
            if self.progress != self.saved:
                self.save_checkpoint(self.progress, {"epoch": self.progress.epoch})
            raise _StopAgreedError

    def exchange_requests(self) -> tuple[bool, bool]:
        """Whether any rank has a request to stop, and whether ``--save-every-minutes`` is over."""
        is_asked, is_time, is_busy, has_failed = any_rank_has(
            self.is_asked_to_stop(),
            self.leads and self.config.saves_after_seconds(time.monotonic() - self.saver.saved_at),
            self.saver.is_busy,
            self.saver.has_failed,
        )
        if has_failed or not is_busy:
            self.saver.finish_pending(has_failed=has_failed)
        return is_asked, is_time

    def save_checkpoint(self, progress: RunProgress, values: dict[str, float]) -> None:
        with self.log.meter.pause():
            self.saver.save(progress, {"step": progress.step, **values})
        self.saved = self.progress

    def evaluate(self) -> Evaluation | None:
        """Evaluate the held-out samples, if there are any, divided among the ranks with different samples."""
        if self.evaluator is not None:
            with self.log.meter.pause():
                self.last_evaluation = self.evaluator(self.engine)
        return self.last_evaluation

    def mean_over_ranks(self, losses: list[Tensor]) -> tuple[float, ...]:
        """Mean loss over ranks of each step, with one collective for all steps."""
        none = torch.zeros(0, dtype=torch.float64, device=self.batches.device)
        total = torch.stack(losses).double() if losses else none
        torch.distributed.all_reduce(total)
        return tuple((total / self.world_size).tolist())


def add_in_order(start: float, losses: tuple[float, ...]) -> float:
    """Sum in order; ``sum`` compensates rounding in newer Pythons."""
    return reduce(add, losses, start)
