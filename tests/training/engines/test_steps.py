"""A step costs what the framework's own does: the norm of the gradients takes one collective however they are sharded,
and clipping waits for no device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from fixtures.launch import pool
from tests.training.jobs import tiny_config
from training.engines import create_engine
from training.engines.blocks import RunningAverages
from training.engines.optimizers import LossScaler, clip_factor, make_warmup_schedule, scale_gradients, total_norm
from training.models.zoo import build_own_model

OUT = Path("/run")


def engine_of(**values: Any) -> Any:
    config = tiny_config(OUT, num_workers=torch.distributed.get_world_size(), **values)
    return create_engine(config, make_warmup_schedule(10, 0.1), torch.device("cpu"))


class Averages(nn.Module):
    """A running average, a count and a constant, on each rank its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((2,), float(rank)))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("constant", torch.tensor(float(rank)), persistent=False)


def average() -> list[tuple[list[float], int, float]]:
    """After each of two steps. A checkpoint that is loaded between them puts another tensor in the place of one."""
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(1, 1), Averages(rank))
    averages, found = RunningAverages(model), []
    for step in range(2):
        averages.average_over_ranks()
        own = model[1]
        found.append((own.mean.tolist(), int(own.count), float(own.constant)))
        own.mean = torch.full((2,), 10.0 * rank + step)
    return found


def test_running_averages_are_shared_and_constants_are_not():
    """Also those that a checkpoint put into the model meanwhile."""
    assert pool(2).run(average) == [[([0.5, 0.5], rank, rank), ([5.0, 5.0], rank, rank)] for rank in (0, 1)]


def norm_of_weights(values: dict[str, Any]) -> tuple[float, int]:
    """The norm with the first weights as their own gradients, and the number of collectives for it."""
    engine = engine_of(**values)
    for weight in engine.model.parameters():
        weight.grad = weight.detach().clone()
    with CommDebugMode() as counted:
        norm = total_norm(weight.grad for weight in engine._counted_parameters())
    engine.close()
    return float(norm), counted.get_total_counts()


@pytest.mark.parametrize(
    "case",
    [
        {"model": "lm", "strategy": "full_shard", "tp": 2},
        {"model": "lm", "strategy": "full_shard", "pp": 2, "gradient_accumulation": 2},
        {"model": "lm-moe", "strategy": "hybrid_shard", "shard_size": 2, "ep": 2},
        pytest.param({"model": "lm", "strategy": "no_shard", "cpu_offload": True}, marks=pytest.mark.extended),
        pytest.param({"model": "lm", "strategy": "ddp"}, marks=pytest.mark.extended),
    ],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_the_norm_is_that_of_the_whole_model_with_one_collective(case):
    torch.manual_seed(0)
    weights = [each.detach().double().numpy() for each in build_own_model(case["model"]).parameters()]
    expected = np.sqrt(sum(np.square(each).sum() for each in weights))
    [(norm, count)] = {*pool(4).run(norm_of_weights, case)}
    assert count == 1
    assert norm == pytest.approx(expected, rel=1e-6)


def test_clipping_scales_down_alone_and_needs_no_number_on_the_host():
    """Meta tensors have no values that a host could wait for."""
    factors = [float(clip_factor(torch.tensor(norm), 2.0)) for norm in (4.0, 1.0, float("inf"), float("nan"))]
    assert factors == pytest.approx([0.5, 1.0, 0.0, float("nan")], nan_ok=True)
    gradients = [torch.ones(3), torch.full((2,), 4.0)]
    scale_gradients(gradients, torch.tensor(0.5))
    assert [each.tolist() for each in gradients] == [[0.5] * 3, [2.0] * 2]
    nowhere = torch.ones(3, device="meta")
    scale_gradients([nowhere], clip_factor(torch.ones((), device="meta"), 2.0))


def test_the_scale_falls_at_once_and_rises_slowly():
    scaler = LossScaler(scale=4.0)
    scaler.update_scale(is_finite=False)
    assert (scaler.scale, scaler.good_steps) == (2.0, 0)
    for _ in range(LossScaler.GROWTH_STEPS):
        scaler.update_scale(is_finite=True)
    assert scaler.scale == 4.0
