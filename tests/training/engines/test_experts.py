"""The mixture of experts: the model itself, the same losses however it is spread, and one checkpoint for all of them.

A short sample runs here. ``--soak`` adds every strategy with ``--ep``, and who resumes whom.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

import ckpt_tools
from fixtures.launch import pool
from tests.training.jobs import (
    WITHIN,
    check_same_end,
    losses,
    result_of,
    resuming,
    saving,
    starting,
    tiny_config,
    train_each,
)
from training.engines import create_engine
from training.engines.optimizers import make_warmup_schedule
from training.engines.parallel import split_experts
from training.models.experts import Experts, MixtureModel, MixtureOfExperts, MixtureSizes, compute_imbalance
from training.models.language_model import CONTEXT

WIDE, NARROW = 4, 2
SIZES = MixtureSizes()
MODEL: dict[str, Any] = {"model": "lm-moe", "model_arg": ("experts=8", "width=64", "hidden=96")}

EP: dict[str, dict[str, Any]] = {
    "ep": {"strategy": "full_shard", "ep": 2},
    "ep-all": {"strategy": "full_shard", "ep": 4},
    "ep-shard_grad_op": {"strategy": "shard_grad_op", "ep": 2},
    "ep-no_shard": {"strategy": "no_shard", "ep": 2},
    "ep-hybrid": {"strategy": "hybrid_shard", "shard_size": 2, "ep": 2},
    "ep-offload": {"strategy": "full_shard", "ep": 2, "cpu_offload": True, "forward_prefetch": 1},
}
"""On four workers: experts sharded further, one a worker, gathered once, as whole copies, in groups, offloaded."""


def test_a_token_goes_to_its_experts_and_none_is_dropped():
    """Also if all tokens go to the same two."""
    torch.manual_seed(0)
    mixture, x = MixtureOfExperts(SIZES), torch.randn(2, 3, SIZES.width)
    for crowded in (False, True):
        if crowded:
            torch.nn.init.zeros_(mixture.router.weight)
        answers, uneven = mixture(x)
        expected = torch.stack([by_hand(mixture, token) for token in x.flatten(0, 1)])
        torch.testing.assert_close(answers, expected.view_as(x))
        assert uneven.item() == pytest.approx(1.0, abs=0.5)


def by_hand(mixture: MixtureOfExperts, token: Tensor) -> Tensor:
    odds = (mixture.router.weight @ token).softmax(0)
    best = odds.topk(SIZES.chosen)
    experts = mixture.experts
    answers = []
    for expert in best.indices.tolist():
        hidden = functional.silu(experts.gate[expert] @ token) * (experts.up[expert] @ token)
        answers.append(experts.down[expert] @ hidden)
    return (torch.stack(answers) * (best.values / best.values.sum()).unsqueeze(1)).sum(0)


def test_the_balance_is_one_if_experts_are_used_evenly_and_does_not_depend_on_the_batch():
    even = torch.full((1, SIZES.experts, SIZES.experts), 1 / SIZES.experts)
    pairs = torch.tensor([[[0, 1], [2, 3], [1, 0], [3, 2]]])
    assert compute_imbalance(even, pairs).item() == pytest.approx(1.0)
    same = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(1, SIZES.experts, SIZES.experts)
    assert compute_imbalance(same, same.topk(SIZES.chosen).indices).item() == SIZES.experts / SIZES.chosen
    torch.manual_seed(0)
    odds = torch.randn(4, CONTEXT, SIZES.experts).softmax(-1)
    chosen = odds.topk(SIZES.chosen).indices
    halves = [compute_imbalance(*half) for half in zip(odds.chunk(2), chosen.chunk(2), strict=True)]
    torch.testing.assert_close(torch.stack(halves).mean(), compute_imbalance(odds, chosen))


def test_the_balance_reaches_the_router():
    torch.manual_seed(0)
    model = MixtureModel().train()
    _, added = model(torch.randint(256, (2, CONTEXT)))
    added.backward()
    for layer in (1, 3):
        router = model.get_parameter(f"layers.{layer}.feed_forward.router.weight")
        assert router.grad is not None and router.grad.abs().max() > 0
    assert isinstance(model.eval()(torch.randint(256, (2, CONTEXT))), Tensor)


def seeded_experts(*, dealt: bool = False) -> Experts:
    torch.manual_seed(0)
    made = Experts(SIZES)
    if dealt:
        split_experts(made, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return made


def exchange(counts: list[list[int]]) -> tuple[bool, bool]:
    """Each rank has so many tokens for each expert. Whether its answers have the same bits as from whole experts, and
    whether its own experts have the mean of all ranks' gradients."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dealt, whole = seeded_experts(dealt=True), seeded_experts()
    answers = dealt(tokens_of(rank, counts), torch.tensor(counts[rank : rank + 1]))
    answers.square().sum().backward()
    expected = [whole(tokens_of(one, counts), torch.tensor(counts[one : one + 1])) for one in range(world_size)]
    (torch.cat(expected).square().sum() / world_size).backward()
    same = [is_close(ours, theirs) for ours, theirs in zip(dealt.parameters(), whole.parameters(), strict=True)]
    return torch.equal(answers, expected[rank]), all(same)


