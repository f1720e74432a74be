"""The norm of the gradients takes one collective, however they are sharded, and clipping waits for no device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fixtures.launch import pool
from tests.training.gradient_jobs import norm_of_weights
from training.engines.gradients import LossScaler, clip_factor, multiply
from training.models.zoo import our_model

CASES: list[dict[str, Any]] = [
    {"model": "lm", "strategy": "full_shard", "tp": 2},
    {"model": "lm", "strategy": "full_shard", "pp": 2, "gradient_accumulation": 2},
    {"model": "lm-moe", "strategy": "hybrid_shard", "shard_size": 2, "ep": 2},
    {"model": "lm", "strategy": "no_shard", "cpu_offload": True},
    {"model": "lm", "strategy": "ddp"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_norm_is_that_of_the_whole_model_with_one_collective(case):
    torch.manual_seed(0)
    weights = [each.detach().double().numpy() for each in our_model(case["model"]).parameters()]
    expected = np.sqrt(sum(np.square(each).sum() for each in weights))
    found = pool(4).run(norm_of_weights, case)
    assert {count for _, count in found} == {1}
    assert len({norm for norm, _ in found}) == 1
    assert found[0][0] == pytest.approx(expected, rel=1e-6)


def test_clipping_scales_down_alone_and_needs_no_number_on_the_host():
    """Meta tensors have no values that a host could wait for."""
    factors = [float(clip_factor(torch.tensor(norm), 2.0)) for norm in (4.0, 1.0, float("inf"), float("nan"))]
    assert factors == pytest.approx([0.5, 1.0, 0.0, float("nan")], nan_ok=True)
    gradients = [torch.ones(3), torch.full((2,), 4.0)]
    multiply(gradients, torch.tensor(0.5))
    assert [each.tolist() for each in gradients] == [[0.5] * 3, [2.0] * 2]
    nowhere = torch.ones(3, device="meta")
    multiply([nowhere], clip_factor(torch.ones((), device="meta"), 2.0))


def test_the_scale_falls_at_once_and_rises_slowly():
    scaler = LossScaler(scale=4.0)
    scaler.update(is_finite=False)
    assert (scaler.scale, scaler.good_steps) == (2.0, 0)
    for _ in range(LossScaler.GROWTH_STEPS):
        scaler.update(is_finite=True)
    assert scaler.scale == 4.0
