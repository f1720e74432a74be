"""Every strategy trains to the same losses, goes on within an epoch bit for bit, goes on from the checkpoints of every
other at another world size, and starts from weights of any other.

A short sample runs here, the full matrix of strategies, models and who resumes whom with ``--soak``.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_tools
from inference.models.loading import load_model
from inference.models.predictor import load_predictor
from tests.training.jobs import (
    EPOCHS,
    STEPS_PER_EPOCH,
    STILL,
    WITHIN,
    check_same_end,
    losses,
    result_of,
    resuming,
    saving,
    small_config,
    starting,
    tiny_config,
    train_each,
)
from tests.training.predictions import all_logits
from training.checkpoints.weights import export_weights
from training.config.model_names import MODELS
from training.config.options import STRATEGIES
from training.data.datasets import load_dataset
from training.loop import evaluation
from training.loop.result import RunResult

WIDE, NARROW = 4, 2
GROUPS = {"hybrid_shard": {"shard_size": 2}, "zero3_hpz": {"shard_size": 2}}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} | GROUPS.get(name, {}) for name in STRATEGIES},
    "reshard": {"strategy": "full_shard", "reshard_after_forward": 2},
    "offload": {"strategy": "full_shard", "cpu_offload": True, "forward_prefetch": 1, "backward_prefetch": 1},
    "tp": {"strategy": "full_shard", "tp": 2},
    "no_shard-tp": {"strategy": "no_shard", "tp": 2},
}
"""Every strategy, and FSDP2's with what its options change."""

SAMPLE = {"hybrid_shard": "zero3", "zero3_hpz": "tp", "tp": "zero0"}
"""Who is resumed by whom in a short run: each from a wide run into a narrow one."""

SMALL_LM: dict[str, Any] = {"model": "lm", "model_arg": ("width=64", "hidden=96")}


@pytest.mark.extended
def test_strategies_learn_the_same_and_go_on_from_one_another(tmp_path, pytestconfig):
    """Of each case a whole run of four ranks; ``NAME-again``, its last step alone, from a checkpoint that was written
    while the next step changed the weights, if the framework can; ``NAME-other``, its second epoch by another strategy
    on two ranks; and ``NAME-started`` from the weights of the first case."""
    names = list(CASES)
    pairs = {name: names[(at + 5) % len(names)] for at, name in enumerate(names)}
    pairs = pairs if pytestconfig.getoption("--soak") else SAMPLE
    wide, narrow = ({**SMALL_LM, "num_workers": workers} for workers in (WIDE, NARROW))
    first = tmp_path / next(iter(pairs))
    cases = {name: (tmp_path / name, CASES[name]) for name in pairs}
    train_each(*(tiny_config(out, **wide, **case, **saving(case["strategy"])) for out, case in cases.values()))
    train_each(*(resuming(tmp_path / f"{n}-again", out, WITHIN, **wide, **case) for n, (out, case) in cases.items()))
    train_each(*(resuming(tmp_path / f"{n}-other", tmp_path / n, **narrow, **CASES[by]) for n, by in pairs.items()))
    train_each(*(starting(tmp_path / f"{n}-started", first, **narrow, **case) for n, (_, case) in cases.items()))
    expected, model = losses(first), ckpt_tools.open(result_of(first).checkpoint)
    assert expected[-1] < expected[0] - 1
    for name in pairs:
        whole, again, other, started = (
            result_of(tmp_path / f"{name}{end}") for end in ("", "-again", "-other", "-started")
        )
        assert losses(whole) == pytest.approx(expected, rel=1e-5), name
        assert again.history[0].earlier_steps == 1
        check_same_end(again, whole)
        assert other.num_workers == NARROW
        assert losses(other) == pytest.approx(whole.history[1].losses, rel=1e-5), name
        assert ckpt_tools.diff(result_of(first).checkpoint, started.checkpoint, state="model").equal, name
        check_same_model(model, ckpt_tools.open(whole.checkpoint), name)


def check_same_model(first: Any, other: Any, name: str) -> None:
    """DCP has the tied embedding by both of its names, DeepSpeed once and the other name beside it."""
    names, others = ({*one, *one.manifest.aliases} for one in (first, other))
    assert names == others, name
    for weight in ("embed.weight", "layers.3.feed_forward.down.weight"):
        assert abs(other[weight][...] - first[weight][...]).max() < 2e-4, (name, weight)


@pytest.mark.extended
def test_options_change_how_a_step_is_computed_and_not_what_it_learns(tmp_path, pytestconfig):
    """Micro-batches, clipping and recomputed activations: in both frameworks, in fp32 the same losses. fp16, which is
    slow on a CPU, is for the soak."""
    same = {"model": "lm", "gradient_accumulation": 2, "clip_grad_norm": 0.5, "activation_checkpointing": True}
    plain = tiny_config(tmp_path / "unclipped", model="lm", strategy="full_shard")
    pair = [tiny_config(tmp_path / name, strategy=name, **same) for name in ("full_shard", "zero3")]
    halves = [
        tiny_config(tmp_path / f"{name}-{precision}", strategy=name, precision=precision, **same)
        for name, precision in (("ddp", "bf16"), ("zero3", "bf16"), ("full_shard", "fp16"))
    ]
    halves = halves if pytestconfig.getoption("--soak") else halves[:2]
    train_each(plain, *pair, *halves)
    ours, theirs = map(losses, pair)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert abs(ours[-1] - losses(plain)[-1]) > 1e-2
    for one in pair:
        check_continues_as_evaluated(result_of(one))
    for half in halves:
        assert losses(half) != ours
        assert losses(half) == pytest.approx(ours, rel=0.01), half.out.name


