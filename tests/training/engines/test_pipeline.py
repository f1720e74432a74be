"""A pipeline learns what the same run learns without one, and leaves the same checkpoint of the whole model.

Two processes for most; four with one strategy, and with ``--soak`` with all that go together with a pipeline.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from tests.training.jobs import STILL
from tests.training.strategy_jobs import tiny_config, train_each
from training.config.model_names import MODELS
from training.config.train_config import TrainConfig
from training.engines.pipeline import layers_of
from training.loop.result import RunResult
from training.models.language_model import Sizes

WIDE, NARROW = 4, 2
WITHIN = "epoch_0001_step_000003"
"""The checkpoint between the two steps of the second epoch."""

IN_THIRD_STEP = 4
"""How often the ranks agree before: at the start, after two steps, and after the first epoch."""

LAYERS = 5
SIZES: dict[str, Any] = {
    "model_arg": (f"layers={LAYERS}", "width=64", "hidden=96"),
    "dataset_arg": ("context=48",),
}
SAME: dict[str, Any] = {
    "model": "lm",
    "strategy": "full_shard",
    "gradient_accumulation": 4,
    "clip_grad_norm": 0.5,
    **SIZES,
}
DEEP: dict[str, Any] = {"strategy": "zero1"}
INTERLEAVED: dict[str, Any] = {"pp_schedule": "interleaved1f1b"}
SAVING: dict[str, Any] = {"save_every_steps": 1, "async_save": True}


def result_of(config: TrainConfig) -> RunResult:
    return RunResult.read(config.out / "result.json")


def losses(config: TrainConfig) -> list[float]:
    return [loss for epoch in result_of(config).history for loss in epoch.losses]


def resuming(out: Path, of: TrainConfig, name: str = "epoch_0001", **values: Any) -> TrainConfig:
    return tiny_config(out, resume=str(of.out / "checkpoints" / name), **(SAME | values))


def starting(of: TrainConfig) -> dict[str, Any]:
    """For a run that starts with the last weights of another, and changes none."""
    first = str(of.out / "checkpoints" / "epoch_0002")
    return {"until": 1, "init_from": first, "learning_rate": STILL, "weight_decay": 0.0}


Runs = dict[str, TrainConfig]
in_soak = partial(pytest.param, marks=pytest.mark.soak)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """Whole runs of both frameworks and with a pipeline, and those that go on from them."""
    out = tmp_path_factory.mktemp("pipeline")
    whole = tiny_config(out / "whole", **SAME)
    piped = tiny_config(out / "piped", pp=2, **SAME, **SAVING)
    zero = resuming(out / "zero-of-piped", piped, strategy="zero3")
    deep = tiny_config(out / "deep", pp=2, **(SAME | DEEP))
    interleaved = tiny_config(out / "interleaved", pp=2, **INTERLEAVED, **SAME, **SAVING)
    found = [
        *(whole, piped, zero, deep, interleaved),
        tiny_config(out / "gpipe", pp=2, until=1, pp_schedule="gpipe", **(SAME | {"gradient_accumulation": 1})),
        resuming(out / "piped-of-whole", whole, pp=2),
        resuming(out / "whole-of-piped", piped),
        tiny_config(out / "started", pp=2, **SAME, **starting(zero)),
        resuming(out / "zero1-of-deep", deep, **DEEP),
        resuming(out / "interleaved-of-deep", deep, pp=2, **INTERLEAVED),
    ]
    if request.config.getoption("--soak"):
        found += [
            resuming(out / "deep-of-piped", piped, pp=2, **DEEP),
            resuming(out / "zero0-of-interleaved", interleaved, pp=2, strategy="zero0"),
            resuming(out / "tp-of-interleaved", interleaved, tp=2),
        ]
    kinds = {"piped": {}, "deep": DEEP, "interleaved": INTERLEAVED}
    stopped = [tiny_config(out / f"{name}-stopped", pp=2, **(SAME | more)) for name, more in kinds.items()]
    train_each(NARROW, *stopped, questions=IN_THIRD_STEP)
    found += [replace(config, resume="auto") for config in stopped]
    train_each(NARROW, *found)
    return {config.out.name: config for config in found}


@pytest.mark.extended
@pytest.mark.parametrize("name", ["piped", "gpipe", "interleaved", "deep"])
def test_a_pipeline_trains_to_the_same_losses(name, runs):
    """Clipped by the norm of all stages; the matrix of embedding and head counts once in it."""
    expected = losses(runs["whole"])
    assert expected[-1] < expected[0] - 1
    assert losses(runs[name]) == pytest.approx(expected[: len(losses(runs[name]))], rel=1e-5)
    for ours, theirs in zip(result_of(runs[name]).history, result_of(runs["whole"]).history, strict=False):
        assert ours.held_out == pytest.approx(theirs.held_out, rel=0.01)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["piped", "interleaved", "deep"])
def test_it_leaves_one_checkpoint_of_the_whole_model(name, runs):
    whole, piped = (ckpt_tools.open(result_of(runs[each]).checkpoint) for each in ("whole", name))
    assert {*piped} == {*whole}
    assert [group.params for group in piped.manifest.groups] == [group.params for group in whole.manifest.groups]
    for name in whole:
        assert abs(piped[name][...] - whole[name][...]).max() < 2e-4, name


@pytest.mark.extended
@pytest.mark.parametrize("name", ["piped", "interleaved"])
def test_all_stages_of_fsdp2_save_what_a_run_without_a_pipeline_does(name, runs):
    whole, piped = (ckpt_tools.open(result_of(runs[each]).checkpoint).manifest for each in ("whole", name))
    assert piped.tensors.keys() == whole.tensors.keys()
    assert piped.groups == whole.groups


@pytest.mark.extended
def test_a_checkpoint_of_deepspeed_s_pipeline_says_the_names_of_the_whole_model(runs):
    """Its files are DeepSpeed's own, and nothing in it says that layers without a file could be missing."""
    [tag] = Path(result_of(runs["deep"]).checkpoint).glob("global_step*")
    assert len([*tag.glob("layer_*-model_states.pt")]) == 1 + LAYERS + 1
    found = ckpt_tools.inspect(result_of(runs["deep"]).checkpoint)
    assert (found.format, found.world_size) == ("zero1", 2)
    assert not [note for note in found.notes if "layers" in note.what]
    assert found.aliases == {"head.weight": "embed.weight"}
    assert "pipeline_names" not in found.extras


