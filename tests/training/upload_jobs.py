"""Runs on the ranks of a pool whose checkpoints are sent somewhere, as to a store."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from ckpt_tools.errors import StoreError
from tests.training.jobs import small_config
from training.config.train_config import TrainConfig
from training.loop.loop import Trained, train
from training.loop.outlets import Outlet

OVERDUE_SECONDS = 120.0


class Steps:
    """Counts the steps of a run, which asks after each whether it is to stop."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = threading.Condition()

    def __call__(self) -> bool:
        with self.changed:
            self.count += 1
            self.changed.notify_all()
        return False

    def wait_for_another(self) -> None:
        with self.changed:
            now = self.count
            assert self.changed.wait_for(lambda: self.count > now, OVERDUE_SECONDS), "training stands still"


class SendingOutlet(Outlet):
    """A checkpoint is sent away, which takes until another step is done if that is said."""

    uploads = True

    def __init__(self, config: TrainConfig, steps: Steps, held: str | None = None, failing: bool = False) -> None:
        super().__init__(config)
        self.steps, self.held, self.failing = steps, held, failing
        self.events: list[str] = []

    def begin(self, name: str) -> Path:
        self.events.append(f"begin {name}")
        return super().begin(name)

    def finish(self, name: str) -> None:
        if self.failing and torch.distributed.get_rank() == 1:
            raise OSError("the store is full")
        if name == self.held:
            self.steps.wait_for_another()
        self.events.append(f"sent {name}")
        super().finish(name)

    def announce(self, name: str, values: Mapping[str, float]) -> None:
        self.events.append(f"announce {name}")


def run(config: TrainConfig, steps: Steps, outlet: SendingOutlet) -> Trained:
    if torch.distributed.get_rank() == 0:
        config.out.mkdir()
    torch.distributed.barrier()
    trained = train(config, torch.device("cpu"), None, outlet, steps)
    assert isinstance(trained, Trained)
    return trained


def trains_beside_an_upload(out: Path, engine: str) -> None:
    """The next save waits for it, and so does the end."""
    config = small_config(out / engine, engine=engine, epochs=1, save_every_steps=2)
    steps = Steps()
    outlet = SendingOutlet(config, steps, held="epoch_0000_step_000002")
    trained = run(config, steps, outlet)
    names = ("epoch_0000_step_000002", "epoch_0001")
    assert outlet.events == [f"{what} {name}" for name in names for what in ("begin", "sent", "announce")]
    first, second = trained.saves
    assert first.stall_seconds < first.seconds and second.step == 4


def ends_when_an_upload_fails(out: Path) -> None:
    """On every rank, with the reason of the one that failed, and before the next save."""
    config = small_config(out / "failing", engine="fsdp2", num_samples=20 * 64, epochs=1, save_every_steps=2)
    steps = Steps()
    outlet = SendingOutlet(config, steps, failing=True)
    reason = "epoch_0000_step_000002 could not be saved: rank 1: OSError: the store is full"
    with pytest.raises(StoreError, match=reason):
        run(config, steps, outlet)
    assert outlet.events[0] == "begin epoch_0000_step_000002" and len(outlet.events) <= 2
    assert steps.count <= 5  # before the first step, after it, and until the next save
