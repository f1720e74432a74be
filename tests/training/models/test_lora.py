"""LoRA on a folder of transformers: every strategy trains the same adapter and resumes the others' checkpoints, the
base model stays as it is, and PEFT itself loads what comes out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoModelForCausalLM

import ckpt_tools
from ckpt_tools.errors import UsageError
from tests.training.hub import save_llama, save_tokenizer
from tests.training.strategy_jobs import tiny_config, train_each
from training.checkpoints.weights import export
from training.config.strategies import BY_NAME, STRATEGIES
from training.config.train_config import TrainConfig
from training.data.loading import dataset_of
from training.launchers.checks import check_before_start
from training.loop.result import RunResult

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

LORA = ("r=4", "lora_alpha=32", "target_modules=all-linear")
RESUMED_BY = {"full_shard": ["zero2", "zero3"], "zero3": ["full_shard", "ddp"]}
"""Who is resumed by whom in a short run."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder as of the hub, with tied embeddings."""
    return save_tokenizer(save_llama(tmp_path_factory.mktemp("hub")))


def lora_config(out: Path, hub: Path, **values: Any) -> TrainConfig:
    given = {"init_from": None if "resume" in values else str(hub), "lora": LORA, "learning_rate": 0.02, **values}
    return tiny_config(out, model=f"hf:{hub}", dataset_arg=("context=16",), **given)


def result_of(config: TrainConfig) -> RunResult:
    return RunResult.read(config.out / "result.json")


def losses(config: TrainConfig) -> list[float]:
    return [loss for epoch in result_of(config).history for loss in epoch.losses]


def slots_of(checkpoint: str | Path) -> dict[str, set[str]]:
    """What a checkpoint holds of each tensor."""
    found: dict[str, set[str]] = {}
    for each in ckpt_tools.inspect(checkpoint).tensors:
        found.setdefault(each.name, set()).add(each.slot)
    return found


Pairs = dict[str, list[str]]


@pytest.fixture(scope="module")
def pairs(request):
    if not request.config.getoption("--soak"):
        return RESUMED_BY
    each = [*STRATEGIES]
    return {name: [each[at - 1], each[at - 4]] for at, name in enumerate(each)}


@pytest.fixture(scope="module")
def trained(pairs, hub, tmp_path_factory):
    """A run by each strategy on two ranks."""
    out = tmp_path_factory.mktemp("runs")
    found = {name: by_strategy(out / name, hub, name) for name in pairs}
    train_each(2, *found.values())
    return found


@pytest.fixture(scope="module")
def resumed(pairs, trained, hub):
    """Runs ``NAME-BY`` that go on from the middle of those; some alone."""
    found: dict[str, TrainConfig] = {}
    for number, workers in enumerate((1, 2)):
        again = {}
        for name, by in pairs.items():
            whole, values = trained[name].out, {"num_workers": workers}
            out, resume = whole.with_name(f"{name}-{by[number]}"), str(whole / "checkpoints/epoch_0001")
            again[out.name] = by_strategy(out, hub, by[number], resume=resume, **values)
        train_each(workers, *again.values())
        found |= again
    return found


def by_strategy(out: Path, hub: Path, strategy: str, **values: Any) -> TrainConfig:
    groups = {"shard_size": 1} if BY_NAME[strategy].in_groups else {}  # type: ignore[index]
    return lora_config(out, hub, strategy=strategy, **groups, **values)


@pytest.mark.extended
def test_strategies_resume_each_others_adapters(trained, resumed, hub):
    expected = losses(trained["full_shard"])[2:]
    for name, config in resumed.items():
        assert losses(config) == pytest.approx(expected, rel=1e-5), name
    check_base_and_adapters(resumed, hub)


def test_strategies_train_the_same_adapter(trained):
    expected = losses(trained["full_shard"])
    assert expected[3] < expected[0]
    for name, config in trained.items():
        assert losses(config) == pytest.approx(expected, rel=1e-5), name


def test_a_checkpoint_has_the_base_model_as_it_was_and_the_state_of_the_adapter_alone(trained, hub):
    check_base_and_adapters(trained, hub)


