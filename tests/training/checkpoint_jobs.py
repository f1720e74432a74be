"""Runs that are stopped and go on, on the ranks of a pool."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tests.training.jobs import small_config
from training.config.train_config import TrainConfig
from training.data import randomness
from training.launchers.torchrun import run_rank

STOPPED_AFTER = 6
"""Steps: the second of the second epoch's four."""

ENGINES = ("fsdp2", "zero3")

IN_THE_SOAK = ("zero1",)
"""Engines that the soak stops as well."""


class AskedAfter:
    """On the last rank alone: the request to stop, once the ranks have agreed so many times."""

    def __init__(self, questions: int) -> None:
        self.left = questions if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1 else sys.maxsize

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def runs(out: Path, engines: Sequence[str]) -> Iterator[tuple[TrainConfig, int | None]]:
    """Configurations, and the steps after which they are asked to stop.

    ``<engine>-stopped`` is stopped and goes on by itself. ``each-step`` and ``each-step-async`` save after each step.
    ``ended`` is stopped at the last step of an epoch, before its evaluation, and goes on from there.
    """
    for engine in engines:
        config = small_config(out / f"{engine}-stopped", engine=engine)
        yield config, STOPPED_AFTER
        yield replace(config, resume="auto"), None
    each = small_config(out / "each-step", engine="fsdp2", save_every_steps=1)
    yield each, None
    yield replace(each, out=out / "each-step-async", async_save=True), None
    ended = small_config(out / "ended", engine="fsdp2", async_save=True, save_every=9)
    yield ended, 4
    yield replace(ended, resume="auto"), None
    kept = small_config(out / "kept", engine="fsdp2", save_every_steps=1, keep_last=2, keep_best="loss", epochs=3)
    yield kept, None


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def check_randomness() -> None:
    """Each rank has its own stream at each step, which no other has."""

    def at(step: int) -> list[float]:
        randomness.begin(1, step, torch.distributed.get_rank())
        return draws()

    expected = at(2)
    assert at(3) != expected
    assert at(2) == expected
    ranks: list[list[float]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, expected)
    assert len({tuple(each) for each in ranks}) == len(ranks)


def train(config: TrainConfig, stopped_after: int | None) -> None:
    config.out.mkdir(exist_ok=True)
    torch.distributed.barrier()
    # The first question comes before the first step.
    request = AskedAfter(sys.maxsize if stopped_after is None else asked_before(config, stopped_after))
    interrupted = run_rank(config, torch.device("cpu"), request)
    assert (interrupted is None) == (stopped_after is None)


def asked_before(config: TrainConfig, steps: int) -> int:
    """How often a run asks before the question that follows ``steps``: also before the first, and after each epoch."""
    return 1 + (steps - 1) + (steps - 1) // 4
