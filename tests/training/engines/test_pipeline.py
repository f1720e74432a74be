"""A pipeline learns what the same run learns without one, and leaves the same checkpoint of the whole model.

Two processes for most; with ``--soak`` four, with all strategies that go together with a pipeline.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckpt_tools
from tests.training import jobs
from tests.training.jobs import WITHIN, check_same_end, losses, result_of, tiny_config, train_each
from training.config.train_config import TrainConfig
from training.engines.stages import layers_of

IN_THIRD_STEP = 4
"""How often the ranks agree before: at the start, after two steps, and after the first epoch."""

LAYERS = 5
SIZES: dict[str, Any] = {"model_arg": (f"layers={LAYERS}", "width=64", "hidden=96"), "dataset_arg": ("context=48",)}
ACCUMULATED: dict[str, Any] = {"strategy": "full_shard", "gradient_accumulation": 4, "clip_grad_norm": 0.5}
SAME: dict[str, Any] = {"model": "lm", **ACCUMULATED, **SIZES}
DEEP: dict[str, Any] = {"strategy": "zero1"}
INTERLEAVED: dict[str, Any] = {"pp_schedule": "interleaved1f1b"}
SAVING: dict[str, Any] = {"save_every_steps": 1, "async_save": True}
KINDS: dict[str, dict[str, Any]] = {"piped": SAVING, "interleaved": INTERLEAVED | SAVING, "deep": DEEP}
STOPPED = ("piped", "deep")
"""Of these, runs that stop within an epoch without ``--soak``."""

SOAKED = ("whole-of-piped", "interleaved-of-deep", "deep-of-piped", "zero0-of-interleaved", "tp-of-interleaved")
GOING_ON = ("piped-of-whole", "zero-of-piped", "zero1-of-deep", *SOAKED)


def tiny(out: Path, **values: Any) -> TrainConfig:
    return tiny_config(out, **(SAME | values))


def resuming(out: Path, of: TrainConfig, name: str = "epoch_0001", **values: Any) -> TrainConfig:
    return jobs.resuming(out, of.out, name, **(SAME | values))


def soaked(names: tuple[str, ...], of: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.soak if name in of else ()) for name in names]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pytestconfig):
    """Whole runs of both frameworks and with a pipeline, and those that go on from them."""
    out = tmp_path_factory.mktemp("pipeline")
    found = {name: tiny(out / name, pp=2, **values) for name, values in KINDS.items()}
    found["whole"] = tiny(out / "whole")
    found["gpipe"] = tiny(out / "gpipe", pp=2, until=1, pp_schedule="gpipe", gradient_accumulation=1)
    values = {"deep": {"pp": 2, **DEEP}, "interleaved": {"pp": 2, **INTERLEAVED}, "piped": {"pp": 2}, "whole": {}}
    values |= {"zero": {"strategy": "zero3"}, "zero1": DEEP, "zero0": {"pp": 2, "strategy": "zero0"}, "tp": {"tp": 2}}
    soak = pytestconfig.getoption("--soak")
    for name in GOING_ON if soak else [each for each in GOING_ON if each not in SOAKED]:
        ours, _, other = name.partition("-of-")
        found[name] = resuming(out / name, found[other], **values[ours])
    found["started"] = jobs.starting(out / "started", found["zero-of-piped"].out, pp=2, **SAME)
    kinds = KINDS if soak else STOPPED
    stopped = {f"{name}-stopped": tiny(out / f"{name}-stopped", **values[name]) for name in kinds}
    train_each(*stopped.values(), questions=IN_THIRD_STEP)
    train_each(*found.values(), *(replace(config, resume="auto") for config in stopped.values()))
    return found | stopped


@pytest.mark.extended
@pytest.mark.parametrize("name", ["gpipe", *KINDS])
def test_a_pipeline_trains_to_the_same_losses(name, runs):
    """Clipped by the norm of all stages; the matrix of embedding and head counts once in it."""
    expected, found = losses(runs["whole"]), losses(runs[name])
    assert expected[-1] < expected[0] - 1
    assert found == pytest.approx(expected[: len(found)], rel=1e-5)
    for ours, theirs in zip(result_of(runs[name]).history, result_of(runs["whole"]).history, strict=False):
        assert ours.held_out == pytest.approx(theirs.held_out, rel=0.01)


@pytest.mark.extended
@pytest.mark.parametrize("name", KINDS)
def test_it_leaves_one_checkpoint_of_the_whole_model(name, runs):
    """All stages of FSDP2 save what a run without a pipeline does."""
    whole, piped = (ckpt_tools.open(result_of(runs[each]).checkpoint) for each in ("whole", name))
    assert {*piped} == {*whole}
    assert [group.params for group in piped.manifest.groups] == [group.params for group in whole.manifest.groups]
    for weight in whole:
        assert abs(piped[weight][...] - whole[weight][...]).max() < 2e-4, weight
    if name != "deep":
        assert piped.manifest.tensors.keys() == whole.manifest.tensors.keys()
        assert piped.manifest.groups == whole.manifest.groups


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
@pytest.mark.parametrize("name", soaked((*KINDS,), ("interleaved",)))
def test_a_pipeline_that_stopped_within_an_epoch_goes_on_bit_for_bit(name, runs):
    """So the two copies of the tied matrix, of which one is saved, had the same bits."""
    assert (runs[f"{name}-stopped"].out / "checkpoints" / WITHIN).is_dir()
    assert result_of(runs[f"{name}-stopped"]).history[0].earlier_steps == 1
    check_same_end(result_of(runs[f"{name}-stopped"]), result_of(runs[name]))


@pytest.mark.extended
@pytest.mark.parametrize("name", soaked(GOING_ON, SOAKED))
def test_a_run_goes_on_with_a_pipeline_or_without(name, runs):
    assert losses(runs[name]) == pytest.approx(losses(runs["whole"])[2:], rel=1e-5)


@pytest.mark.extended
def test_a_pipeline_starts_from_weights(runs):
    theirs, ours = (result_of(runs[name]).checkpoint for name in ("zero-of-piped", "started"))
    assert ckpt_tools.diff(theirs, ours, state="model").equal


@pytest.mark.extended
def test_a_pipeline_computes_in_fp16(runs, tmp_path):
    """With one scale for all stages."""
    train_each(half := tiny(tmp_path / "fp16", pp=2, precision="fp16", until=1))
    assert losses(half) != losses(runs["whole"])[:2]
    assert losses(half) == pytest.approx(losses(runs["whole"])[:2], rel=0.01)
    assert ckpt_tools.open(result_of(half).checkpoint).manifest.extra["loss_scaler"]["good_steps"] == 2


def test_stages_have_all_layers_in_order_and_as_many():
    for stages in range(1, LAYERS + 1):
        dealt = [layers_of(number, stages, LAYERS) for number in range(stages)]
        assert [layer for each in dealt for layer in each] == list(range(LAYERS))
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


WIDEST: dict[str, Any] = {"num_workers": 4}
PREFETCHING: dict[str, Any] = {"cpu_offload": True, "forward_prefetch": 1, "backward_prefetch": 1}
WIDE_CASES: dict[str, dict[str, Any]] = {
    "pp2": {"until": 1},
    "pp4": {"pp": 4},
    "no_shard": {"strategy": "no_shard"},
    "interleaved-bf16": {"precision": "bf16", **INTERLEAVED},
    "interleaved-hybrid": {"strategy": "hybrid_shard", "shard_size": 1, **INTERLEAVED},
    "interleaved-options": {**PREFETCHING, "activation_checkpointing": True, **INTERLEAVED},
    "shard_grad_op": {"strategy": "shard_grad_op", "activation_checkpointing": True},
    "deep2": {"until": 1, **DEEP},
    "deep3": {"pp": 3, "num_workers": 3, **DEEP},
    "bare4": {"pp": 4, "strategy": "zero0"},
    "deep-checkpointing": {"activation_checkpointing": True, **DEEP},
}
"""Pipelines over four workers, which share each of two stages, or have one each."""


@pytest.mark.soak
def test_a_pipeline_goes_together_with_sharding(runs, tmp_path):
    """On a mesh of stages x replicas x shards. Another number of stages goes on from its checkpoint."""
    wide = {name: tiny(tmp_path / name, **({"pp": 2} | WIDEST | values)) for name, values in WIDE_CASES.items()}
    further = [
        resuming(tmp_path / "further", wide["pp2"], **WIDEST, pp=4),
        resuming(tmp_path / "deep-further", wide["deep2"], **WIDEST, pp=4, **DEEP),
        resuming(tmp_path / "deep-same", wide["deep2"], **WIDEST, pp=2, **DEEP),
        resuming(tmp_path / "deep-as-zero3", wide["deep2"], **WIDEST, strategy="zero3"),
    ]
    train_each(*wide.values(), *further)
    expected = losses(runs["whole"])
    for name, config in wide.items():
        within = 1e-5 if config.precision == "fp32" else 0.01
        assert losses(config) == pytest.approx(expected[: len(losses(config))], rel=within), name
    for config in further:
        assert losses(config) == pytest.approx(expected[2:], rel=1e-5), config.out.name
