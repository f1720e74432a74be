"""A run that is stopped or killed anywhere goes on as if it had not been; and what it keeps."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError, UsageError
from fixtures.launch import pool
from tests.training import checkpoint_jobs, upload_jobs
from tests.training.checkpoint_jobs import ENGINES, IN_THE_SOAK, STOPPED_AFTER
from tests.training.documents import ALL
from tests.training.jobs import EPOCHS, NUM_WORKERS, SECONDS, STEPS_PER_EPOCH, small_config
from tests.training.strategy_jobs import train_each
from training.__main__ import main
from training.checkpoints.locking import only_run
from training.checkpoints.progress import Progress
from training.checkpoints.run_folder import resume_folder, saved_checkpoints
from training.checkpoints.settings import check_settings, lines_before_start
from training.config.train_config import TrainConfig
from training.loop.result import RunResult
from training.loop.saving import remove_old

WITHIN = f"epoch_0001_step_{STOPPED_AFTER:06d}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pytestconfig):
    out = tmp_path_factory.mktemp("stopped")
    engines = ENGINES + IN_THE_SOAK if pytestconfig.getoption("--soak") else ENGINES
    for config, stopped_after in checkpoint_jobs.runs(out, engines):
        pool(NUM_WORKERS).run(checkpoint_jobs.train, config, stopped_after, seconds=SECONDS)
    return out


def result_of(folder: Path) -> RunResult:
    return RunResult.read(folder / "result.json")


def check_same_end(resumed: RunResult, whole: RunResult) -> None:
    """The same steps from where it went on, the same mean losses, predictions and bits of state."""
    theirs = whole.history[len(whole.history) - len(resumed.history) :]
    for ours, epoch in zip(resumed.history, theirs, strict=True):
        assert ours.earlier_steps + len(ours.losses) == len(epoch.losses)
        assert ours.losses == epoch.losses[ours.earlier_steps :]
        assert ours.mean_loss == epoch.mean_loss
    assert resumed.predicted == whole.predicted
    assert ckpt_tools.diff(resumed.checkpoint, whole.checkpoint).equal


@pytest.mark.parametrize("engine", [*ENGINES, *(pytest.param(each, marks=pytest.mark.soak) for each in IN_THE_SOAK)])
def test_a_run_that_stopped_within_an_epoch_goes_on_bit_for_bit(engine, runs, small_run):
    resumed = result_of(runs / f"{engine}-stopped")
    assert [path.name for path in saved_checkpoints(runs / f"{engine}-stopped")] == ["epoch_0001", WITHIN, "epoch_0002"]
    assert [(epoch.epoch, epoch.earlier_steps) for epoch in resumed.history] == [(2, STOPPED_AFTER - STEPS_PER_EPOCH)]
    check_same_end(resumed, small_run(engine))


def test_a_run_that_stopped_before_an_evaluation_makes_up_for_it(runs, small_run):
    """Each epoch is measured once, as if nobody had stopped the run."""
    resumed, whole = result_of(runs / "ended"), small_run("fsdp2")
    assert (runs / "ended/checkpoints/epoch_0000_step_000004").is_dir()
    assert [(epoch.earlier_steps, len(epoch.losses)) for epoch in resumed.history] == [(4, 0), (0, 4)]
    assert resumed.history[0].held_out == whole.history[0].held_out
    check_same_end(resumed, whole)


@pytest.mark.parametrize(("engine", "other"), [("fsdp2", "zero3"), ("zero1", "fsdp2")])
def test_the_rest_of_an_epoch_is_trained_at_another_world_size_and_by_another_engine(
    engine, other, runs, small_run, tmp_path
):
    resume = str(runs / f"{other}-stopped/checkpoints" / WITHIN)
    config = small_config(tmp_path / "run", engine=engine, num_workers=1, resume=resume)
    train_each(1, config)
    [epoch] = result_of(tmp_path / "run").history
    whole = small_run(other).history[1]
    assert epoch.losses == pytest.approx(whole.losses[2:], rel=1e-5)
    assert epoch.mean_loss == pytest.approx(whole.mean_loss, rel=1e-5)


def test_an_asynchronous_save_writes_what_a_synchronous_one_does(runs):
    """After each step, while the next one changes the weights: the copy is of the step it is named after."""
    names = [path.name for path in saved_checkpoints(runs / "each-step")]
    assert names == [path.name for path in saved_checkpoints(runs / "each-step-async")]
    assert len(names) == EPOCHS * STEPS_PER_EPOCH
    for name in names:
        one, other = (runs / each / "checkpoints" / name for each in ("each-step", "each-step-async"))
        assert ckpt_tools.diff(one, other).equal
    assert result_of(runs / "each-step").history[-1].losses == result_of(runs / "each-step-async").history[-1].losses


@pytest.mark.parametrize("name", ["each-step", "each-step-async"])
def test_the_stall_of_each_save_is_recorded(name, runs):
    saves = result_of(runs / name).saves
    assert [save.step for save in saves] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(0 <= save.waited_seconds <= save.stall_seconds <= save.seconds for save in saves)
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    assert [line["checkpoint"] for line in lines if "checkpoint" in line] == [save.checkpoint for save in saves]
    assert [line["epoch"] for line in lines if "accuracy" in line] == [1, 2]


def test_each_rank_has_random_numbers_of_its_own_at_each_step():
    pool(NUM_WORKERS).run(checkpoint_jobs.check_randomness)


@pytest.mark.parametrize("engine", ["fsdp2", "zero1"])
def test_a_checkpoint_is_sent_away_while_training_goes_on(engine, tmp_path):
    pool(NUM_WORKERS).run(upload_jobs.trains_beside_an_upload, tmp_path, engine, seconds=SECONDS)


def test_a_checkpoint_that_cannot_be_sent_ends_the_run(tmp_path):
    pool(NUM_WORKERS).run(upload_jobs.ends_when_an_upload_fails, tmp_path, seconds=SECONDS)


def test_a_run_keeps_its_last_and_its_best_checkpoints(runs):
    losses = {f"epoch_{epoch.epoch:04d}": epoch.mean_loss for epoch in result_of(runs / "kept").history}
    kept = {path.name for path in saved_checkpoints(runs / "kept")}
    assert kept == {"epoch_0002_step_000011", "epoch_0003", min(losses, key=lambda name: losses[name])}


def test_when_a_checkpoint_is_due():
    every = {"engine": "fsdp2", "save_every": 2, "save_every_steps": 5, "epochs": 3}
    policy = TrainConfig(out=Path("/run"), **every, save_every_minutes=0.5)
    assert [policy.saves_after_epoch(epoch) for epoch in (1, 2, 3)] == [False, True, True]
    assert [policy.saves_after_step(step) for step in (4, 5, 6, 10)] == [False, True, False, True]
    assert [policy.saves_after_seconds(seconds) for seconds in (29, 30)] == [False, True]
    ending = TrainConfig(out=Path("/run"), **every, max_steps=7)
    assert [ending.saves_after_step(step) for step in (5, 6, 7, 8)] == [True, False, True, False]
    never = TrainConfig(out=Path("/run"), engine="fsdp2")
    assert not never.saves_after_step(5) and not never.saves_after_seconds(1e9)


def test_names_sort_as_positions_do():
    positions = [Progress(0, 3, batch=3), Progress(1, 4), Progress(1, 5, batch=1), Progress(1, 11, batch=7)]
    names = [position.name for position in [*positions, Progress(2, 12)]]
    assert names == sorted(names)
    assert names[0] == "epoch_0000_step_000003"


@pytest.fixture
def filled(tmp_path, small_run):
    """A run's folder with complete checkpoints of these names, and the accuracy of its epochs."""
    source = Path(small_run("fsdp2").checkpoint)

    def fill(names: list[str], accuracies: dict[str, float], **values: Any) -> TrainConfig:
        for name in names:
            shutil.copytree(source, tmp_path / "checkpoints" / name, copy_function=os.link)
        lines = [{"epoch": int(name[6:10]), "accuracy": value} for name, value in accuracies.items()]
        (tmp_path / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines) + '{"epoch": 9, "acc'
        )
        return TrainConfig(out=tmp_path, engine="fsdp2", launcher="torchrun", **values)

    return fill