def tokens_of(rank: int, counts: list[list[int]]) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randn(sum(counts[rank]), SIZES.width, generator=generator)


def is_close(dealt: Tensor, whole: Tensor) -> bool:
    assert isinstance(dealt.grad, DTensor) and whole.grad is not None
    assert len(dealt.grad.to_local()) < SIZES.experts
    return torch.allclose(dealt.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "counts",
    [[[3, 0, 2, 5], [1, 4, 0, 2]], [[10, 0, 0, 0], [7, 0, 0, 0]], [[0, 0, 0, 6], [0, 5, 0, 0]]],
    ids=["uneven", "all to one", "each to the other"],
)
def test_experts_that_are_dealt_out_answer_with_the_same_bits(counts):
    assert pool(2).run(exchange, counts) == [(True, True)] * 2


@pytest.mark.extended
def test_experts_learn_the_same_with_and_without_ep_and_go_on_either_way(tmp_path, pytestconfig):
    """``zero2`` trains without ``--ep``. Of each case a whole run, its last step alone, its second epoch without
    ``--ep`` by ZeRO-3 on two workers, and a start from the weights of ``zero2``; and the second epoch of ``zero2`` with
    ``--ep``. Nothing in a checkpoint says how experts were spread."""
    wide, narrow = ({**MODEL, "num_workers": workers} for workers in (WIDE, NARROW))
    zero = tiny_config(tmp_path / "zero2", strategy="zero2", **narrow)
    back = resuming(tmp_path / "back", zero.out, strategy="full_shard", ep=2, **narrow)
    train_each(zero, back)
    assert losses(back) == pytest.approx(losses(zero)[2:], rel=1e-5)
    plain = ckpt_tools.open(result_of(zero).checkpoint)
    assert losses(zero)[-1] < losses(zero)[0] - 1
    for name, case in (EP if pytestconfig.getoption("--soak") else {"ep": EP["ep"]}).items():
        whole = tiny_config(tmp_path / name, **wide, **case, **saving("full_shard"))
        again = resuming(tmp_path / f"{name}-again", whole.out, WITHIN, **wide, **case)
        started = starting(tmp_path / f"{name}-started", zero.out, **wide, **case)
        other = resuming(tmp_path / f"{name}-other", whole.out, strategy="zero3", **narrow)
        train_each(whole, again, started, other)
        assert losses(whole) == pytest.approx(losses(zero), rel=1e-5), name
        assert result_of(again).history[0].earlier_steps == 1
        check_same_end(result_of(again), result_of(whole))
        assert losses(other) == pytest.approx(losses(whole)[2:], rel=1e-5), name
        assert ckpt_tools.diff(result_of(zero).checkpoint, result_of(started).checkpoint, state="model").equal, name
        dealt = ckpt_tools.open(result_of(whole).checkpoint)
        assert {*dealt, *dealt.manifest.aliases} == {*plain, *plain.manifest.aliases}, name
        for weight in ("gate", "up", "down"):
            full = f"layers.3.feed_forward.experts.{weight}"
            assert dealt[full].shape == plain[full].shape, name
            assert abs(dealt[full][...] - plain[full][...]).max() < 2e-4, (name, full)