@pytest.mark.extended
def test_fp16_goes_on_with_its_scale(tmp_path):
    sizes = ("layers=2", "width=32", "hidden=48")
    half = {"model": "lm", "model_arg": sizes, "strategy": "full_shard", "precision": "fp16"}
    whole = tiny_config(tmp_path / "whole", **half, **saving("full_shard"))
    again = resuming(tmp_path / "again", whole.out, WITHIN, **half)
    train_each(whole, again)
    for name, good_steps in ((WITHIN, 3), ("epoch_0002", 4)):
        saved = ckpt_tools.open(whole.out / "checkpoints" / name).manifest.extra
        assert saved["loss_scaler"]["good_steps"] == good_steps
    check_same_end(result_of(again), result_of(whole))


NORMED = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 26 * 26, 10))
"""


@pytest.mark.extended
def test_a_batch_norm_goes_on_in_the_other_framework(tmp_path):
    """Its running averages are the same on every rank, and only predictions use them."""
    (tmp_path / "own.py").write_text(NORMED)
    model = {"model": f"{tmp_path}/own.py:net"}
    whole = tiny_config(tmp_path / "whole", strategy="full_shard", **model)
    again = resuming(tmp_path / "again", whole.out, strategy="full_shard", **model)
    other = resuming(tmp_path / "other", whole.out, strategy="zero3", **model)
    train_each(whole, again, other)
    expected, same, resumed = map(result_of, (whole, again, other))
    assert same.history[0].losses == expected.history[1].losses
    assert same.predicted == resumed.predicted == expected.predicted
    assert resumed.history[0].losses == pytest.approx(expected.history[1].losses, rel=1e-5)
    assert len([name for name in ckpt_tools.open(expected.checkpoint) if name.endswith("running_mean")]) == 1


@pytest.mark.extended
def test_a_configuration_of_transformers_trains(tmp_path):
    """A folder with the configuration of a small GPT-2, as ``save_pretrained`` writes it."""
    from transformers import GPT2Config

    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).save_pretrained(tmp_path / "gpt2")
    assert json.loads((tmp_path / "gpt2/config.json").read_text())["model_type"] == "gpt2"
    gpt2 = f"hf:{tmp_path / 'gpt2'}"
    whole = tiny_config(tmp_path / "fsdp2", model=gpt2, strategy="full_shard")
    other = resuming(tmp_path / "zero3", whole.out, model=gpt2, strategy="zero3")
    started = starting(tmp_path / "started", whole.out, model=gpt2, strategy="zero3")
    train_each(whole, other, started)
    expected = result_of(whole)
    assert losses(expected)[-1] < losses(expected)[0]
    assert losses(other) == pytest.approx(expected.history[1].losses, rel=1e-5)
    assert ckpt_tools.diff(expected.checkpoint, result_of(started).checkpoint, state="model").equal
    for run in (expected, result_of(other)):
        check_transformers_loads_the_export(run, tmp_path / f"exported-{run.strategy}")


def check_transformers_loads_the_export(run: RunResult, folder: Path) -> None:
    """With every weight, and its predictions are those of the run."""
    from transformers import AutoModelForCausalLM

    export_weights(tiny_config(folder, strategy="ddp", model="lm", export=str(folder)), run.checkpoint)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    pieces = load_dataset("text", "held-out", None).pixels
    predicted = all_logits(lambda texts: evaluation.plain_logits(model)(texts).logits, pieces).argmax(-1)
    assert tuple(predicted.flatten().tolist()) == run.predicted


def test_models_train_with_strategies(tmp_path, pytestconfig):
    """Each strategy the quickest model; in the soak every model."""
    models = list(MODELS) if pytestconfig.getoption("--soak") else ["cnn"]
    predicting = None if pytestconfig.getoption("--soak") else ("ddp", "zero3")
    for model in models:
        runs = {
            name: tiny_config(tmp_path / f"{model}-{name}", model=model, until=1, **CASES[name]) for name in STRATEGIES
        }
        train_each(*runs.values())
        expected = losses(runs["ddp"])
        assert expected[-1] < expected[0]
        for name, run in runs.items():
            assert losses(run) == pytest.approx(expected, rel=1e-5), (model, name)
            if MODELS[model].task == "images" and (predicting is None or name in predicting):
                check_predicts_without_an_option(result_of(run))


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


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["fsdp2", "zero2", "zero3"])
def test_the_learning_rate_of_a_resumed_run_holds_from_its_first_step(engine, small_run):
    """Not the one that came with the optimizer's state: with nearly none, the model stays as it was resumed."""
    whole, still = small_run(engine), small_run(f"{engine}-still")
    check_same_weights(Path(whole.checkpoint).with_name("epoch_0001"), still.checkpoint)
    [group] = ckpt_tools.open(still.checkpoint).manifest.groups
    assert (group.options["initial_lr"], group.options["weight_decay"]) == (STILL["learning_rate"], 0.0)
    assert still.accuracy == whole.history[0].held_out["accuracy"]


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


@pytest.mark.parametrize(("engine", "other"), [("fsdp2", "zero2"), further("zero3", "fsdp2")])
def test_an_engine_continues_at_another_world_size(engine, other, small_run, tmp_path):
    expected = small_run(other)
    url = Path(expected.checkpoint).with_name("epoch_0001").as_uri()
    train_each(config := small_config(tmp_path / "run", engine=engine, num_workers=1, resume=url))
    found = RunResult.read(config.out / "result.json").history[0].losses
    assert found == pytest.approx(expected.history[1].losses, rel=1e-5)