@pytest.mark.parametrize("seed", range(20))
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
    remove_old(config)
    whole = sorted({*epochs, *within} - {broken})
    measured = accuracies.keys() & {*whole}
    best = {max(measured, key=lambda name: accuracies[name])} if measured else {*whole}
    expected = {*whole[-keep_last:], broken, mine, ".epoch_0099.partial", *(best if keep_best else ())}
    assert {path.name for path in folder.iterdir()} == expected


@pytest.mark.parametrize("resume", ["auto", "latest"])
def test_the_newest_complete_checkpoint_is_resumed_and_a_damaged_one_is_set_aside(resume, filled, capsys):
    """Whatever Ray's record says: torchrun may have gone on since."""
    names = ["epoch_0002", "epoch_0009", "epoch_0009_step_000046", "epoch_0010"]
    config = filled(names, {}, resume=resume)
    folder = config.out / "checkpoints"
    (folder / "checkpoint_manager_snapshot.json").write_text('{"checkpoint_results": []}')
    (folder / ".epoch_0011.partial").mkdir()
    assert resume_folder(config) == folder / "epoch_0010"
    (folder / "epoch_0010/__1_0.distcp").unlink()
    assert resume_folder(config) == folder / names[2]
    assert lines_before_start(config, None) == ["resuming epoch_0009_step_000046 (dcp, 2 ranks)"]
    with only_run(config):
        assert capsys.readouterr().out == "epoch_0010 is not complete: renamed to epoch_0010.incomplete\n"
    left = {path.name for path in folder.iterdir() if path.is_dir()}
    assert left == {*names[:3], "epoch_0010.incomplete"}
    shutil.copytree(folder / "epoch_0010.incomplete", folder / "epoch_0010")
    with pytest.raises(DestinationExistsError, match=r"epoch_0010\.incomplete exists already"), only_run(config):
        pass


