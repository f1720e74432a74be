"""Tiny models with adapters of PEFT, and what PEFT makes of both."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 120}


def llama(**settings: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 96, **ATTENTION, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **settings}))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=100, n_positions=32))


def qwen3_moe() -> PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 96, **ATTENTION, "tie_word_embeddings": False}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **experts}))


def gpt_oss() -> PreTrainedModel:
    """Experts as wide as the model, so that one of their tensors is square."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 32, **ATTENTION, "tie_word_embeddings": False}
    return GptOssForCausalLM(GptOssConfig(**{**sizes, **experts}))


@dataclass(frozen=True)
class Case:
    """A model and the settings of its adapter."""

    model: Callable[..., PreTrainedModel]
    settings: Mapping[str, Any]
    model_settings: Mapping[str, Any] = field(default_factory=dict)


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CASES = {
    "linear": Case(llama, {"target_modules": LINEAR, "r": 8, "lora_alpha": 20}),
    "patterns": Case(llama, {"target_modules": LINEAR, "r": 4, "rank_pattern": {"layers.1.self_attn.q_proj": 2,
        "0.mlp.*": 3, r"1\.mlp\.(up|down)_proj": 1}, "alpha_pattern": {"^model.layers.0.mlp.up_proj": 5, "proj": 12,
        "q_proj": 64}}),
    "rslora": Case(llama, {"target_modules": ["q_proj", "up_proj"], "r": 3, "lora_alpha": 7, "use_rslora": True}),
    "biases": Case(llama, {"target_modules": ["q_proj", "o_proj"], "r": 4, "lora_bias": True, "bias": "lora_only"},
        {"attention_bias": True}),
    "saved": Case(llama, {"target_modules": ["v_proj"], "r": 2, "modules_to_save": ["lm_head", "input_layernorm"]}),
    "embeddings": Case(llama, {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": 4}),
    "conv1d": Case(gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "r": 4, "fan_in_fan_out": True}),
    "conv1d, square alone": Case(gpt2, {"target_modules": ["attn.c_proj"], "r": 4}),
    "experts": Case(qwen3_moe, {"target_modules": ["q_proj"], "target_parameters": PACKED, "r": 4, "lora_alpha": 12}),
    "experts of one kind": Case(qwen3_moe, {"target_modules": [], "target_parameters": [PACKED[1]], "r": 2,
        "rank_pattern": {PACKED[1]: 3}}),
    "experts, transposed": Case(gpt_oss, {"target_modules": ["q_proj"], "target_parameters": PACKED, "r": 4}),
    "experts, square": Case(gpt_oss, {"target_modules": [], "target_parameters": [PACKED[1]], "r": 4}),
}  # fmt: skip


def adapted(case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> PeftModel:
    """A model with an adapter whose matrices are random, and its base in ``folder/base``."""
    torch.manual_seed(3)
    base = case.model(**case.model_settings).to(dtype)
    base.save_pretrained(folder / "base")
    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(base, LoraConfig(**case.settings, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.05)
    return model


def merged_by_peft(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """What PEFT merges from ``folder/base`` and ``folder/adapter``."""
    with warnings.catch_warnings(action="ignore"):
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
        model = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    return dict(model.state_dict())


def made(case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The same of a model and an adapter that are written."""
    with warnings.catch_warnings(action="ignore"):
        adapted(case, folder, dtype).save_pretrained(str(folder / "adapter"))
    return merged_by_peft(folder, dtype)


class Convolutions(nn.Module):
    """Layers of torch whose kernels have one, two and three dims, and one of which is a dot."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.dot = nn.Conv1d(6, 8, 3), nn.Conv2d(8, 10, 1)
        self.square, self.cube = nn.Conv2d(10, 12, (3, 2)), nn.Conv3d(12, 7, 2)
