"""The mixture of experts: the model itself, the same losses however it is spread, and one checkpoint for all of them.

A short sample runs here. ``--soak`` adds every strategy with ``--ep``, and who resumes whom.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import ckpt_tools
from fixtures.launch import pool
from tests.training.engines.test_strategies import WITHIN, losses, result_of, resuming, saving, starting
from tests.training.expert_jobs import exchange, overflowing, reads_of_the_device, seeded_experts
from tests.training.strategy_jobs import tiny_config, train_each
from training.config.model_names import MODELS
from training.loop.result import RunResult
from training.models.experts import MixtureModel, MixtureOfExperts, MixtureSizes, imbalance
from training.models.language_model import CONTEXT

WIDE, NARROW = 4, 2
SIZES = MixtureSizes()
MODEL: dict[str, Any] = {"model": "lm-moe", "model_arg": ("experts=8", "width=64", "hidden=96")}
ONE_EACH: dict[str, Any] = {"model": "lm-moe", "model_arg": ("experts=8", "chosen=1", "width=64", "hidden=96")}

EP: dict[str, dict[str, Any]] = {
    "ep": {"strategy": "full_shard", "ep": 2},
    "ep-all": {"strategy": "full_shard", "ep": 4},
    "ep-shard_grad_op": {"strategy": "shard_grad_op", "ep": 2},
    "ep-no_shard": {"strategy": "no_shard", "ep": 2},
    "ep-hybrid": {"strategy": "hybrid_shard", "shard_size": 2, "ep": 2},
    "ep-offload": {"strategy": "full_shard", "ep": 2, "cpu_offload": True, "forward_prefetch": 1},
}
"""On four workers: experts sharded further, one a worker, gathered once, as whole copies, in groups, offloaded."""

SAMPLE = ("ep",)
Each = Callable[[str], dict[str, RunResult]]


def test_a_token_goes_to_its_experts_and_none_is_dropped():
    """Also if all tokens go to the same two."""
    torch.manual_seed(0)
    mixture, x = MixtureOfExperts(SIZES), torch.randn(2, 3, SIZES.width)
    for crowded in (False, True):
        if crowded:
            torch.nn.init.zeros_(mixture.router.weight)
        answers, uneven = mixture(x)
        torch.testing.assert_close(
            answers, torch.stack([by_hand(mixture, token) for token in x.flatten(0, 1)]).view_as(x)
        )
        assert uneven.item() == pytest.approx(1.0, abs=0.5)


def by_hand(mixture: MixtureOfExperts, token: torch.Tensor) -> torch.Tensor:
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
    assert imbalance(even, pairs).item() == pytest.approx(1.0)
    same = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(1, SIZES.experts, SIZES.experts)
    assert imbalance(same, same.topk(SIZES.chosen).indices).item() == SIZES.experts / SIZES.chosen
    torch.manual_seed(0)
    odds = torch.randn(4, CONTEXT, SIZES.experts).softmax(-1)
    chosen = odds.topk(SIZES.chosen).indices
    halves = [imbalance(*half) for half in zip(odds.chunk(2), chosen.chunk(2), strict=True)]
    torch.testing.assert_close(torch.stack(halves).mean(), imbalance(odds, chosen))


def test_the_balance_reaches_the_router():
    torch.manual_seed(0)
    model = MixtureModel().train()
    _, added = model(torch.randint(256, (2, CONTEXT)))
    added.backward()
    for layer in (1, 3):
        router = model.get_parameter(f"layers.{layer}.feed_forward.router.weight")
        assert router.grad is not None and router.grad.abs().max() > 0
    assert isinstance(model.eval()(torch.randint(256, (2, CONTEXT))), torch.Tensor)


def test_the_weights_of_experts_are_stacked():
    shapes = {name: tuple(weight.shape) for name, weight in seeded_experts().named_parameters()}
    wide = (SIZES.experts, SIZES.hidden, SIZES.width)
    assert shapes == {"gate": wide, "up": wide, "down": (SIZES.experts, SIZES.width, SIZES.hidden)}
    assert MODELS["lm-moe"].experts == SIZES.experts


@pytest.mark.parametrize(
    "counts",
    [
        [[3, 0, 2, 5], [1, 4, 0, 2]],
        [[10, 0, 0, 0], [7, 0, 0, 0]],
        [[0, 0, 0, 6], [0, 5, 0, 0]],
    ],
    ids=["uneven", "all to one", "each to the other"],
)
def test_experts_that_are_dealt_out_answer_with_the_same_bits(counts):
    assert pool(2).run(exchange, counts) == [(True, True)] * 2


def test_a_layer_of_experts_waits_once_for_the_device():
    assert pool(2).run(reads_of_the_device, [[3, 0, 2, 5], [1, 4, 0, 2]]) == [1, 1]


@pytest.fixture(scope="module")
def cases(request):
    names = EP if request.config.getoption("--soak") else SAMPLE
    return {name: EP[name] for name in names}


@pytest.fixture(scope="module")
def runs(cases, tmp_path_factory):
    """``zero2`` trains without ``--ep``. Of each case ``NAME`` a whole run, ``NAME-again`` its last step alone,
    ``NAME-other`` its second epoch without ``--ep`` by ZeRO-3, and ``NAME-started`` from the weights of ``zero2``. And
    ``back``, the second epoch of ``zero2`` with ``--ep``."""
    out = tmp_path_factory.mktemp("experts")
    wide, narrow = ({**MODEL, "num_workers": workers} for workers in (WIDE, NARROW))
    zero = tiny_config(out / "zero2", strategy="zero2", **narrow)
    whole = [tiny_config(out / name, **wide, **case, **saving("full_shard")) for name, case in cases.items()]
    again = [resuming(out / f"{name}-again", out / name, WITHIN, **wide, **case) for name, case in cases.items()]
    other = [resuming(out / f"{name}-other", out / name, strategy="zero3", **narrow) for name in cases]
    started = [starting(out / f"{name}-started", zero.out, **wide, **case) for name, case in cases.items()]
    back = resuming(out / "back", zero.out, strategy="full_shard", ep=2, **narrow)
    train_each(NARROW, zero, back)
    train_each(WIDE, *whole, *again, *started)
    train_each(NARROW, *other)
    return out


@pytest.fixture(scope="module")
def each(cases, runs):
    """The results of all cases, of those runs whose names end so."""
    return lambda ending: {name: result_of(runs / f"{name}{ending}") for name in cases}


@pytest.mark.extended
def test_experts_train_to_the_same_losses_with_and_without_ep(runs, each):
    plain = losses(result_of(runs / "zero2"))
    assert plain[-1] < plain[0] - 1
    for name, result in each("").items():
        assert losses(result) == pytest.approx(plain, rel=1e-5), name


@pytest.mark.extended
def test_experts_go_on_bit_for_bit_at_the_same_layout(each):
    whole = each("")
    for name, again in each("-again").items():
        [ours], theirs = again.history, whole[name].history[1]
        assert (ours.losses, ours.mean_loss) == (theirs.losses[1:], theirs.mean_loss), name
        assert again.predicted == whole[name].predicted, name
        assert ckpt_tools.diff(again.checkpoint, whole[name].checkpoint).equal, name


@pytest.mark.extended
def test_experts_go_on_without_ep_by_the_other_framework_and_back(runs, each):
    """At another world size: ZeRO-3 on two workers after FSDP2 on four, and FSDP2 after ZeRO-2."""
    whole = each("")
    for name, other in each("-other").items():
        assert other.history[0].losses == pytest.approx(whole[name].history[1].losses, rel=1e-5), name
    back, zero = (result_of(runs / name).history[-1].losses for name in ("back", "zero2"))
    assert back == pytest.approx(zero, rel=1e-5)


@pytest.mark.extended
def test_experts_start_from_the_weights_of_a_run_without_ep(runs, each):
    source = result_of(runs / "zero2").checkpoint
    for name, started in each("-started").items():
        assert ckpt_tools.diff(source, started.checkpoint, state="model").equal, name


@pytest.mark.extended
def test_a_checkpoint_says_nothing_about_ep(runs, each):
    plain = ckpt_tools.open(result_of(runs / "zero2").checkpoint)
    for name, result in each("").items():
        other = ckpt_tools.open(result.checkpoint)
        assert {*other, *other.manifest.aliases} == {*plain, *plain.manifest.aliases}, name
        for weight in ("gate", "up", "down"):
            full = f"layers.3.feed_forward.experts.{weight}"
            assert other[full].shape == plain[full].shape, name
            assert abs(other[full][...] - plain[full][...]).max() < 2e-4, (name, full)


@pytest.mark.extended
def test_experts_go_on_in_fp16_with_their_scale(tmp_path):
    half = {**ONE_EACH, "strategy": "full_shard", "precision": "fp16"}
    whole = tiny_config(tmp_path / "whole", ep=2, **half, **saving("full_shard"))
    again = resuming(tmp_path / "again", whole.out, WITHIN, ep=2, **half)
    train_each(NARROW, whole, again)
    saved = ckpt_tools.open(result_of(again.out).checkpoint)
    assert saved.manifest.extra["loss_scaler"] == {"scale": 2.0**16, "good_steps": 4}
    assert losses(result_of(again.out)) == losses(result_of(whole.out))[-1:]
    assert ckpt_tools.diff(result_of(again.out).checkpoint, result_of(whole.out).checkpoint).equal


@pytest.mark.extended
def test_all_workers_leave_a_step_out_if_gradients_of_experts_overflow():
    scales, moved = zip(*pool(2).run(overflowing), strict=True)
    assert set(scales) == {2.0**100 / 2}
    assert not any(moved)


SPREAD: dict[str, dict[str, Any]] = {
    "ep-fp16": {"strategy": "full_shard", "ep": 2, "precision": "fp16"},
    "ep-bf16": {"strategy": "full_shard", "ep": 2, "precision": "bf16"},
    "ep-offload-fp16": {"strategy": "full_shard", "ep": 2, "precision": "fp16", "cpu_offload": True},
    "ep-hybrid-bf16": {"strategy": "hybrid_shard", "shard_size": 2, "ep": 2, "precision": "bf16"},
    "ep-no_shard-fp16": {"strategy": "no_shard", "ep": 2, "precision": "fp16"},
    "ddp": {"strategy": "ddp"},
    "ddp-bf16": {"strategy": "ddp", "precision": "bf16"},
    "hybrid_shard": {"strategy": "hybrid_shard", "shard_size": 2},
    "offload": {"strategy": "full_shard", "cpu_offload": True},
    "offload-fp16": {"strategy": "full_shard", "cpu_offload": True, "precision": "fp16"},
    "zero2_offload": {"strategy": "zero2_offload"},
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
    train_each(WIDE, whole, again)
    train_each(NARROW, plain, narrow)
    found = losses(result_of(whole.out))
    is_whole = "precision" not in case
    assert found == pytest.approx(losses(result_of(plain.out)), rel=1e-5 if is_whole else 0.01)
    assert losses(result_of(again.out)) == found[-1:]
    assert ckpt_tools.diff(result_of(again.out).checkpoint, result_of(whole.out).checkpoint).equal
    assert losses(result_of(narrow.out)) == pytest.approx(found[2:], rel=1e-5 if is_whole else 1e-3)


@pytest.mark.soak
def test_options_change_how_experts_are_computed_and_not_what_they_learn(tmp_path):
    """Gradients are clipped by their norm over all experts of all workers."""
    same = {**MODEL, "gradient_accumulation": 2, "clip_grad_norm": 0.5, "activation_checkpointing": True}
    whole = tiny_config(tmp_path / "whole", strategy="full_shard", **same)
    dealt = tiny_config(tmp_path / "ep", strategy="full_shard", ep=2, **same)
    half = tiny_config(tmp_path / "half", strategy="full_shard", ep=2, precision="bf16", **same)
    train_each(NARROW, whole, dealt, half)
    expected = losses(result_of(whole.out))
    assert losses(result_of(dealt.out)) == pytest.approx(expected, rel=1e-5)
    assert losses(result_of(half.out)) == pytest.approx(expected, rel=0.01)
