"""Makes inputs with the frameworks themselves: `python -m benchmarks.builders KIND FOLDER HIDDEN LAYERS RANKS`.

Training a step of a 4.5 GB state would take minutes. So the states are filled with random numbers where the frameworks
keep them, and saved by the frameworks' own functions: files and bytes are those of a run.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.inputs import NUM_EXPERTS, NUM_HEADS, make_llama
from fixtures import megatron as mg
from fixtures.launch import Pool
from fixtures.synthetic import Model

BUILD_SECONDS, STEP = 1500, 7.0


def empty_model(llama: Model, *, with_experts: bool = False) -> nn.Module:
    """A Llama of transformers on the meta device, or a mixture of experts of about as many parameters; each of its
    layers has its experts in two tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": llama.ffn // NUM_EXPERTS}
    config = AutoConfig.for_model(
        "qwen3_moe" if with_experts else "llama",
        **(experts if with_experts else {}),
        hidden_size=llama.hidden,
        intermediate_size=llama.ffn,
        num_hidden_layers=llama.layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        head_dim=llama.hidden // NUM_HEADS,
        vocab_size=llama.vocab,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model


def fill_randomly(tensor: Tensor) -> Tensor:
    """Fill this rank's part with random numbers: no page is like another."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.normal_(std=0.02)
    return tensor


def sharded_model(llama: Model, *, with_experts: bool = False) -> nn.Module:
    """A model with its parts of random numbers on each rank."""
    model = empty_model(llama, with_experts=with_experts)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return _fill_parameters(model)


def _fill_parameters(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            fill_randomly(parameter)
    return model


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        optimizer.state[parameter] = make_moments(parameter)
    return optimizer


def make_moments(parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter, with random numbers."""
    with torch.no_grad():
        first, second = fill_randomly(torch.empty_like(parameter)), fill_randomly(torch.empty_like(parameter)).abs_()
    return {"step": torch.tensor(STEP), "exp_avg": first, "exp_avg_sq": second}


def build_dcp(out: str, llama: Model) -> None:
    model = sharded_model(llama)
    weights, optim = get_state_dict(model, make_adamw(model))
    save({"app": {"model": weights, "optim": optim, "global_step": int(STEP)}}, checkpoint_id=out)


def build_dcp_weights(out: str, llama: Model, *, with_experts: bool = False) -> None:
    """The tree in which accelerate saves a model."""
    save({"model": get_model_state_dict(sharded_model(llama, with_experts=with_experts))}, checkpoint_id=out)


def _filled_part(shape: tuple[int, ...], index: tuple[int, ...]) -> Tensor:
    return fill_randomly(torch.empty(shape[len(index) :]))


def build_megatron(out: str, llama: Model) -> None:
    """A torch_dist with all layers in one tensor each, of pipeline parallelism."""
    weight, stack, hidden, layer = mg.Weight, llama.layers, llama.hidden, f"{mg.LAYER}."
    weights = {
        "embedding.word_embeddings.weight": weight((llama.vocab, hidden)),
        f"{layer}self_attention.linear_qkv.layer_norm_weight": weight((stack, hidden), stacked=1),
        f"{layer}self_attention.linear_qkv.weight": weight((stack, 3 * hidden, hidden), stacked=1),
        f"{layer}self_attention.linear_proj.weight": weight((stack, hidden, hidden), stacked=1),
        f"{layer}mlp.linear_fc1.layer_norm_weight": weight((stack, hidden), stacked=1),
        f"{layer}mlp.linear_fc1.weight": weight((stack, 2 * llama.ffn, hidden), stacked=1),
        f"{layer}mlp.linear_fc2.weight": weight((stack, hidden, llama.ffn), stacked=1),
        "decoder.final_layernorm.weight": weight((hidden,)),
        "output_layer.weight": weight((llama.vocab, hidden)),
    }
    grid = mg.Grid(1, dist.get_world_size(), 1)
    tensors = {name: mg.declared(name, each, grid, partial(_filled_part, each.shape)) for name, each in weights.items()}
    args = argparse.Namespace(
        num_attention_heads=NUM_HEADS, num_query_groups=NUM_HEADS, kv_channels=hidden // NUM_HEADS
    )
    mg.save_state(Path(out), {"tensors": tensors, "args": args, "iteration": int(STEP), "checkpoint_version": 3.0})


def build_hf_weights(out: str, llama: Model) -> None:
    weights = get_model_state_dict(sharded_model(llama))
    save(weights, storage_writer=HuggingFaceStorageWriter(out, save_distributed=True))


def build_tp_weights(out: str, llama: Model) -> None:
    """Weights cut along their last axis, as of row-parallel linear layers; vectors are whole on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = {}
    for name, parameter in empty_model(llama).named_parameters():
        if parameter.ndim < 2:
            weights[name] = DTensor.from_local(torch.ones(parameter.shape), mesh, [Replicate()])
        else:
            rows, columns = parameter.shape
            local = fill_randomly(torch.empty(rows, columns // mesh.size()))
            weights[name] = DTensor.from_local(local, mesh, [Shard(1)])
    save({"model": weights}, checkpoint_id=out)


def build_zero(stage: int, out: str, llama: Model) -> None:
    """DeepSpeed makes the masters of the bf16 model that it is given; the moments are filled in beside them."""
    import deepspeed

    from fixtures.zero import prepare

    prepare()
    model = _fill_parameters(empty_model(llama).to(torch.bfloat16).to_empty(device="cpu"))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    optimizer = engine.optimizer
    masters = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
    with torch.no_grad():
        for master in masters:
            master.mul_(1 + 2**-12)  # else the lower half of every number is zero, as no trained one is
            optimizer.optimizer.state[master] = make_moments(master)
    gc.collect()
    engine.save_checkpoint(out)


def build_safetensors(out: str, llama: Model) -> None:
    weights = {name: fill_randomly(torch.empty(p.shape)) for name, p in empty_model(llama).named_parameters()}
    Path(out).mkdir()
    save_file(weights, Path(out) / "model.safetensors", metadata={"format": "pt"})


def build_lora(out: str, llama: Model) -> None:
    """A model in bf16, and an adapter of rank 16 on all linear layers but the head, in fp32, as PEFT saves them."""
    from peft import LoraConfig, get_peft_model

    model: Any = _fill_parameters(empty_model(llama).to(torch.bfloat16).to_empty(device="cpu"))
    model.save_pretrained(Path(out) / "base")
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                fill_randomly(parameter)
    adapted.save_pretrained(str(Path(out) / "adapter"))


def build_torch(out: str, llama: Model) -> None:
    model = _fill_parameters(empty_model(llama).to_empty(device="cpu"))
    weights, optim = get_state_dict(model, make_adamw(model))
    Path(out).mkdir()
    torch.save({"model": weights, "optim": optim, "global_step": int(STEP)}, Path(out) / "training.pt")


BUILDERS: dict[str, Callable[[str, Model], None]] = {
    "dcp": build_dcp,
    "dcp8": build_dcp,
    "dcp-weights": build_dcp_weights,
    "dcp-experts": partial(build_dcp_weights, with_experts=True),
    "megatron": build_megatron,
    "hf-weights": build_hf_weights,
    "tp-weights": build_tp_weights,
    "zero2": partial(build_zero, 2),
    "zero3": partial(build_zero, 3),
    "safetensors": build_safetensors,
    "lora": build_lora,
    "torch": build_torch,
}


def rank_main(kind: str, out: str, llama: Model) -> None:
    torch.manual_seed(dist.get_rank())
    BUILDERS[kind](out, llama)
    dist.barrier()


def main(kind: str, out: str, hidden: str, layers: str, ranks: str) -> None:
    llama = make_llama(int(hidden), int(layers))
    if kind in ("safetensors", "torch", "lora"):
        BUILDERS[kind](out, llama)
        return
    with tempfile.TemporaryDirectory() as logs, closing(Pool(int(ranks), log_dir=Path(logs))) as pool:
        pool.run(rank_main, kind, out, llama, seconds=BUILD_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
