"""``--max-steps`` ends a run after so many steps, with a checkpoint from which it goes on as if nobody had ended it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools.errors import UsageError
from tests.training.checkpoint_jobs import AskedAfter
from tests.training.loop.test_checkpointing import check_same_end, result_of
from tests.training.strategy_jobs import EPOCHS, STEPS, tiny_config, train_each
from training.checkpoints.run_folder import saved_checkpoints
from training.config.train_config import TrainConfig
from training.launchers.torchrun import run_rank

WITHIN = STEPS + 1
"""The first step of the second epoch's two."""


def config(out: Path, **values: Any) -> TrainConfig:
    return tiny_config(out, strategy="full_shard", model="cnn", save_every=EPOCHS, **values)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("max-steps")
    within = str(out / "within/checkpoints" / name(WITHIN))
    train_each(
        2,
        config(out / "whole"),
        config(out / "within", max_steps=WITHIN),
        config(out / "between", max_steps=STEPS),
        config(out / "resumed", resume=within),
    )
    return out


def name(step: int) -> str:
    return f"epoch_{step // STEPS:04d}_step_{step:06d}"


def test_a_run_ends_within_an_epoch_with_a_checkpoint(runs):
    result = result_of(runs / "within")
    assert [path.name for path in saved_checkpoints(runs / "within")] == [name(WITHIN)]
    assert result.checkpoint == str(runs / "within/checkpoints" / name(WITHIN))
    assert (result.epochs, [len(epoch.losses) for epoch in result.history]) == (1, [STEPS, 1])
    assert [save.step for save in result.saves] == [WITHIN]


def test_a_run_that_ends_where_an_epoch_does_saves_its_end(runs):
    result = result_of(runs / "between")
    assert [path.name for path in saved_checkpoints(runs / "between")] == ["epoch_0001"]
    assert (result.checkpoint, result.epochs) == (str(runs / "between/checkpoints/epoch_0001"), 1)
    assert result.history[0].losses == result_of(runs / "whole").history[0].losses


def test_without_the_option_it_goes_on_bit_for_bit(runs):
    check_same_end(result_of(runs / "resumed"), result_of(runs / "whole"))


@pytest.mark.usefixtures("alone")
def test_a_run_with_no_step_left_is_told_and_one_that_goes_on_by_itself_has_its_result(runs, tmp_path):
    run = shutil.copytree(runs / "within", tmp_path / "run")
    resume = str(run / "checkpoints" / name(WITHIN))
    asked = config(tmp_path, num_workers=1, max_steps=WITHIN, resume=resume)
    with pytest.raises(UsageError, match=r"^the checkpoint has finished 3 steps and --max-steps is 3: nothing is left"):
        run_rank(asked, torch.device("cpu"))
    run_rank(replace(asked, out=run, resume="auto"), torch.device("cpu"))
    result = result_of(run)
    assert (result.checkpoint, result.history, result.epochs) == (resume, (), 1)


@pytest.mark.usefixtures("alone")
def test_a_run_that_was_stopped_at_the_last_step_of_an_epoch_evaluates_it(tmp_path):
    asked = config(tmp_path, num_workers=1, max_steps=STEPS)
    stopped = run_rank(asked, torch.device("cpu"), AskedAfter(STEPS))
    assert stopped is not None and stopped.checkpoint == "epoch_0000_step_000002"
    run_rank(replace(asked, resume="auto"), torch.device("cpu"))
    assert result_of(tmp_path).checkpoint == str(tmp_path / "checkpoints/epoch_0001")
    assert len(result_of(tmp_path).history) == 1