def check_base_and_adapters(runs: dict[str, TrainConfig], hub: Path) -> None:
    base = {key: value.numpy() for key, value in AutoModelForCausalLM.from_pretrained(hub).state_dict().items()}
    for name, config in runs.items():
        checkpoint = result_of(config).checkpoint
        opened, slots = ckpt_tools.open(checkpoint), slots_of(checkpoint)
        adapters = {each for each in opened if ".lora_" in each}
        assert len(adapters) == 2 * 2 * 7, name
        assert {each for each, found in slots.items() if "exp_avg" in found} == adapters, name
        for each in opened:
            bare = each.removeprefix("base_model.model.").replace(".base_layer.", ".")
            if each not in adapters:
                assert np.asarray(opened[each]).tobytes() == base[bare].tobytes(), (name, each)


@torch.no_grad()
def held_out_of(model: Any, config: TrainConfig) -> tuple[float, tuple[int, ...]]:
    """Loss and predictions of the held-out pieces."""
    samples: Any = dataset_of(config, "held-out")
    inputs, labels = samples.__getitems__(range(len(samples)))
    logits = model(input_ids=inputs).logits
    loss = functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten())
    return float(loss), tuple(logits.argmax(-1).flatten().tolist())


def test_peft_loads_the_export_and_the_merged_model_is_the_same(trained, hub, tmp_path):
    before, _ = held_out_of(AutoModelForCausalLM.from_pretrained(hub), trained["full_shard"])
    for name in ("full_shard", "zero3"):
        config, found = trained[name], result_of(trained[name])
        adapter = tmp_path / f"{name}-adapter"
        export(replace(config, export=str(adapter)), found.checkpoint)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hub), str(adapter))
        loss, predicted = held_out_of(model, config)
        assert predicted == found.predicted
        assert loss == pytest.approx(found.held_out["loss"], rel=1e-6)
        assert loss < before - 0.01
        for number, base in enumerate((hub, Path(found.checkpoint))):
            merged = tmp_path / f"{name}-merged-{number}"
            ckpt_tools.merge_lora(base, adapter, merged, to="safetensors")
            whole, loading = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
            assert not any(loading.values()), loading
            assert held_out_of(whole, config)[0] == pytest.approx(loss, rel=1e-6)
            assert (merged / "tokenizer.json").read_bytes() == (hub / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        (["r=0"], "--lora: `r` should be a positive integer value but the value passed is 0"),
        (["target_modules=heads"], "--lora: Target modules heads not found in the base model"),
        (["use_dora=true"], "--lora use_dora is not taken; it is one of r, lora_alpha"),
        (["init_lora_weights=pissa"], "--lora init_lora_weights is true, false or gaussian, not 'pissa'"),
    ],
)
def test_a_wrong_adapter_is_refused_before_workers_start(lora, sentence, hub, tmp_path):
    with pytest.raises(UsageError) as caught:
        check_before_start(lora_config(tmp_path, hub, strategy="ddp", lora=tuple(lora)))
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model": "lm"}, "--lora is for --model hf:FOLDER, and --model is lm"),
        ({}, "--lora trains beside the weights of a model: give them with --init-from"),
        ({"resume": "auto"}, "--lora trains beside the weights of a model: give them with --init-from"),
        ({"lora": ("r",)}, "--lora is NAME=VALUE, not 'r'"),
        ({"strategy": "full_shard", "tp": 2}, "--tp is for --model lm; the layers of hf:FOLDER cannot be split"),
        (
            {"strategy": "full_shard", "pp": 2},
            "--pp is for --model lm; the layers of hf:FOLDER cannot be cut into stages",
        ),
    ],
)
def test_options_that_do_not_go_with_an_adapter_are_refused(values, sentence, tmp_path):
    given = {"strategy": "ddp", "model": "hf:FOLDER", "lora": LORA, "launcher": "torchrun", "dataset": "text"}
    with pytest.raises(UsageError) as caught:
        TrainConfig(out=tmp_path, **(given | values))
    assert str(caught.value) == sentence
