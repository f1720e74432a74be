"""Adapters and base models that cannot be merged are refused by name, before anything is written."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

import ckpt_tools
from ckpt_tools.errors import CkptError, DifferenceError, MalformedError, UnsupportedError, UsageError
from ckpt_tools.lora import config
from ckpt_tools.lora.config import parse_config

A, B = torch.ones(2, 4), torch.ones(6, 2)
BASE = {"model.q.weight": torch.zeros(6, 4), "model.q.bias": torch.zeros(6)}
ADAPTER = {"base_model.model.model.q.lora_A.weight": A, "base_model.model.model.q.lora_B.weight": B}
EMBEDDINGS = {"model.embed_tokens.weight": torch.zeros(9, 4)}


def refused(
    folder: Path,
    error: type[CkptError],
    said: str,
    *,
    base: Mapping[str, Tensor] = BASE,
    adapter: Mapping[str, Tensor] = ADAPTER,
    model: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    (folder / "base").mkdir()
    (folder / "adapter").mkdir()
    save_file(dict(base), folder / "base" / "model.safetensors")
    apart = {name: tensor.clone() for name, tensor in adapter.items()}
    save_file(apart, folder / "adapter" / "adapter_model.safetensors")
    if model is not None:
        (folder / "base" / "config.json").write_text(json.dumps(model))
    found = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(found))
    with pytest.raises(error, match=said):
        ckpt_tools.merge_lora(folder / "base", folder / "adapter", folder / "out", to="safetensors", **(options or {}))
    assert not (folder / "out").exists()


REFUSED: dict[str, tuple[type[CkptError], dict[str, Any], str]] = {
    "another method": (UnsupportedError, {"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
    "DoRA": (UnsupportedError, {"use_dora": True}, r"use_dora is set \(DoRA\)"),
    "replicated layers": (UnsupportedError, {"layer_replication": [[0, 1]]}, "layer_replication"),
    "changed base": (UnsupportedError, {"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16.*changed the base"),
    "of a later version": (UnsupportedError, {"use_something_new": True},
        "use_something_new of its settings may change the result"),
    "no bias known": (UnsupportedError, {"bias": "some"}, "bias is 'some'"),
    "a rank of 0": (MalformedError, {"r": 0}, "r is 0, and not a rank"),
    "an alpha in words": (MalformedError, {"lora_alpha": "much"}, "lora_alpha is 'much', and not a number"),
    "a huge alpha": (MalformedError, {"lora_alpha": 10**400}, "lora_alpha is 1000.*, and not a number"),
    "an alpha beyond fp32": (MalformedError, {"alpha_pattern": {"q": 1e31}}, "not a number"),
    "no pattern": (MalformedError, {"rank_pattern": {"(": 2}}, r"rank_pattern: '\(' is not a regular expression"),
    "no object": (MalformedError, {"alpha_pattern": [1]}, "alpha_pattern is not a JSON object"),
    "no list": (MalformedError, {"target_modules": 2}, "target_modules is not a list"),
    "no list of parameters": (MalformedError, {"target_parameters": "experts"}, "target_parameters is not a list"),
    **{
        f"a pattern that may not end: {pattern[:9]}": (UnsupportedError, {"rank_pattern": {pattern: 2}},
            "may take hours to match")
        for pattern in ("(a+)+b", "(a|a)" * 30, "a?" * 30 + "a" * 30, "(?=(a*)*)b")
    },
    "empty": (UsageError, {"adapter": {"x": A}}, "holds no adapter: no tensor is called lora_A or lora_B"),
    "of Megatron": (UsageError, {"adapter": {"a.adapter.linear_in.weight": A}}, "adapters of Megatron"),
    "without B": (UsageError, {"adapter": {"model.q.lora_A.weight": A}}, "no lora_B.weight for model.q.weight"),
    "of other dims": (UsageError, {"adapter": {"model.q.lora_A.weight": A, "model.q.lora_B.weight": torch.zeros(6)}},
        "for another model: its A and B for model.q.weight are"),
    "of another model": (UsageError, {"base": {"model.k.weight": torch.zeros(6, 4)}},
        "for another model: none of the adapter's 1 module fits the base model, which has no model.q.weight"),
    "of a larger model": (UsageError, {"base": {"model.q.weight": torch.zeros(8, 4)}}, r"are \[2, 4\] and \[6, 2\]"),
    "of another rank": (UsageError, {"r": 3}, r"by \[6, 4\] in the base model and the rank in adapter_config.json"),
    "quantized": (UnsupportedError, {"base": {"model.q.weight": torch.zeros(6, 4, dtype=torch.int8)}},
        "int8 in the base model; dequantize it with dequantize=True"),
    "packed": (UnsupportedError, {"base": {"model.q.qweight": torch.zeros(6, 4, dtype=torch.int32),
        "model.q.scales": torch.zeros(6)}}, "model.q is quantized in the base model"),
    "attention of torch": (UnsupportedError, {"base": {"model.q.in_proj_weight": torch.zeros(6, 4)}},
        "MultiheadAttention"),
    "no bias": (UnsupportedError, {"adapter": ADAPTER | {"model.q.lora_B.bias": torch.ones(6)},
        "base": {"model.q.weight": torch.zeros(6, 4)}}, "adds to model.q.bias, which the base model does not have"),
    "another vocabulary": (UsageError, {"base": BASE | {"lm_head.weight": torch.zeros(9, 4)}, "adapter": ADAPTER
        | {"lm_head.weight": torch.zeros(10, 4)}},
        r"lm_head.weight is \[10, 4\] in the adapter and \[9, 4\] in the base; resize"),
    "tied head": (UnsupportedError, {"base": EMBEDDINGS, "adapter": {"lm_head.lora_A.weight": A,
        "lm_head.lora_B.weight": torch.ones(9, 2)}, "model": {"model_type": "llama", "tie_word_embeddings": True}},
        "ties lm_head.weight to the embeddings"),
    "tied embeddings": (UnsupportedError, {"base": EMBEDDINGS,
        "adapter": {"model.embed_tokens.lora_embedding_A": torch.ones(2, 9),
        "model.embed_tokens.lora_embedding_B": torch.ones(4, 2)}, "task_type": "CAUSAL_LM"},
        "ties model.embed_tokens.weight to the head"),
    "a head unlike the embeddings": (DifferenceError, {"base": BASE | EMBEDDINGS, "adapter": ADAPTER
        | {"model.embed_tokens.weight": torch.ones(9, 4), "lm_head.weight": torch.full((9, 4), 2.0)},
        "model": {"model_type": "llama", "tie_word_embeddings": True}}, "which the base model ties: their bits differ"),
    "square and unknown": (UnsupportedError, {"base": {"a.weight": torch.zeros(4, 4), "b.weight": torch.zeros(4, 6)},
        "adapter": {"a.lora_A.weight": A, "a.lora_B.weight": torch.ones(4, 2), "b.lora_A.weight": A,
        "b.lora_B.weight": B}}, "a.weight: it is square"),
    "experts that are alike": (UnsupportedError, {"base": {"e.w1": torch.zeros(2, 6, 4), "e.w3": torch.zeros(2, 6, 4)},
        "adapter": {"e.lora_A.weight": torch.ones(4, 4), "e.lora_B.weight": torch.ones(6, 4),
        "e.base_layer.lora_A.weight": torch.ones(4, 4), "e.base_layer.lora_B.weight": torch.ones(6, 4)},
        "target_parameters": ["e.w1", "e.w3"]}, "the shapes do not tell which matrices of e are for which of e.w1"),
    "several adapters": (UsageError, {"adapter": {"model.q.lora_A.one.weight": A, "model.q.lora_A.two.weight": A}},
        r"several adapters \(one, two\); choose one with adapter_name"),
    "a name where there is none": (UsageError, {"options": {"adapter_name": "two"}}, "without names of adapters"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged(name, tmp_path):
    error, given, said = REFUSED[name]
    refused(tmp_path, error, said, **given)


@pytest.mark.parametrize("pattern", [r"layers\.(0|1|2|30|31)\.(self_attn|mlp)\..*", r"layers\.\d+\.(?:q|k|v)_proj"])
def test_patterns_that_people_write(pattern):
    parsed = parse_config({"peft_type": "LORA", "rank_pattern": {pattern: 2}}, "a.json")
    parsed.check_pattern_cost([f"base_model.model.model.layers.{number}.self_attn.q_proj" for number in range(500)])
    assert parsed.rank_pattern.values_by_pattern == {pattern: 2}


def test_every_setting_of_peft_has_a_rule():
    known = config._HANDLED_KEYS | config._TRAINING_KEYS | config._UNSUPPORTED_KEYS.keys()
    fields = {each.name for each in dataclasses.fields(LoraConfig) if each.init}
    assert fields - known == set()


def test_sources_without_settings_or_as_the_output(tmp_path):
    base, adapter = tmp_path / "base.safetensors", tmp_path / "adapter"
    save_file(BASE, base)
    adapter.mkdir()
    save_file(ADAPTER, adapter / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=r"no adapter_config.json beside .*adapter; name the folder .* with config="):
        ckpt_tools.merge_lora(base, adapter, tmp_path / "out.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    with pytest.raises(ckpt_tools.DestinationExistsError, match="source"):
        ckpt_tools.merge_lora(base, adapter, adapter, to="safetensors", overwrite=True)
