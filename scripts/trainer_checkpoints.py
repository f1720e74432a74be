"""Writes the checkpoints of tests/corpus/trainers: genuine tiny models of each trainer's own code, trained two steps.

``python scripts/trainer_checkpoints.py FOLDER NAME...`` with the trainer on the path: torchtitan of 2026-08, OLMo-core
of 2026-06, NeMo Automodel 36044ad3 of 2026-08; for prime-rl 559b4477 of 2026-08 its own sources, those of its package
``prime-rl-configs``, and torchtitan 23e4dfc, on which it depends. Each zip has the DCP of model and optimizer,
``config.json`` of the same model in transformers, and the logits of ``TOKENS`` by the trainer's own model.

No GPU is needed. Attention is computed in plain torch: torchtitan's flex attention has no gradient on the CPU, and
prime-rl has flash attention alone. Automodel's gpt-oss keeps its flex attention and has random gradients.
"""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

VOCABULARY, WIDTH, HIDDEN = 16, 16, 16
TOKENS = torch.arange(12) * 5 % VOCABULARY
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
}


@dataclass(frozen=True)
class Made:
    model: nn.Module
    forward: Callable[[Tensor], Tensor]
    config: transformers.PretrainedConfig
    state: Callable[[torch.optim.Optimizer], dict[str, Any]]


def named_state(model: nn.Module) -> Callable[[torch.optim.Optimizer], dict[str, Any]]:
    def state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        optim = get_optimizer_state_dict(model, optimizer, options=flat)
        return {"model": get_model_state_dict(model), "optim": optim}

    return state


def titan(config: Any, other: transformers.PretrainedConfig) -> Made:
    from torchtitan.components.optimizer.utils import get_flat_optim_state_dict
    from torchtitan.models.common import attention

    attention.FlexAttention.forward = _attention
    model = config.build()
    model.init_weights()

    def forward(tokens: Tensor) -> Tensor:
        positions = torch.arange(len(tokens))
        masks = model.get_attention_masks(positions)
        found = model(tokens, positions=positions, attention_masks=masks)
        return found[0] if isinstance(found, tuple | list) else found

    def state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        flat = get_flat_optim_state_dict(optimizer)
        return {**model.state_dict(), "optimizer": flat, "train_state": {"step": torch.tensor(2)}}

    return Made(model, forward, other, state)


def _attention(
    self: Any, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int = -1, **_: Any
) -> Tensor:
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    k, v = (each.repeat_interleave(len(q) // len(k), 0) for each in (k, v))
    scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores + torch.full(scores.shape[1:], torch.finfo(scores.dtype).min).triu(1)
    if window >= 0:
        scores = scores + torch.full(scores.shape[1:], torch.finfo(scores.dtype).min).tril(-window - 1)
    return (torch.softmax(scores, -1) @ v).transpose(0, 1)


def titan_llama() -> Made:
    from torchtitan.models import llama3
    from torchtitan.models.common.rope import ComplexRoPE

    rope = ComplexRoPE.Config(dim=4, max_context_length=64, theta=500000, scaling="none")
    layers = llama3._build_llama3_layers(
        n_layers=2, dim=WIDTH, n_heads=4, n_kv_heads=2, hidden_dim=HIDDEN, rope=rope, attn_backend="flex"
    )
    other = transformers.LlamaConfig(
        **SIZES, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}
    )
    return titan(llama3.Llama3Model.Config(dim=WIDTH, **_titan_ends(llama3), layers=layers), other)


def titan_qwen3_moe() -> Made:
    from torchtitan.models import qwen3
    from torchtitan.models.common.rope import CosSinRoPE

    rope = CosSinRoPE.Config(dim=8, max_context_length=64, theta=1e6)
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=WIDTH,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        moe_hidden_dim=8,
        num_experts=4,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=rope,
    )
    other = transformers.Qwen3MoeConfig(
        **{**SIZES, **EXPERTS, "num_experts": 4, "head_dim": 8, "rms_norm_eps": qwen3._EPS},
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    )
    return titan(qwen3.Qwen3Model.Config(dim=WIDTH, **_titan_ends(qwen3, qwen3._EPS), layers=layers), other)


