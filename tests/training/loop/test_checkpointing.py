"""A run that is stopped anywhere, or ends after so many steps, goes on as if it had not; and what it keeps."""

import json
import os
import random
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError, StoreError, UsageError
from fixtures.launch import pool
from tests.training.jobs import (
    EPOCHS,
    NUM_WORKERS,
    SECONDS,
    STEPS_PER_EPOCH,
    STOPPED_AFTER,
    check_same_end,
    losses,
    result_of,
    small_config,
    tiny_config,
    train_each,
)
from training.checkpoints.locking import lock_run
from training.checkpoints.run_folder import find_resume_checkpoint, list_saved_checkpoints
from training.checkpoints.settings import check_settings, list_resume_messages
from training.config.train_config import TrainConfig
from training.loop.loop import FinishedRun, train
from training.loop.outlets import Outlet
from training.loop.saving import remove_old_checkpoints

CPU = torch.device("cpu")
WITHIN = f"epoch_0001_step_{STOPPED_AFTER:06d}"


def folder_of(run: Any) -> Path:
    """Of all checkpoints of a run."""
    return Path(run.checkpoint).parent


@pytest.mark.parametrize(
    "engine",
    ["fsdp2", pytest.param("zero3", marks=pytest.mark.extended), pytest.param("zero1", marks=pytest.mark.soak)],
)
def test_a_run_that_stopped_within_an_epoch_goes_on_bit_for_bit(engine, small_run):
    resumed = small_run(f"{engine}-stopped")
    assert sorted(path.name for path in folder_of(resumed).iterdir()) == ["epoch_0001", WITHIN, "epoch_0002"]
    assert [(epoch.epoch, epoch.earlier_steps) for epoch in resumed.history] == [(2, STOPPED_AFTER - STEPS_PER_EPOCH)]
    check_same_end(resumed, small_run(engine))


@pytest.mark.extended
def test_a_run_that_stopped_before_an_evaluation_makes_up_for_it(small_run):
    """Each epoch is measured once, as if nobody had stopped the run."""
    resumed, whole = small_run("ended"), small_run("fsdp2")
    assert (folder_of(resumed) / "epoch_0000_step_000004").is_dir()
    assert [(epoch.earlier_steps, len(epoch.losses)) for epoch in resumed.history] == [(4, 0), (0, 4)]
    assert resumed.history[0].held_out == whole.history[0].held_out
    check_same_end(resumed, whole)


@pytest.mark.extended
@pytest.mark.parametrize(("engine", "other"), [("fsdp2", "zero3"), ("zero1", "fsdp2")])
def test_the_rest_of_an_epoch_is_trained_at_another_world_size_and_by_another_engine(
    engine, other, small_run, tmp_path
):
    resume = str(folder_of(small_run(f"{other}-stopped")) / WITHIN)
    train_each(config := small_config(tmp_path / "run", engine=engine, num_workers=1, resume=resume))
    [epoch], whole = result_of(config).history, small_run(other).history[1]
    assert epoch.losses == pytest.approx(whole.losses[2:], rel=1e-5)
    assert epoch.mean_loss == pytest.approx(whole.mean_loss, rel=1e-5)


def test_an_asynchronous_save_writes_what_a_synchronous_one_does(small_run):
    """After each step, while the next one changes the weights: the copy is of the step it is named after. The stall of
    each save is recorded."""
    plain, sent = small_run("each-step"), small_run("each-step-async")
    names = [path.name for path in list_saved_checkpoints(folder_of(plain).parent)]
    assert names == [path.name for path in list_saved_checkpoints(folder_of(sent).parent)]
    assert len(names) == STEPS_PER_EPOCH
    for name in names:
        assert ckpt_tools.diff(folder_of(plain) / name, folder_of(sent) / name).equal
    assert losses(plain) == losses(sent)
    for run in (plain, sent):
        assert [save.step for save in run.saves] == [1, 2, 3, 4]
        assert all(0 <= save.waited_seconds <= save.stall_seconds <= save.seconds for save in run.saves)
        metrics = (folder_of(run).parent / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in metrics.splitlines()]
        assert [line["checkpoint"] for line in lines if "checkpoint" in line] == [one.checkpoint for one in run.saves]
        assert [line["epoch"] for line in lines if "accuracy" in line] == [1]


