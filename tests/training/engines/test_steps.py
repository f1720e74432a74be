"""A step costs what the framework's own does: nothing walks through the model, and ranks agree by one byte."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from fixtures.launch import pool
from tests.training.step_jobs import agree, average, refused_length
from tests.training.strategy_jobs import tiny_config
from training.config.schedule import schedule_for
from training.engines import create_engine
from training.engines.base import mean_of
from training.models.losses import standard_loss, standard_metrics


@pytest.mark.parametrize(
    "reasons",
    [
        [(False, False, False, False), (False, False, False, False)],
        [(True, False, False, True), (False, False, False, True)],
        [(False, False, True, False), (True, True, False, False)],
    ],
)
def test_all_ranks_agree_by_one_element_whoever_knows_a_reason(reasons):
    agreed = tuple(map(any, zip(*reasons, strict=True)))
    assert pool(2).run(agree, reasons) == [(agreed, 1)] * 2


def test_running_averages_are_shared_and_constants_are_not():
    """Also those that a checkpoint put into the model meanwhile."""
    assert pool(2).run(average) == [[([0.5, 0.5], rank, rank), ([5.0, 5.0], rank, rank)] for rank in (0, 1)]


@pytest.mark.parametrize("strategy", ["full_shard", "zero2"])
def test_a_step_walks_through_no_modules(strategy, tmp_path, alone, monkeypatch):
    """Only the first one after an evaluation."""
    config = tiny_config(tmp_path, strategy=strategy, model="cnn", num_workers=1)
    engine = create_engine(config, schedule_for(10, 0.1), torch.device("cpu"))
    calls: list[bool] = []
    train = nn.Module.train

    def counted(module: nn.Module, mode: bool = True) -> nn.Module:
        calls.append(mode)
        return train(module, mode)

    monkeypatch.setattr(nn.Module, "train", counted)
    images, labels = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    engine.step((images, labels))
    assert calls == []
    engine.evaluated(partial(standard_metrics, loss=standard_loss), (images, labels))
    evaluated = len(calls)
    assert True not in calls and evaluated > 0
    engine.step((images, labels))
    assert calls[evaluated:] == [True] * evaluated
    engine.step((images, labels))
    assert len(calls) == 2 * evaluated
    engine.close()


def test_one_loss_is_itself_and_several_are_averaged():
    one, other = torch.tensor(1.0), torch.tensor(2.0)
    assert mean_of([one]) is one
    assert mean_of([one, other]).item() == 1.5
    logits, labels = torch.tensor([[0.0, 1.0]]), torch.tensor([1])
    plain = standard_loss(lambda inputs: inputs, (logits, labels))
    assert torch.equal(standard_loss(lambda inputs: (inputs, torch.tensor(0.5)), (logits, labels)), plain + 0.5)


def test_tensor_parallelism_refuses_texts_of_which_workers_would_hold_unequal_slices():
    sentence = "--tp 2 does not divide a text of 33 bytes: give another length of the samples"
    assert pool(2).run(refused_length) == [sentence] * 2
