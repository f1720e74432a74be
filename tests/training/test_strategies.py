"""Every strategy trains to the same losses, and goes on from the checkpoints of every other, at another world size.

A short sample runs here, the full matrix of strategies, models and who resumes whom with ``--soak``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from fixtures.launch import pool
from tests.training.strategy_jobs import tiny_config, train_each
from training.config import TrainConfig
from training.model_names import MODELS
from training.result import RunResult
from training.strategies import STRATEGIES

WIDE, NARROW = 4, 2
SECONDS = 1200
"""For a whole list of runs, on a machine that others use too."""

CASES: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in STRATEGIES},
    "hybrid_shard": {"strategy": "hybrid_shard", "shard_size": 2},
    "zero3_hpz": {"strategy": "zero3_hpz", "shard_size": 2},
    "reshard": {"strategy": "full_shard", "reshard_after_forward": 2},
    "offload": {"strategy": "full_shard", "cpu_offload": True, "forward_prefetch": 1, "backward_prefetch": 1},
    "tp": {"strategy": "full_shard", "tp": 2},
    "no_shard-tp": {"strategy": "no_shard", "tp": 2},
}
"""Every strategy, and FSDP2's with what its options change."""

SAMPLE = {"ddp": "zero2_offload", "hybrid_shard": "zero3", "zero3_hpz": "tp", "tp": "zero0"}
"""Who is resumed by whom in a short run: each from a wide run into a narrow one."""

Each = Callable[[str], dict[str, RunResult]]


def losses(result: RunResult) -> list[float]:
    return [loss for epoch in result.history for loss in epoch.losses]


def result_of(out: Path) -> RunResult:
    return RunResult.read(out / "result.json")


def resuming(out: Path, of: Path, **values: Any) -> TrainConfig:
    return tiny_config(out, resume=str(of / "checkpoints/epoch_0001"), **values)


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest) -> dict[str, str]:
    """The cases of this run of the tests, each with the one that resumes it."""
    if not request.config.getoption("--soak"):
        return SAMPLE
    names = list(CASES)
    return {name: names[(at + 5) % len(names)] for at, name in enumerate(names)}