@pytest.mark.extended
def test_a_run_keeps_its_last_and_its_best_checkpoints(small_run):
    run = small_run("kept")
    means = {f"epoch_{epoch.epoch:04d}": epoch.mean_loss for epoch in run.history}
    kept = {path.name for path in folder_of(run).iterdir()}
    assert kept == {"epoch_0002_step_000011", "epoch_0003", min(means, key=lambda name: means[name])}


def max_steps_config(out: Path, **values: Any) -> TrainConfig:
    """Of two epochs of two steps."""
    return tiny_config(out, strategy="full_shard", model="cnn", save_every=EPOCHS, **values)


@pytest.mark.extended
def test_a_run_ends_after_max_steps_and_goes_on_without_the_option(tmp_path):
    name = "epoch_0001_step_000003"
    whole, within, resumed = (
        max_steps_config(tmp_path / "whole"),
        max_steps_config(tmp_path / "within", max_steps=3),
        max_steps_config(tmp_path / "resumed", resume=str(tmp_path / "within/checkpoints" / name)),
    )
    train_each(whole, within, resumed)
    result = result_of(within)
    assert [path.name for path in list_saved_checkpoints(within.out)] == [name]
    assert result.checkpoint == str(within.out / "checkpoints" / name)
    assert (result.epochs, [len(epoch.losses) for epoch in result.history]) == (1, [2, 1])
    assert [save.step for save in result.saves] == [3]
    check_same_end(result_of(resumed), result_of(whole))


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
            assert self.changed.wait_for(lambda: self.count > now, 120), "training stands still"


class SendingOutlet(Outlet):
    """A checkpoint is sent away, as to a store, which takes until another step is done if that is said."""

    uploads = True

    def __init__(self, config: TrainConfig, steps: Steps, held: str | None = None) -> None:
        super().__init__(config)
        self.steps, self.held = steps, held
        self.events: list[str] = []

    def begin_checkpoint(self, name: str) -> Path:
        self.events.append(f"begin {name}")
        return super().begin_checkpoint(name)

    def finish_checkpoint(self, name: str) -> None:
        if self.held is None and torch.distributed.get_rank() == 1:
            raise OSError("the store is full")
        if name == self.held:
            self.steps.wait_for_another()
        self.events.append(f"sent {name}")
        super().finish_checkpoint(name)

    def announce_checkpoint(self, name: str, values: Mapping[str, float]) -> None:
        self.events.append(f"announce {name}")


def train_and_send(out: Path, engine: Any, held: str | None, num_samples: int) -> tuple[list[str], int, Any]:
    """On each rank: the events, the steps, and the saves or what was said if the store is full."""
    config = small_config(out, engine=engine, epochs=1, save_every_steps=2, num_samples=num_samples)
    if torch.distributed.get_rank() == 0:
        out.mkdir()
    torch.distributed.barrier()
    steps = Steps()
    outlet = SendingOutlet(config, steps, held)
    try:
        trained = train(config, CPU, None, outlet, steps)
    except StoreError as error:
        return outlet.events, steps.count, str(error)
    assert isinstance(trained, FinishedRun)
    return outlet.events, steps.count, trained.saves


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("zero1", marks=pytest.mark.extended)])
def test_a_checkpoint_is_sent_away_while_training_goes_on(engine, tmp_path):
    """The next save waits for it, and so does the end."""
    names = ("epoch_0000_step_000002", "epoch_0001")
    given = tmp_path / engine, engine, names[0], 256
    for events, _, (first, second) in pool(NUM_WORKERS).run(train_and_send, *given, seconds=SECONDS):
        assert events == [f"{what} {name}" for name in names for what in ("begin", "sent", "announce")]
        assert first.stall_seconds < first.seconds and second.step == 4


def test_a_checkpoint_that_cannot_be_sent_ends_the_run(tmp_path):
    """On every rank, with the reason of the one that failed, and before the next save."""
    reason = "epoch_0000_step_000002 could not be saved: rank 1: OSError: the store is full"
    given = tmp_path / "failing", "fsdp2", None, 20 * 64
    for events, steps, said in pool(NUM_WORKERS).run(train_and_send, *given, seconds=SECONDS):
        assert reason in said
        assert events[0] == "begin epoch_0000_step_000002" and len(events) <= 2
        assert steps <= 5  # before the first step, after it, and until the next save