def test_auto_begins_anew_where_nothing_is_complete(filled):
    config = filled([], {}, resume="auto")
    assert resume_folder(config) is None
    assert lines_before_start(config, None) == [f"{config.out} holds no complete checkpoint: a new run begins"]


def test_the_samples_of_an_epoch_that_has_begun_cannot_change(runs):
    resume = runs / "fsdp2-stopped/checkpoints" / WITHIN
    changed = {"seed": 7, "override": ("seed",)}
    with pytest.raises(UsageError, match="within an epoch, and --seed is 7 here and 0 in the checkpoint"):
        check_settings(small_config(runs / "new", engine="fsdp2", resume=str(resume), **changed), resume)
    at_the_end = resume.with_name("epoch_0001")
    assert check_settings(small_config(runs / "new", engine="fsdp2", resume=str(at_the_end), **changed), at_the_end)


TAUGHT = re.findall(r"(?m)^\$ ckpt-tools train (.*)$", ALL.split("## Checkpoints and resuming")[1].split("\n## ")[0])
SMALL = "--launcher=torchrun --num-workers=1 --num-samples=64 --epochs=2"


@pytest.mark.timeout(3600)
def test_the_commands_that_the_page_teaches_work(tmp_path, pytestconfig):
    """One after the other in one folder; without the soak, their options fit together."""
    assert len(TAUGHT) == 7
    for taught in TAUGHT:
        TrainConfig(**main.make_context("training", shlex.split(taught)).params)
        if pytestconfig.getoption("--soak"):
            command = [sys.executable, "-m", "training", *shlex.split(taught), *SMALL.split()]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (taught, done.stderr)