def titan_deepseek_v3() -> Made:
    """With a layer for multi-token prediction."""
    from torchtitan.models import deepseek_v3 as deepseek
    from torchtitan.models.common import Linear, RMSNorm
    from torchtitan.models.common.rope import ComplexRoPE

    layers = deepseek.build_mla_moe_layers(
        n_layers=3,
        n_dense_layers=1,
        dim=WIDTH,
        n_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        mscale=1.0,
        dense_hidden_dim=HIDDEN,
        moe_hidden_dim=8,
        num_experts=4,
        num_shared_experts=1,
        router_top_k=2,
        router_score_func="sigmoid",
        router_route_scale=2.5,
        router_route_norm=True,
        router_num_expert_groups=2,
        router_num_limited_groups=1,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        linear_init=deepseek._LINEAR_INIT,
        norm_init=deepseek._NORM_INIT,
        depth_init=deepseek._depth_init,
        depth_experts_init=deepseek._depth_experts_init,
        rope=ComplexRoPE.Config(dim=4, max_context_length=64, theta=10000.0, scaling="none"),
    )
    names = ("attention", "feed_forward", "moe", "attention_norm", "ffn_norm")
    mtp = deepseek.MTPTransformerBlock.Config(
        **{name: getattr(layers[2], name) for name in names},
        **{
            name: RMSNorm.Config(normalized_shape=WIDTH, param_init=deepseek._NORM_INIT)
            for name in ("enorm", "hnorm", "mtp_norm")
        },
        eh_proj=Linear.Config(in_features=2 * WIDTH, out_features=WIDTH, param_init=deepseek._LINEAR_INIT),
    )
    config = deepseek.DeepSeekV3Model.Config(dim=WIDTH, **_titan_ends(deepseek), layers=layers[:2], mtp_layers=[mtp])
    other = transformers.DeepseekV3Config(
        **{**SIZES, **EXPERTS, **LATENT, "rms_norm_eps": 1e-5},
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    )
    return titan(config, other)


def _titan_ends(module: Any, eps: float = 1e-5) -> dict[str, Any]:
    from torchtitan.models.common import Embedding, Linear, RMSNorm

    return {
        "vocab_size": VOCABULARY,
        "tok_embeddings": Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=module._EMBEDDING_INIT
        ),
        "norm": RMSNorm.Config(normalized_shape=WIDTH, eps=eps, param_init=module._NORM_INIT),
        "lm_head": Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=module._LINEAR_INIT),
    }


def olmo(*, is_after: bool, **more: Any) -> Made:
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig

    sizes = {"d_model": WIDTH, "vocab_size": VOCABULARY, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    kind = TransformerBlockType.reordered_norm if is_after else TransformerBlockType.default
    config = TransformerConfig.llama_like(
        **sizes, block_name=kind, rope_theta=500000, layer_norm_eps=1e-6, hidden_size_multiple_of=16, **more
    )
    model = config.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"))
    of = transformers.Olmo2Config if is_after else transformers.LlamaConfig
    width = model.blocks["0"].feed_forward.w1.out_features
    other = of(
        **{**SIZES, "intermediate_size": width, "rms_norm_eps": 1e-6},
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    )

    return Made(model, lambda tokens: model(tokens[None])[0], other, named_state(model))


SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
ROPE = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}