@pytest.fixture
def filled(tmp_path, small_run):
    """A run's folder with complete checkpoints of these names, and the accuracy of its epochs."""
    source = small_run("fsdp2").checkpoint

    def fill(names, accuracies, **values):
        for name in names:
            shutil.copytree(source, tmp_path / "checkpoints" / name, copy_function=os.link)
        lines = [json.dumps({"epoch": int(name[6:10]), "accuracy": value}) for name, value in accuracies.items()]
        (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"epoch": 9, "acc']))
        return TrainConfig(out=tmp_path, engine="fsdp2", launcher="torchrun", **values)

    return fill


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=() if n < 4 else pytest.mark.extended if n < 10 else pytest.mark.soak) for n in range(20)],
)
def test_the_newest_the_best_and_whatever_is_not_ours_stay(seed, filled):
    """Of any run: the newest K complete ones and the best one, in any order of metrics."""
    chance = random.Random(seed)
    epochs = [f"epoch_{epoch:04d}" for epoch in range(1, chance.randint(3, 6))]
    within = [f"{name}_step_{70 + number:06d}" for number, name in enumerate(epochs) if chance.random() < 0.5]
    accuracies = {name: chance.random() for name in epochs if chance.random() < 0.8}
    keep_last, keep_best = chance.randint(1, 4), chance.choice([None, "accuracy"])
    config = filled(epochs + within, accuracies, keep_last=keep_last, keep_best=keep_best)
    folder = config.out / "checkpoints"
    mine, broken = chance.choice(epochs), chance.choice(epochs + within)
    (folder / mine / "notes.txt").write_text("mine")
    (folder / broken / ".metadata").unlink()
    (folder / ".epoch_0099.partial").mkdir()
    remove_old_checkpoints(config)
    whole = sorted({*epochs, *within} - {broken})
    measured = accuracies.keys() & {*whole}
    best = {max(measured, key=lambda name: accuracies[name])} if measured else {*whole}
    expected = {*whole[-keep_last:], broken, mine, ".epoch_0099.partial", *(best if keep_best else ())}
    assert {path.name for path in folder.iterdir()} == expected


def test_the_newest_complete_checkpoint_is_resumed_and_a_damaged_one_is_set_aside(filled, capsys):
    """Whatever Ray's record says: torchrun may have gone on since."""
    names = ["epoch_0002", "epoch_0009", "epoch_0009_step_000046", "epoch_0010"]
    config = filled(names, {}, resume="auto")
    latest = replace(config, resume="latest")
    folder = config.out / "checkpoints"
    (folder / "checkpoint_manager_snapshot.json").write_text('{"checkpoint_results": []}')
    (folder / ".epoch_0011.partial").mkdir()
    assert find_resume_checkpoint(config) == find_resume_checkpoint(latest) == folder / "epoch_0010"
    (folder / "epoch_0010/__1_0.distcp").unlink()
    assert find_resume_checkpoint(config) == find_resume_checkpoint(latest) == folder / names[2]
    for one in (config, latest):
        assert list_resume_messages(one, None) == ["resuming epoch_0009_step_000046 (dcp, 2 ranks)"]
    with lock_run(config):
        assert capsys.readouterr().out == "epoch_0010 is not complete: renamed to epoch_0010.incomplete\n"
    left = {path.name for path in folder.iterdir() if path.is_dir()}
    assert left == {*names[:3], "epoch_0010.incomplete"}
    shutil.copytree(folder / "epoch_0010.incomplete", folder / "epoch_0010")
    with pytest.raises(DestinationExistsError, match=r"epoch_0010\.incomplete exists already"), lock_run(config):
        pass


def test_the_samples_of_an_epoch_that_has_begun_cannot_change(small_run, tmp_path):
    folder, changed = folder_of(small_run("fsdp2-stopped")), {"seed": 7, "override": ("seed",)}
    within, at_the_end = (
        small_config(tmp_path, engine="fsdp2", resume=str(folder / name), **changed) for name in (WITHIN, "epoch_0001")
    )
    with pytest.raises(UsageError, match="within an epoch, and --seed is 7 here and 0 in the checkpoint"):
        check_settings(within, folder / WITHIN)
    assert check_settings(at_the_end, folder / "epoch_0001")
