"""Every strategy trains to the same losses, goes on within an epoch bit for bit, goes on from the checkpoints of every
other at another world size, and starts from weights of any other.

A short sample runs here, the full matrix of strategies, models and who resumes whom with ``--soak``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from inference.models.loading import load_model
from inference.models.predictor import load_predictor
from tests.training.jobs import STILL
from tests.training.predictions import all_logits
from tests.training.strategy_jobs import tiny_config, train_each
from training.checkpoints.weights import export
from training.config.model_names import MODELS
from training.config.strategies import BY_NAME, STRATEGIES
from training.config.train_config import TrainConfig
from training.data.datasets import load_dataset
from training.loop import evaluation
from training.loop.result import RunResult

WIDE, NARROW = 4, 2

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

SMALL_LM: dict[str, Any] = {"model": "lm", "model_arg": ("width=64", "hidden=96")}

Each = Callable[[str], dict[str, RunResult]]


def losses(result: RunResult) -> list[float]:
    return [loss for epoch in result.history for loss in epoch.losses]


def result_of(out: Path) -> RunResult:
    return RunResult.read(out / "result.json")


def resuming(out: Path, of: Path, name: str = "epoch_0001", **values: Any) -> TrainConfig:
    return tiny_config(out, resume=str(of / "checkpoints" / name), **values)


WITHIN = "epoch_0001_step_000003"
"""The checkpoint between the two steps of the second epoch."""


def saving(strategy: str) -> dict[str, Any]:
    """A checkpoint after each step; while the next one changes the weights, if the framework can."""
    return {"save_every_steps": 1, "async_save": BY_NAME[strategy].framework == "fsdp2"}


def starting(out: Path, of: Path, **values: Any) -> TrainConfig:
    """A run that starts with the weights of another one's last checkpoint, and changes none."""
    still = {"learning_rate": STILL, "weight_decay": 0.0, "until": 1}
    return tiny_config(out, init_from=str(of / "checkpoints/epoch_0002"), **still, **values)


@pytest.fixture(scope="module")
def pairs(request):
    """The cases of this run of the tests, each with the one that resumes it."""
    if not request.config.getoption("--soak"):
        return SAMPLE
    names = list(CASES)
    return {name: names[(at + 5) % len(names)] for at, name in enumerate(names)}


@pytest.fixture(scope="module")
def runs(pairs, tmp_path_factory):
    """Of each case ``NAME`` a whole run of four ranks, ``NAME-again`` its last step alone, ``NAME-other`` its second
    epoch by another strategy on two ranks, and ``NAME-started`` from the weights of the first case."""
    out = tmp_path_factory.mktemp("strategies")
    wide, narrow = ({**SMALL_LM, "num_workers": workers} for workers in (WIDE, NARROW))
    cases = {name: CASES[name] for name in pairs}
    first = out / next(iter(pairs))
    whole = [tiny_config(out / name, **wide, **case, **saving(case["strategy"])) for name, case in cases.items()]
    again = [resuming(out / f"{name}-again", out / name, WITHIN, **wide, **case) for name, case in cases.items()]
    other = [resuming(out / f"{name}-other", out / name, **narrow, **CASES[by]) for name, by in pairs.items()]
    started = [starting(out / f"{name}-started", first, **narrow, **case) for name, case in cases.items()]
    train_each(WIDE, *whole, *again)
    train_each(NARROW, *other, *started)
    return out


@pytest.fixture(scope="module")
def each(pairs, runs):
    """The results of all cases, of those runs whose names end so."""
    return lambda ending: {name: result_of(runs / f"{name}{ending}") for name in pairs}


@pytest.mark.extended
def test_all_strategies_train_to_the_same_losses(each):
    found = {name: losses(result) for name, result in each("").items()}
    first = next(iter(found.values()))
    assert first[-1] < first[0] - 1
    assert found == {name: pytest.approx(first, rel=1e-5) for name in found}


