"""What adapter_config.json names is what must be there: PEFT itself says which modules of a model that is."""

import itertools
import json
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.errors import IncompleteError, MalformedError
from ckpt_tools.lora.config import parse_config
from ckpt_tools.lora.patterns import NameSuffixes, PatternValues
from tests.lora import models

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
TINY = LlamaConfig(vocab_size=20, num_hidden_layers=3, attention_bias=True, **SIZES)

SETTINGS: dict[str, dict[str, Any]] = {
    "ends of names": {"target_modules": ["q_proj", "mlp.up_proj"]},
    "a pattern": {"target_modules": r".*\.(0|2)\..*(q|v)_proj"},
    "all linear": {"target_modules": "all-linear"},
    "layers": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]},
    "one layer": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "but for some": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["0.self_attn.k_proj"]},
    "but for a pattern": {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.1\..*"},
    "saved blocks": {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]},
    "embeddings": {"target_modules": ["embed_tokens", "o_proj"]},
    "all biases": {"target_modules": ["v_proj"], "bias": "all"},
    "biases of modules": {"target_modules": ["v_proj", "up_proj"], "bias": "lora_only"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(TINY).save_pretrained(folder)
    return folder


def saved_by_peft(base: Path, folder: Path, settings: Mapping[str, Any]) -> None:
    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(r=2, **settings))
        model.save_pretrained(str(folder))


def merge(base: Path, folder: Path, **options: Any) -> ckpt_tools.ConvertReport:
    out = folder.parent / f"{folder.name}.safetensors"
    return ckpt_tools.merge_lora(base, folder, out, overwrite=out.exists(), **options)


@pytest.fixture
def adapter(tmp_path):
    return tmp_path / "adapter"


@pytest.mark.parametrize("name", SETTINGS)
def test_every_part_that_peft_saves_is_needed(name, base, adapter):
    """Whole, it is merged; without all parts of any one module it is refused, and that module is named."""
    saved_by_peft(base, adapter, SETTINGS[name])
    file = adapter / "adapter_model.safetensors"
    whole = {key: tensor for key, tensor in load_file(file).items() if ".base_layer." not in key}
    notes = merge(base, adapter).notes
    assert not [note for note in notes if note.outcome is Outcome.MISSING]
    parts = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in whole}
    for part in sorted(parts):
        save_file({key: tensor for key, tensor in whole.items() if part not in key}, file)
        with pytest.raises(IncompleteError, match=f"the adapter lacks .*{part}"):
            merge(base, adapter)
    report = merge(base, adapter, allow_missing=True)
    assert any(part in note.what for note in report.notes if note.outcome is Outcome.MISSING)


def test_layers_beside_an_adapted_one_where_a_pattern_may_not_end(base, adapter):
    """As unsloth writes it."""
    pattern = r"(?:.*?(?:language|layers).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)|(?:x.*y.*z.*)"
    saved_by_peft(base, adapter, {"target_modules": pattern})
    report = merge(base, adapter)
    assert [note.what for note in report.notes if note.outcome is Outcome.KEPT] == ["modules of target_modules"]
    file = adapter / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if "layers.1.self_attn.q" not in key}, file)
    with pytest.raises(IncompleteError, match=r"the adapter lacks model.layers.1.self_attn.q_proj, which"):
        merge(base, adapter)


def test_experts(tmp_path):
    models.made(models.CASES["experts"], tmp_path)
    recipe: dict[str, Any] = {"recipe": "qwen3_moe", "inverse": True}
    merge(tmp_path / "base", tmp_path / "adapter", **recipe)
    with pytest.raises(ckpt_tools.UsageError, match="recipe='qwen3_moe' inverse=True leads to it"):
        merge(tmp_path / "base", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if "1.mlp.experts" not in key}, file)
    with pytest.raises(IncompleteError, match=r"layers\.1\.mlp\.experts\.down_proj.*target_parameters"):
        merge(tmp_path / "base", tmp_path / "adapter", **recipe)