def mixture(family: str) -> transformers.PretrainedConfig:
    """The ``config.json`` of a mixture of experts by its class in transformers."""
    more: dict[str, dict[str, Any]] = {
        "Qwen3Moe": {**ROPE, "num_experts": 4, "head_dim": 8},
        "DeepseekV3": {**ROPE, **LATENT},
        "Glm4Moe": {**SHARED, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
        "Afmoe": {
            "num_experts": 4,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "MiniMaxM2": {"num_local_experts": 4, "head_dim": 8, "rotary_dim": 4},
        "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
    }
    made: transformers.PretrainedConfig = getattr(transformers, f"{family}Config")(
        **{**SIZES, **EXPERTS, **more[family]}
    )
    made.architectures = [f"{family}ForCausalLM"]
    return made


def prime_rl(family: str) -> Made:
    import prime_rl.trainer
    from torchtitan.experiments.kernels.moe import indices

    # The package's __init__ imports all models, and some need libraries for GPUs.
    models = sys.modules["prime_rl.trainer.models"] = ModuleType("prime_rl.trainer.models")
    models.__path__ = [f"{path}/models" for path in prime_rl.trainer.__path__]
    flash = sys.modules["flash_attn"] = ModuleType("flash_attn")
    flash.__spec__ = ModuleSpec("flash_attn", None)
    flash.__dict__["flash_attn_varlen_func"] = _varlen_attention
    indices.fill_indices_wrapper = indices.fill_indices_cpu
    histogram = torch.histc  # of whole numbers on GPUs alone
    torch.histc = lambda values, **keys: histogram(values.float(), **keys).to(values.dtype)
    other = mixture(family)
    module = importlib.import_module(f"prime_rl.trainer.models.{other.model_type}")
    config = getattr(module, f"{family}Config")(**{**other.to_dict(), "use_grouped_mm": False})
    config._attn_implementation = "flash_attention_2"
    model = getattr(module, f"{family}ForCausalLM")(config)
    importlib.import_module("prime_rl.trainer.models.layers.lm_head").inject_prime_lm_head(model)
    for parameter in model.parameters():  # prime-rl loads its weights and leaves them empty here
        nn.init.ones_(parameter) if parameter.ndim == 1 else nn.init.normal_(parameter, std=0.1)
    return Made(
        model,
        lambda tokens: model(tokens[None], seq_lens=torch.tensor([len(tokens)]))["logits"][0],
        other,
        named_state(model),
    )


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, causal: bool, window_size: Any = (-1, -1)) -> Tensor:
    assert causal
    return _attention(None, q, k, v, window=window_size[0])


def automodel(family: str) -> Made:
    torch.cuda.current_device = lambda: 0
    from nemo_automodel.components.attention.flex_attention import FlexAttention
    from nemo_automodel.components.models.common import BackendConfig
    from torch.nn.attention.flex_attention import flex_attention

    FlexAttention.flex_attn = staticmethod(flex_attention)  # not compiled

    other = mixture(family)
    other.torch_dtype = "float32"
    module = importlib.import_module(f"nemo_automodel.components.models.{other.model_type}.model")
    backend = BackendConfig(
        attn="flex" if family == "GptOss" else "sdpa",
        linear="torch",
        experts="torch",
        dispatcher="torch",
        rms_norm="torch",
    )
    model = getattr(module, f"{family}ForCausalLM")(other, backend=backend)
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.float32)

    def forward(tokens: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and family != "GptOss"):
            found = model(tokens[None])
        return getattr(found, "logits", found)[0]

    return Made(model, forward, other, named_state(model))


MODELS: dict[str, Callable[[], Made]] = {
    "torchtitan_llama": titan_llama,
    "torchtitan_qwen3_moe": titan_qwen3_moe,
    "torchtitan_deepseek_v3": titan_deepseek_v3,
    "olmo_core_olmo2": partial(olmo, is_after=True, qk_norm=True),
    "olmo_core_llama": partial(olmo, is_after=False),
    "prime_rl_qwen3_moe": partial(prime_rl, "Qwen3Moe"),
    "prime_rl_glm4_moe": partial(prime_rl, "Glm4Moe"),
    "prime_rl_afmoe": partial(prime_rl, "Afmoe"),
    "prime_rl_minimax_m2": partial(prime_rl, "MiniMaxM2"),
    "automodel_qwen3_moe": partial(automodel, "Qwen3Moe"),
    "automodel_glm4_moe": partial(automodel, "Glm4Moe"),
    "automodel_deepseek_v3": partial(automodel, "DeepseekV3"),
    "automodel_gpt_oss": partial(automodel, "GptOss"),
}


def trained(made: Made) -> torch.optim.Optimizer:
    for name, parameter in made.model.named_parameters():
        if "norm" in name or parameter.ndim == 1:
            parameter.data += torch.randn_like(parameter) / 8
    optimizer = torch.optim.AdamW(list(made.model.named_parameters()), lr=1e-3)
    for step in range(2):
        tokens = torch.randint(0, VOCABULARY, (13,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(made.forward(tokens[:-1]), tokens[1:])
        if loss.requires_grad:
            loss.backward()
        for parameter in made.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.randn_like(parameter) / 64
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def write(name: str, target: Path) -> None:
    torch.manual_seed(0)
    made = MODELS[name]()
    optimizer = trained(made)
    for buffer_name, buffer in made.model.named_buffers():
        if "expert_bias" in buffer_name or "correction_bias" in buffer_name:
            # transformers' Qwen3-MoE has none.
            buffer.copy_(torch.zeros_like(buffer) if "qwen3" in name else torch.randn_like(buffer) / 8)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        dcp.save(made.state(optimizer), checkpoint_id=root / "dcp", no_dist=True)
        made.config.save_pretrained(root)
        with torch.no_grad():
            np.save(root / "logits.npy", made.model.eval() and made.forward(TOKENS).numpy())
        with zipfile.ZipFile(target / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(each for each in root.rglob("*") if each.is_file()):
                archive.write(path, path.relative_to(root))


if __name__ == "__main__":
    for model_name in sys.argv[2:] or MODELS:
        write(model_name, Path(sys.argv[1]))
