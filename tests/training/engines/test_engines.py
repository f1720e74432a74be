"""The engines against each other and against themselves interrupted; losses are compared as bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckpt_tools
from tests.training.conftest import in_process
from tests.training.jobs import EPOCHS, STEPS_PER_EPOCH, STILL, check_same_end, losses, small_config, train_each
from training.data.datasets import load_dataset
from training.loop.result import RunResult


def further(*values: str) -> object:
    return pytest.param(*values, marks=pytest.mark.extended)


def check_same_weights(checkpoint: Path | str, other: Path | str) -> None:
    before, after = ckpt_tools.open(checkpoint), ckpt_tools.open(other)
    for name in before:
        np.testing.assert_allclose(after[name][...], before[name][...], rtol=0, atol=1e-25, err_msg=name)


@pytest.mark.parametrize("engine", ["fsdp2", further("zero3")])
def test_a_resumed_run_continues_bit_for_bit(engine, small_run):
    resumed = small_run(f"{engine}-resumed")
    assert [(epoch.epoch, epoch.earlier_steps) for epoch in resumed.history] == [(2, 0)]
    check_same_end(resumed, small_run(engine))


@pytest.mark.parametrize("engine", [further("fsdp2"), "zero2", further("zero3")])
def test_the_learning_rate_of_a_resumed_run_holds_from_its_first_step(engine, small_run):
    """Not the one that came with the optimizer's state: with nearly none, the model stays as it was resumed."""
    whole, still = small_run(engine), small_run(f"{engine}-still")
    check_same_weights(Path(whole.checkpoint).with_name("epoch_0001"), still.checkpoint)
    [group] = ckpt_tools.open(still.checkpoint).manifest.groups
    assert (group.options["initial_lr"], group.options["weight_decay"]) == (STILL["learning_rate"], 0.0)
    assert still.accuracy == whole.history[0].held_out["accuracy"]


@pytest.mark.extended
def test_a_run_can_go_on_in_bf16(small_run):
    halved, full = small_run("zero2-to-bf16").history[0].losses, small_run("zero2").history[1].losses
    assert halved != full
    assert halved == pytest.approx(full, rel=0.02)


@pytest.mark.parametrize(("engine", "other"), [("fsdp2", "zero3"), further("zero1", "fsdp2")])
def test_an_engine_continues_the_run_of_another(engine, other, small_run):
    whole, resumed = small_run(other), small_run(f"{engine}-of-{other}")
    assert [epoch.epoch for epoch in resumed.history] == [2]
    assert resumed.history[0].losses == pytest.approx(whole.history[1].losses, rel=1e-5)


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_zero_trains_to_the_losses_of_fsdp2(engine, small_run):
    assert losses(small_run(engine)) == pytest.approx(losses(small_run("fsdp2")), rel=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["fsdp2", "zero2"])
def test_bf16_trains_near_fp32(engine, small_run):
    halved, full = losses(small_run(f"{engine}-bf16")), losses(small_run(engine))[:STEPS_PER_EPOCH]
    assert halved != full
    assert halved == pytest.approx(full, rel=0.02)


@pytest.mark.parametrize(("engine", "other"), [("fsdp2", "zero3"), further("zero2", "fsdp2")])
def test_a_run_starts_with_the_weights_of_a_checkpoint_under_other_names(engine, other, small_run):
    started, whole = small_run(f"{engine}-started"), small_run(other)
    check_same_weights(whole.checkpoint, started.checkpoint)
    assert started.history[0].held_out["accuracy"] == whole.accuracy


def test_a_run_trains_and_counts_exactly(small_run):
    result = small_run("fsdp2")
    assert len(losses(result)) == EPOCHS * STEPS_PER_EPOCH
    assert result.history[-1].mean_loss < result.history[0].mean_loss
    labels = load_dataset("digits", "held-out", None).labels.tolist()
    assert result.total == len(result.predicted) == len(labels) == 360
    assert result.correct == sum(map(int.__eq__, result.predicted, labels))


def test_each_engine_leaves_the_shards_of_both_ranks(small_run):
    dcp = {path.name for path in Path(small_run("fsdp2").checkpoint).iterdir()}
    assert dcp == {".metadata", "config.json", "__0_0.distcp", "__1_0.distcp"}
    zero = Path(small_run("zero3").checkpoint)
    tag = (zero / "latest").read_text()
    shards = {f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (0, 1) for kind in ("model", "optim")}
    assert {path.name for path in (zero / tag).iterdir()} == shards


@pytest.mark.parametrize(("engine", "other"), [("fsdp2", "zero2"), further("zero3", "fsdp2")])
def test_an_engine_continues_at_another_world_size(engine, other, small_run, tmp_path):
    expected = small_run(other)
    url = Path(expected.checkpoint).with_name("epoch_0001").as_uri()
    train_each(config := small_config(tmp_path / "run", engine=engine, num_workers=1, resume=url))
    found = RunResult.read(config.out / "result.json").history[0].losses
    assert found == pytest.approx(expected.history[1].losses, rel=1e-5)


@pytest.mark.soak
def test_a_rank_that_cannot_resume_says_why_in_one_sentence(small_run, tmp_path):
    ckpt_tools.convert(small_run("zero3").checkpoint, tmp_path / "weights.safetensors")
    config = small_config(tmp_path / "run", engine="fsdp2", num_workers=1, resume=str(tmp_path / "weights.safetensors"))
    done = in_process("-m", "training", *config.to_args())
    assert done.returncode == 2
    assert "the checkpoint does not fit the model: not in the checkpoint: the state of an optimizer" in done.stderr
    assert done.stderr.count("\n") == 1