@pytest.mark.extended
@pytest.mark.parametrize("name", ["piped", "interleaved", "deep"])
def test_a_pipeline_that_stopped_within_an_epoch_goes_on_bit_for_bit(name, runs):
    """So the two copies of the tied matrix, of which one is saved, had the same bits."""
    again, piped = result_of(runs[f"{name}-stopped"]), result_of(runs[name])
    assert (runs[f"{name}-stopped"].out / "checkpoints" / WITHIN).is_dir()
    assert again.history[0].losses == piped.history[1].losses[1:]
    assert again.predicted == piped.predicted
    assert ckpt_tools.diff(again.checkpoint, piped.checkpoint).equal


GOING_ON = [
    *("piped-of-whole", "whole-of-piped", "zero-of-piped", "zero1-of-deep", "interleaved-of-deep"),
    *map(in_soak, ("deep-of-piped", "zero0-of-interleaved", "tp-of-interleaved")),
]


@pytest.mark.extended
@pytest.mark.parametrize("name", GOING_ON)
def test_a_run_goes_on_with_a_pipeline_or_without(name, runs):
    assert losses(runs[name]) == pytest.approx(losses(runs["whole"])[2:], rel=1e-5)


@pytest.mark.extended
def test_a_pipeline_starts_from_weights(runs):
    theirs, ours = (result_of(runs[name]).checkpoint for name in ("zero-of-piped", "started"))
    assert ckpt_tools.diff(theirs, ours, state="model").equal


@pytest.mark.extended
def test_a_pipeline_computes_in_fp16(runs, tmp_path):
    """With one scale for all stages."""
    half = tiny_config(tmp_path / "fp16", pp=2, precision="fp16", until=1, **SAME)
    train_each(NARROW, half)
    assert losses(half) != losses(runs["whole"])[:2]
    assert losses(half) == pytest.approx(losses(runs["whole"])[:2], rel=0.01)
    assert ckpt_tools.open(result_of(half).checkpoint).manifest.extra["loss_scaler"]["good_steps"] == 2


def test_stages_have_all_layers_in_order_and_as_many():
    for stages in range(1, LAYERS + 1):
        dealt = [layers_of(number, stages, LAYERS) for number in range(stages)]
        assert [layer for each in dealt for layer in each] == list(range(LAYERS))
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_what_is_known_of_a_model_before_torch_is_imported_holds():
    facts, sizes = MODELS["lm"], Sizes()
    assert (facts.heads, facts.hidden, facts.layers) == (sizes.heads, sizes.hidden, sizes.layers)