@pytest.mark.extended
def test_a_run_that_stopped_within_an_epoch_goes_on_bit_for_bit_at_the_same_layout(each):
    """From a checkpoint that was written while the next step changed the weights, if the framework can."""
    whole = each("")
    for name, again in each("-again").items():
        [ours], theirs = again.history, whole[name].history[1]
        assert (ours.earlier_steps, ours.losses, ours.mean_loss) == (1, theirs.losses[1:], theirs.mean_loss), name
        assert again.predicted == whole[name].predicted, name
        assert ckpt_tools.diff(again.checkpoint, whole[name].checkpoint).equal, name


@pytest.mark.extended
def test_a_run_starts_from_the_weights_of_another_strategy(each):
    source = next(iter(each("").values())).checkpoint
    for name, started in each("-started").items():
        assert ckpt_tools.diff(source, started.checkpoint, state="model").equal, name


@pytest.mark.extended
def test_another_strategy_goes_on_at_another_world_size(each):
    whole = each("")
    for name, other in each("-other").items():
        assert other.num_workers == NARROW
        assert other.history[0].losses == pytest.approx(whole[name].history[1].losses, rel=1e-5), name


@pytest.mark.extended
def test_the_checkpoints_of_all_strategies_hold_the_same_weights(each):
    """DCP has the tied embedding by both of its names, DeepSpeed once and the other name beside it."""
    first = ckpt_tools.open(next(iter(each("").values())).checkpoint)
    for name, result in each("").items():
        other = ckpt_tools.open(result.checkpoint)
        names, others = ({*one, *one.manifest.aliases} for one in (first, other))
        assert names == others, name
        for weight in ("embed.weight", "layers.3.feed_forward.down.weight"):
            assert abs(other[weight][...] - first[weight][...]).max() < 2e-4, (name, weight)


@pytest.mark.extended
def test_options_change_how_a_step_is_computed_and_not_what_it_learns(tmp_path):
    """Micro-batches, clipping and recomputed activations: in both frameworks, in fp32 the same losses."""
    same = {"model": "lm", "gradient_accumulation": 2, "clip_grad_norm": 0.5, "activation_checkpointing": True}
    plain = tiny_config(tmp_path / "unclipped", model="lm", strategy="full_shard")
    pair = [tiny_config(tmp_path / name, strategy=name, **same) for name in ("full_shard", "zero3")]
    halves = [
        tiny_config(tmp_path / f"{name}-{precision}", strategy=name, precision=precision, **same)
        for name, precision in (("full_shard", "fp16"), ("ddp", "bf16"), ("zero3", "bf16"))
    ]
    train_each(NARROW, plain, *pair, *halves)
    ours, theirs = (losses(result_of(one.out)) for one in pair)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert abs(ours[-1] - losses(result_of(plain.out))[-1]) > 1e-2
    for one in pair:
        check_continues_as_evaluated(result_of(one.out))
    for half in halves:
        found = losses(result_of(half.out))
        assert found != ours
        assert found == pytest.approx(ours, rel=0.01), half.out.name


@pytest.mark.extended
def test_fp16_goes_on_with_its_scale(tmp_path):
    half = {**SMALL_LM, "strategy": "full_shard", "precision": "fp16"}
    whole = tiny_config(tmp_path / "whole", **half, **saving("full_shard"))
    again = resuming(tmp_path / "again", whole.out, WITHIN, **half)
    train_each(NARROW, whole, again)
    for name, good_steps in ((WITHIN, 3), ("epoch_0002", 4)):
        saved = ckpt_tools.open(whole.out / "checkpoints" / name).manifest.extra
        assert saved["loss_scaler"]["good_steps"] == good_steps
    assert result_of(again.out).history[0].losses == result_of(whole.out).history[1].losses[1:]
    assert ckpt_tools.diff(result_of(again.out).checkpoint, result_of(whole.out).checkpoint).equal