@pytest.fixture(scope="module")
def runs(pairs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each case ``NAME`` a whole run of four ranks, ``NAME-again`` its second epoch alone, and ``NAME-other`` that
    epoch by another strategy on two ranks."""
    out = tmp_path_factory.mktemp("strategies")
    wide = {"model": "lm", "num_workers": WIDE}
    whole = [tiny_config(out / name, **wide, **CASES[name]) for name in pairs]
    again = [resuming(out / f"{name}-again", out / name, **wide, **CASES[name]) for name in pairs]
    other = [
        resuming(out / f"{name}-other", out / name, model="lm", num_workers=NARROW, **CASES[by])
        for name, by in pairs.items()
    ]
    pool(WIDE).run(train_each, *whole, *again, seconds=SECONDS)
    pool(NARROW).run(train_each, *other, seconds=SECONDS)
    return out


@pytest.fixture(scope="module")
def each(pairs: dict[str, str], runs: Path) -> Each:
    """The results of all cases, of those runs whose names end so."""
    return lambda ending: {name: result_of(runs / f"{name}{ending}") for name in pairs}


def test_all_strategies_train_to_the_same_losses(each: Each) -> None:
    found = {name: losses(result) for name, result in each("").items()}
    first = next(iter(found.values()))
    assert first[-1] < first[0] - 1
    assert found == {name: pytest.approx(first, rel=1e-5) for name in found}


def test_a_resumed_run_goes_on_bit_for_bit_at_the_same_layout(each: Each) -> None:
    whole = each("")
    for name, again in each("-again").items():
        assert again.history[0].losses == whole[name].history[1].losses, name
        assert again.predicted == whole[name].predicted, name


def test_another_strategy_goes_on_at_another_world_size(each: Each) -> None:
    whole = each("")
    for name, other in each("-other").items():
        assert other.num_workers == NARROW
        assert other.history[0].losses == pytest.approx(whole[name].history[1].losses, rel=1e-5), name


def test_the_checkpoints_of_all_strategies_hold_the_same_weights(each: Each) -> None:
    """DCP has the tied embedding by both of its names, DeepSpeed once and the other name beside it."""
    first = ckpt_tools.open(next(iter(each("").values())).checkpoint)
    for name, result in each("").items():
        other = ckpt_tools.open(result.checkpoint)
        names, others = ({*one, *one.manifest.aliases} for one in (first, other))
        assert names == others, name
        for weight in ("embed.weight", "layers.3.feed_forward.down.weight"):
            assert abs(other[weight][...] - first[weight][...]).max() < 2e-4, (name, weight)


def test_options_change_how_a_step_is_computed_and_not_what_it_learns(tmp_path: Path) -> None:
    """Micro-batches, clipping and recomputed activations: in both frameworks, in fp32 the same losses."""
    same = {"model": "lm", "gradient_accumulation": 2, "clip_grad_norm": 0.5, "activation_checkpointing": True}
    plain = tiny_config(tmp_path / "unclipped", model="lm", strategy="full_shard")
    pair = [tiny_config(tmp_path / name, strategy=name, **same) for name in ("full_shard", "zero3")]
    halves = [
        tiny_config(tmp_path / f"{name}-{precision}", strategy=name, precision=precision, **same)
        for name, precision in (("full_shard", "fp16"), ("ddp", "bf16"), ("zero3", "bf16"))
    ]
    pool(NARROW).run(train_each, plain, *pair, *halves, seconds=SECONDS)
    ours, theirs = (losses(result_of(one.out)) for one in pair)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert abs(ours[-1] - losses(result_of(plain.out))[-1]) > 1e-2
    for half in halves:
        found = losses(result_of(half.out))
        assert found != ours
        assert found == pytest.approx(ours, rel=0.01), half.out.name


def test_fp16_goes_on_with_its_scale(tmp_path: Path) -> None:
    whole = tiny_config(tmp_path / "whole", model="lm", strategy="full_shard", precision="fp16")
    again = resuming(tmp_path / "again", whole.out, model="lm", strategy="full_shard", precision="fp16")
    pool(NARROW).run(train_each, whole, again, seconds=SECONDS)
    assert ckpt_tools.open(result_of(whole.out).checkpoint).manifest.extra["loss_scaler"]["good_steps"] == 4
    assert result_of(again.out).history[0].losses == result_of(whole.out).history[1].losses


def test_a_batch_norm_goes_on_in_the_other_framework(tmp_path: Path) -> None:
    """Its running averages are the same on every rank, and only predictions use them."""
    model = {"model": "mobilenet_v3"}
    whole = tiny_config(tmp_path / "whole", strategy="full_shard", **model)
    again = resuming(tmp_path / "again", whole.out, strategy="full_shard", **model)
    other = resuming(tmp_path / "other", whole.out, strategy="zero3", **model)
    pool(NARROW).run(train_each, whole, again, other, seconds=SECONDS)
    expected, same, resumed = (result_of(one.out) for one in (whole, again, other))
    assert same.history[0].losses == expected.history[1].losses
    assert same.predicted == resumed.predicted == expected.predicted
    assert resumed.history[0].losses == pytest.approx(expected.history[1].losses, rel=1e-5)
    assert len([name for name in ckpt_tools.open(expected.checkpoint) if name.endswith("running_mean")]) == 34


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of a small GPT-2, as ``save_pretrained`` writes it."""
    from transformers import GPT2Config

    folder = tmp_path_factory.mktemp("gpt2")
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2Config(**sizes, **dropout).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"
    return f"hf:{folder}"


def test_a_configuration_of_transformers_trains(gpt2: str, tmp_path: Path) -> None:
    whole = tiny_config(tmp_path / "fsdp2", model=gpt2, strategy="full_shard")
    other = resuming(tmp_path / "zero3", whole.out, model=gpt2, strategy="zero3")
    pool(NARROW).run(train_each, whole, other, seconds=SECONDS)
    expected = result_of(whole.out)
    assert losses(expected)[-1] < losses(expected)[0]
    assert result_of(other.out).history[0].losses == pytest.approx(expected.history[1].losses, rel=1e-5)


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Models with the strategies that train them here: each with each, or two quick ones."""
    if request.config.getoption("--soak"):
        return {model: list(STRATEGIES) for model in MODELS}
    return {"cnn": ["shard_grad_op", "zero1"], "cnn-lstm": ["full_shard", "zero3"], "ensemble": ["no_shard", "zero2"]}


def test_models_train_with_strategies(models: dict[str, list[str]], tmp_path: Path) -> None:
    configs = {
        (model, name): tiny_config(tmp_path / f"{model}-{name}", model=model, until=1, **CASES[name])
        for model, names in models.items()
        for name in names
    }
    pool(NARROW).run(train_each, *configs.values(), seconds=SECONDS * 3)
    for model, names in models.items():
        found = {name: losses(result_of(configs[model, name].out)) for name in names}
        assert found == {name: pytest.approx(found[names[0]], rel=1e-5) for name in names}, model
        assert all(one[-1] < one[0] for one in found.values()), model