WIDEST: dict[str, Any] = {"num_workers": WIDE}
WIDE_CASES: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2, "until": 1},
    "pp4": {"pp": 4},
    "no_shard": {"pp": 2, "strategy": "no_shard"},
    "bf16": {"pp": 2, "precision": "bf16"},
    "interleaved": {"pp": 2, **INTERLEAVED},
    "interleaved-bf16": {"pp": 2, "precision": "bf16", **INTERLEAVED},
    "interleaved-hybrid": {"pp": 2, "strategy": "hybrid_shard", "shard_size": 1, **INTERLEAVED},
    "interleaved-options": {
        "pp": 2,
        "cpu_offload": True,
        "forward_prefetch": 1,
        "backward_prefetch": 1,
        "activation_checkpointing": True,
        **INTERLEAVED,
    },
    "hybrid_shard": {"pp": 2, "strategy": "hybrid_shard", "shard_size": 1},
    "shard_grad_op": {"pp": 2, "strategy": "shard_grad_op", "activation_checkpointing": True},
    "options": {"pp": 2, "cpu_offload": True, "forward_prefetch": 1, "backward_prefetch": 1},
    "deep2": {"pp": 2, "until": 1, **DEEP},
    "deep3": {"pp": 3, "num_workers": 3, **DEEP},
    "deep4": {"pp": 4, **DEEP},
    "bare4": {"pp": 4, "strategy": "zero0"},
    "deep-bf16": {"pp": 2, "precision": "bf16", **DEEP},
    "deep-checkpointing": {"pp": 2, "activation_checkpointing": True, **DEEP},
}
"""Pipelines over four workers, which share each stage, or have one each."""


@pytest.fixture(scope="module")
def wide_cases(request):
    return list(WIDE_CASES) if request.config.getoption("--soak") else ["pp2", "deep2"]


@pytest.mark.soak
def test_a_pipeline_goes_together_with_sharding(runs, wide_cases, tmp_path):
    """On a mesh of stages x replicas x shards. Another number of stages goes on from its checkpoint."""
    wide = {name: tiny_config(tmp_path / name, **(SAME | WIDEST | WIDE_CASES[name])) for name in wide_cases}
    further = [
        resuming(tmp_path / "further", wide["pp2"], **WIDEST, pp=4),
        resuming(tmp_path / "deep-further", wide["deep2"], **WIDEST, pp=4, **DEEP),
        resuming(tmp_path / "deep-same", wide["deep2"], **WIDEST, pp=2, **DEEP),
        resuming(tmp_path / "deep-as-zero3", wide["deep2"], **WIDEST, strategy="zero3"),
    ]
    of_three = [config for config in wide.values() if config.num_workers == 3]
    of_four = [config for config in wide.values() if config.num_workers == WIDE]
    train_each(WIDE, *of_four, *further)
    train_each(3, *of_three)
    expected = losses(runs["whole"])
    for name, config in wide.items():
        within = 1e-5 if config.precision == "fp32" else 0.01
        assert losses(config) == pytest.approx(expected[: len(losses(config))], rel=within), name
    for config in further:
        assert losses(config) == pytest.approx(expected[2:], rel=1e-5), config.out.name


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["zero0", "zero1"])
def test_pipelines_over_deepspeed_go_on_from_every_other_run(strategy, runs, tmp_path):
    """And every other run from them; with more workers too, bit for bit with the same stages."""
    ours: dict[str, Any] = {"pp": 2, "strategy": strategy}
    other: dict[str, Any] = {"pp": 2, "strategy": "zero1" if strategy == "zero0" else "zero0"}
    whole = tiny_config(tmp_path / "whole", save_every_steps=1, **(SAME | ours))
    plain = resuming(tmp_path / "zero2", whole, strategy="zero2", save_every_steps=1)
    again = resuming(tmp_path / "again", whole, WITHIN, **ours)
    later = [again, resuming(tmp_path / "of-zero2", plain, WITHIN, **ours)]
    found = [
        *(whole, plain),
        resuming(tmp_path / "of-whole", runs["whole"], **ours),
        resuming(tmp_path / "whole-of", whole),
        resuming(tmp_path / "piped-of", whole, pp=2),
        resuming(tmp_path / "zero0-of", whole, strategy="zero0"),
        resuming(tmp_path / "other-of", whole, **other),
    ]
    started = tiny_config(tmp_path / "started", **(SAME | ours), **starting(plain))
    wider = resuming(tmp_path / "wider", whole, **WIDEST, **ours)
    train_each(NARROW, *found, *later, started)
    train_each(WIDE, wider)
    for config in (*found, *later, wider):
        mine = losses(config)
        assert mine == pytest.approx(losses(runs["whole"])[-len(mine) :], rel=1e-5), config.out.name
    assert losses(again) == losses(whole)[3:]
    assert ckpt_tools.diff(*(result_of(config).checkpoint for config in (again, whole))).equal
    assert ckpt_tools.diff(*(result_of(config).checkpoint for config in (started, plain)), state="model").equal