NORMED = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 26 * 26, 10))
"""


@pytest.mark.extended
@pytest.mark.parametrize(("name", "count"), [("own", 1), pytest.param("resnet18", 20, marks=pytest.mark.soak)])
def test_a_batch_norm_goes_on_in_the_other_framework(name, count, tmp_path):
    """Its running averages are the same on every rank, and only predictions use them."""
    (tmp_path / "own.py").write_text(NORMED)
    model = {"model": f"{tmp_path}/own.py:net" if name == "own" else name}
    whole = tiny_config(tmp_path / "whole", strategy="full_shard", **model)
    again = resuming(tmp_path / "again", whole.out, strategy="full_shard", **model)
    other = resuming(tmp_path / "other", whole.out, strategy="zero3", **model)
    train_each(NARROW, whole, again, other)
    expected, same, resumed = (result_of(one.out) for one in (whole, again, other))
    assert same.history[0].losses == expected.history[1].losses
    assert same.predicted == resumed.predicted == expected.predicted
    assert resumed.history[0].losses == pytest.approx(expected.history[1].losses, rel=1e-5)
    assert len([name for name in ckpt_tools.open(expected.checkpoint) if name.endswith("running_mean")]) == count


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder with the configuration of a small GPT-2, as ``save_pretrained`` writes it."""
    from transformers import GPT2Config

    folder = tmp_path_factory.mktemp("gpt2")
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2Config(**sizes, **dropout).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"
    return f"hf:{folder}"


@pytest.mark.extended
def test_a_configuration_of_transformers_trains(gpt2, tmp_path):
    whole = tiny_config(tmp_path / "fsdp2", model=gpt2, strategy="full_shard")
    other = resuming(tmp_path / "zero3", whole.out, model=gpt2, strategy="zero3")
    started = starting(tmp_path / "started", whole.out, model=gpt2, strategy="zero3")
    train_each(NARROW, whole, other, started)
    expected = result_of(whole.out)
    assert losses(expected)[-1] < losses(expected)[0]
    assert result_of(other.out).history[0].losses == pytest.approx(expected.history[1].losses, rel=1e-5)
    assert ckpt_tools.diff(expected.checkpoint, result_of(started.out).checkpoint, state="model").equal
    for run in (expected, result_of(other.out)):
        check_transformers_loads_the_export(run, tmp_path / f"exported-{run.strategy}")


def check_transformers_loads_the_export(run: RunResult, folder: Path) -> None:
    """With every weight, and its predictions are those of the run."""
    from transformers import AutoModelForCausalLM

    export(tiny_config(folder, strategy="ddp", model="lm", export=str(folder)), run.checkpoint)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    pieces = load_dataset("text", "held-out", None).pixels
    predicted = all_logits(lambda texts: evaluation.plain_logits(model)(texts).logits, pieces).argmax(-1)
    assert tuple(predicted.flatten().tolist()) == run.predicted


@pytest.fixture(scope="module")
def models(request):
    """Models with the strategies that train them here: each, or the quickest, with each."""
    names = list(MODELS) if request.config.getoption("--soak") else ["cnn"]
    return {model: list(STRATEGIES) for model in names}


def test_models_train_with_strategies(models, tmp_path):
    configs = {
        (model, name): tiny_config(tmp_path / f"{model}-{name}", model=model, until=1, **CASES[name])
        for model, names in models.items()
        for name in names
    }
    train_each(NARROW, *configs.values())
    for model, names in models.items():
        found = {name: losses(result_of(configs[model, name].out)) for name in names}
        assert found == {name: pytest.approx(found[names[0]], rel=1e-5) for name in names}, model
        assert all(one[-1] < one[0] for one in found.values()), model
        for name in names if MODELS[model].task == "images" else ():
            check_predicts_without_an_option(result_of(configs[model, name].out))


def check_continues_as_evaluated(run: RunResult) -> None:
    """After each of the first held-out texts, the byte that the run itself predicted there."""
    texts = load_dataset("text", "held-out", None).pixels[:10]
    ours = load_predictor(run.checkpoint, max_new_tokens=1)
    found = ours.predict([ours.decode(bytes(text.tolist()), "a text") for text in texts])
    each = texts.shape[1]
    evaluated = [run.predicted[each * (number + 1) - 1] for number in range(len(texts))]
    assert [answer.text for answer in found] == [bytes([byte]).decode(errors="replace") for byte in evaluated]


def check_predicts_without_an_option(run: RunResult) -> None:
    """``config.json`` beside the shards says which model they are of."""
    logits = evaluation.plain_logits(load_model(run.checkpoint))
    found = all_logits(logits, load_dataset("digits", "held-out", None).pixels).argmax(1)
    assert tuple(found.tolist()) == run.predicted