def test_a_head_that_the_base_lacks(base, adapter):
    """PEFT names the heads that some models have for the task."""
    with warnings.catch_warnings(action="ignore"):
        model = LlamaForSequenceClassification.from_pretrained(base)
        config = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
        get_peft_model(model, config).save_pretrained(str(adapter))
    assert {*json.loads((adapter / "adapter_config.json").read_text())["modules_to_save"]} == {"classifier", "score"}
    merge(base, adapter)
    file = adapter / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if "score" not in key}, file)
    with pytest.raises(IncompleteError, match=r"which modules_to_save of adapter_config.json names"):
        merge(base, adapter)


def test_layers_that_predict_further_tokens_have_no_adapter(base, adapter, tmp_path):
    saved_by_peft(base, adapter, {"target_modules": ["q_proj"]})
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_bytes((base / "config.json").read_bytes())
    more = {f"{layer}.self_attn.q_proj.weight": torch.ones(16, 16) for layer in ("model.layers.3", "mtp.layers.0")}
    save_file(load_file(base / "model.safetensors") | more, tmp_path / "base" / "model.safetensors")
    assert merge(tmp_path / "base", adapter).num_tensors == len(load_file(base / "model.safetensors")) + 2


def test_tensors_that_zero3_saved_empty(base, adapter):
    saved_by_peft(base, adapter, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    file = adapter / "adapter_model.safetensors"
    whole = load_file(file)
    for empty in ("lora_B", "lm_head"):
        save_file({key: torch.empty(0) if empty in key else tensor for key, tensor in whole.items()}, file)
        with pytest.raises(IncompleteError, match=r"saved empty by ZeRO-3.*from the checkpoint of the run .*to='peft'"):
            merge(base, adapter)


@pytest.mark.parametrize("found", [{"layers_to_transform": ["a"]}, {"target_modules": "("}, {"exclude_modules": 3}])
def test_malformed(found):
    with pytest.raises(MalformedError):
        parse_config({"peft_type": "LORA", **found}, "adapter_config.json")


PARTS = ("a", "b1", "b2", "layers", "0", "10", "q_proj", "ab", "x-y")
PATTERNS = ("a.b", "b1|a", r"layers\.\d+", ".*", "a", "q.proj", "1.q_proj", "", ".", "..", "^a", "a$", "[ab].0", "a+b1")


def modules(seed: int, many: int) -> list[str]:
    chance = random.Random(seed)
    return [".".join(chance.choices(PARTS, k=chance.randint(1, 5))) for _ in range(many)]


@pytest.mark.parametrize("seed", range(10))
def test_the_first_pattern_counts_as_in_peft(seed):
    chance = random.Random(seed)
    names = [*modules(seed, 12), *chance.sample(PATTERNS, 3)]
    chance.shuffle(names)
    values = {name: number for number, name in enumerate(dict.fromkeys(names))}
    patterns = PatternValues(values)
    for key in [*modules(seed + 1000, 200), *values, "aXb", "a.q_proj", "q1proj", "11xq_proj"]:
        assert patterns.find_value(key, -1) == values.get(get_pattern_key([*values], key), -1), key


@pytest.mark.parametrize("seed", range(10))
def test_ends_are_those_of_texts(seed):
    names = [*modules(seed, 5), "", "proj", "0"][seed % 3 :]
    ends = NameSuffixes.of(names)
    for module in [*modules(seed + 1000, 100), *names]:
        stops = list(itertools.accumulate(module.split("."), lambda before, part: f"{before}.{part}"))
        assert ends.does_match_name(module) == any(module == name or module.endswith(f".{name}") for name in names)
        assert ends.does_match_path(module) == any(f".{name}." in f".{module}." for name in names)
        assert ends.does_match_path(module, after_dot=False) == any(stop.endswith(tuple(names)) for stop in stops)
