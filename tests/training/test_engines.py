"""The engines against each other and against themselves interrupted; losses are compared as bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.conftest import EPOCHS, NUM_SAMPLES, run_training, small_run
from training.config import EngineName
from training.data import load_dataset
from training.result import RunResult

WholeRun = Callable[[EngineName], RunResult]


def losses(result: RunResult) -> list[float]:
    return [loss for epoch in result.history for loss in epoch.losses]


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_a_resumed_run_continues_bit_for_bit(engine: EngineName, whole_run: WholeRun, tmp_path: Path) -> None:
    whole = whole_run(engine)
    first_epoch = Path(whole.checkpoint).with_name("epoch_0001")
    resumed = small_run(engine, tmp_path / "resumed", f"--resume={first_epoch}")
    assert [epoch.epoch for epoch in resumed.history] == [2]
    assert resumed.history[0].losses == whole.history[1].losses
    assert resumed.predicted == whole.predicted


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_zero_trains_to_the_losses_of_fsdp2(engine: EngineName, whole_run: WholeRun) -> None:
    assert losses(whole_run(engine)) == pytest.approx(losses(whole_run("fsdp2")), rel=1e-5)


def test_a_run_trains_and_counts_exactly(whole_run: WholeRun) -> None:
    result = whole_run("fsdp2")
    assert len(losses(result)) == EPOCHS * (NUM_SAMPLES // 64)
    assert result.history[-1].mean_loss < result.history[0].mean_loss
    labels = load_dataset("digits", "held-out", None).labels.tolist()
    assert result.total == len(result.predicted) == len(labels) == 360
    assert result.correct == sum(map(int.__eq__, result.predicted, labels))


def test_each_engine_leaves_the_shards_of_both_ranks(whole_run: WholeRun) -> None:
    dcp = {path.name for path in Path(whole_run("fsdp2").checkpoint).iterdir()}
    assert dcp == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    zero = Path(whole_run("zero3").checkpoint)
    tag = (zero / "latest").read_text()
    shards = {f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (0, 1) for kind in ("model", "optim")}
    assert {path.name for path in (zero / tag).iterdir()} == shards


def test_bf16_trains_near_fp32(whole_run: WholeRun, tmp_path: Path) -> None:
    halved = small_run("fsdp2", tmp_path / "bf16", "--precision=bf16", "--until=1", "--num-workers=1")
    assert losses(halved) != losses(whole_run("fsdp2"))[: NUM_SAMPLES // 64]
    assert losses(halved) == pytest.approx(losses(whole_run("fsdp2"))[: NUM_SAMPLES // 64], rel=0.02)


def test_a_rank_that_cannot_resume_says_why_in_one_sentence(whole_run: WholeRun, tmp_path: Path) -> None:
    of_zero = whole_run("zero3").checkpoint
    chosen = ["--engine=fsdp2", "--launcher=torchrun", "--num-workers=1"]
    done = run_training(*chosen, f"--out={tmp_path / 'run'}", f"--resume={of_zero}")
    assert done.returncode == 4
    assert done.stderr.startswith(f"error: {of_zero} holds no .metadata")
    assert done.stderr.count("\n") == 1