@pytest.mark.extended
def test_experts_go_on_in_fp16_with_their_scale(tmp_path):
    model = {"model": "lm-moe", "model_arg": ("experts=4", "chosen=1", "width=32", "hidden=48")}
    half = {**model, "strategy": "full_shard", "precision": "fp16", "ep": 2}
    whole = tiny_config(tmp_path / "whole", **half, **saving("full_shard"))
    again = resuming(tmp_path / "again", whole.out, WITHIN, **half)
    train_each(whole, again)
    saved = ckpt_tools.open(result_of(again).checkpoint)
    assert saved.manifest.extra["loss_scaler"] == {"scale": 2.0**16, "good_steps": 4}
    check_same_end(result_of(again), result_of(whole))


def overflowing() -> tuple[float, bool]:
    """One step in fp16 whose scale is far too large: the scale after it, and whether an expert's weight moved."""
    config = tiny_config(Path("/run"), model="lm-moe", strategy="full_shard", ep=2, precision="fp16")
    engine: Any = create_engine(config, make_warmup_schedule(10, 0.1), torch.device("cpu"))
    engine.scaler.scale = 2.0**100
    weights = [each.to_local() for each in engine.model.parameters()]
    before = [each.clone() for each in weights]
    words = torch.zeros(1, CONTEXT, dtype=torch.int64)
    engine.step((words, words))
    engine.close()
    moved = any(not torch.equal(*pair) for pair in zip(weights, before, strict=True))
    return engine.scaler.scale, moved


@pytest.mark.extended
def test_all_workers_leave_a_step_out_if_gradients_of_experts_overflow():
    assert pool(2).run(overflowing) == [(2.0**100 / 2, False)] * 2


SPREAD: dict[str, dict[str, Any]] = {
    "ep-fp16": {"strategy": "full_shard", "ep": 2, "precision": "fp16"},
    "ep-no_shard-fp16": {"strategy": "no_shard", "ep": 2, "precision": "fp16"},
    "ddp-bf16": {"strategy": "ddp", "precision": "bf16"},
    "zero2_offload-bf16": {"strategy": "zero2_offload", "precision": "bf16"},
}
"""With ``--ep`` in 16 bits, and without it in the ways to spread a model that the runs above leave out."""


@pytest.mark.soak
@pytest.mark.parametrize("name", SPREAD)
def test_experts_go_on_at_the_same_and_at_another_world_size(name, tmp_path):
    case = {**MODEL, **SPREAD[name]}
    plain = tiny_config(tmp_path / "plain", strategy="zero2", **MODEL)
    whole = tiny_config(tmp_path / "whole", num_workers=WIDE, save_every_steps=1, **case)
    again = resuming(tmp_path / "again", whole.out, WITHIN, num_workers=WIDE, **case)
    narrow = resuming(tmp_path / "narrow", whole.out, num_workers=NARROW, **case)
    train_each(whole, again, plain, narrow)
    is_whole = "precision" not in case
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-5 if is_whole else 0.01)
    assert losses(again) == losses(whole)[-1:]
    assert ckpt_tools.diff(result_of(again).checkpoint, result_of(whole).checkpoint).equal
    assert losses(narrow) == pytest.approx(losses(whole)[2:], rel=1e-5 if is_whole else 1e-3)
