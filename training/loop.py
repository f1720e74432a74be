"""The one training loop, the same for every engine and launcher.

It runs on each rank of an existing process group and does no I/O of its own: a launcher says where to resume from and
takes each epoch's metrics with a function that writes this rank's shards where the epoch is to be saved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ckpt_tools.errors import UsageError

from .config import TrainConfig
from .data import Samples, epoch_order, load_dataset, rank_batches, to_input
from .engines import Engine, Progress, create_engine
from .evaluation import Evaluation, evaluate
from .model_config import write_model_config
from .schedule import schedule_for


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """One finished epoch: the mean loss over all ranks at each step, and the held-out samples predicted right."""

    epoch: int
    losses: tuple[float, ...]
    correct: int
    total: int
    seconds: float

    @property
    def mean_loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    def line(self, last_epoch: int) -> str:
        """For a person: one line."""
        return (
            f"epoch {self.epoch:2d}/{last_epoch}  loss {self.mean_loss:.4f}  "
            f"held-out {self.correct}/{self.total}  {self.seconds:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run learnt: the epochs it trained itself, and how the model it ends with does on the held-out split."""

    history: tuple[EpochMetrics, ...]
    evaluation: Evaluation


Save = Callable[[Path], None]
# Called on every rank after each epoch; the second argument is None where nothing is to be saved.
Report = Callable[[EpochMetrics, Save | None], None]


def train(config: TrainConfig, device: torch.device, resume_from: Path | str | None, report: Report) -> Trained:
    """Train to ``config.last_epoch`` on this rank, from the start or from a whole checkpoint at a path or URL."""
    samples, held_out = load_parts(config)
    total_steps = config.epochs * config.steps_per_epoch(len(samples))
    schedule = schedule_for(total_steps, config.warmup_fraction, config.schedule)
    with closing(create_engine(config, schedule, device)) as engine:
        progress = engine.resume(resume_from) if resume_from else Progress()
        _check_epochs_left(config, progress)
        history = []
        for epoch in range(progress.epoch + 1, config.last_epoch + 1):
            metrics = run_epoch(config, engine, device, samples, held_out, epoch)
            progress = Progress(epoch, progress.step + len(metrics.losses))
            report(metrics, partial(_save, config, engine, progress) if config.saves_after(epoch) else None)
            history.append(metrics)
        return Trained(tuple(history), evaluate_all(config, engine, held_out, device))


def _save(config: TrainConfig, engine: Engine, progress: Progress, folder: Path) -> None:
    """This rank's shards; the first rank also says what model they are of."""
    engine.save(folder, progress)
    if torch.distributed.get_rank() == 0:
        write_model_config(folder, config)


def load_parts(config: TrainConfig) -> tuple[Samples, Samples]:
    """The training and the held-out samples; the first rank of each machine goes ahead, so one downloads for all."""
    leads = int(os.environ["LOCAL_RANK"]) == 0
    if not leads:
        torch.distributed.barrier()
    samples = load_dataset(config.dataset, "train", config.data_root).first(config.num_samples)
    held_out = load_dataset(config.dataset, "held-out", config.data_root)
    if leads:
        torch.distributed.barrier()
    return samples, held_out


def _check_epochs_left(config: TrainConfig, progress: Progress) -> None:
    if progress.epoch >= config.last_epoch:
        raise UsageError(
            f"the checkpoint has finished {progress.epoch} epochs and the run ends after {config.last_epoch}: "
            f"nothing is left to train"
        )


def run_epoch(
    config: TrainConfig,
    engine: Engine,
    device: torch.device,
    samples: Samples,
    held_out: Samples,
    epoch: int,
) -> EpochMetrics:
    """Train one epoch and evaluate."""
    started = time.perf_counter()
    losses = train_epoch(config, engine, device, samples, epoch)
    evaluation = evaluate_all(config, engine, held_out, device)
    return EpochMetrics(epoch, losses, evaluation.correct, evaluation.total, time.perf_counter() - started)


def train_epoch(
    config: TrainConfig, engine: Engine, device: torch.device, samples: Samples, epoch: int
) -> tuple[float, ...]:
    """One pass over the samples in the epoch's order; the mean loss over all ranks at each step."""
    order = epoch_order(len(samples), epoch, config.seed)
    losses = []
    for batch in rank_batches(order, config.batch_size, engine.data_rank, data_world_size(config)):
        inputs, labels = to_input(samples.pixels[batch]), samples.labels[batch]
        losses.append(engine.step(inputs.to(device), labels.to(device)))
    return mean_over_ranks(torch.stack(losses), torch.distributed.get_world_size())


def evaluate_all(config: TrainConfig, engine: Engine, held_out: Samples, device: torch.device) -> Evaluation:
    """The held-out samples, dealt out over the ranks that see samples of their own."""
    return evaluate(engine.logits, held_out, device, rank=engine.data_rank, world_size=data_world_size(config))


def data_world_size(config: TrainConfig) -> int:
    """Ranks, or groups of ranks under tensor parallelism, that see samples of their own."""
    return torch.distributed.get_world_size() // config.tp


def mean_over_ranks(losses: Tensor, world_size: int) -> tuple[float, ...]:
    """Average each step's loss, float32 [steps], over ranks; one collective an epoch instead of one a step."""
    total = losses.double()
    torch.distributed.all_reduce(total)
    return tuple((total / world_size).tolist())
