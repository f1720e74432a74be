"""Device meshes of a run, and sharding of a model over them: FSDP2, DDP, tensor and expert parallelism.

Tensor parallelism of the language model splits heads and hidden units, and norms are sequence-parallel: between layers
each worker holds a slice of the sequence (``Shard(1)``). A layer gathers it, multiplies by the worker's columns and
then by its rows, and scatters the sums into slices. Expert parallelism splits the experts over workers, and sends
tokens to the workers of their experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from ckpt_tools.errors import UsageError

from ..config.train_config import TrainConfig
from ..models.experts import Experts, MixtureBlock
from ..models.language_model import LanguageModel
from ..models.zoo import ModelSpec, TrainableModel
from .base import DTYPES
from .blocks import build_in_blocks, prepare_block
from .stages import build_stage


@dataclass(frozen=True, slots=True)
class Meshes:
    """Meshes of workers: with different samples (``data``), with parts of each layer (``tensor``), with the stages of a
    pipeline; with all experts together and with the same ones (``experts``)."""

    data: DeviceMesh
    tensor: DeviceMesh | None
    pipeline: DeviceMesh | None
    experts: tuple[DeviceMesh, DeviceMesh] | None = None


def make_meshes(config: TrainConfig, device: torch.device) -> Meshes:
    """Stages are outermost; tensor and expert parallelism innermost, to keep messages on one machine."""
    workers = torch.distributed.get_world_size() // config.pp
    data, tensor, pipeline = _make_mesh(config, device, _shard_size(config, workers // config.tp), "tp")
    if config.ep == 1:
        return Meshes(data, tensor, pipeline)
    shard_size = max(_shard_size(config, workers) // config.ep, 1)
    same, everyone, _ = _make_mesh(config, device, shard_size, "ep")
    assert everyone is not None
    return Meshes(data, tensor, pipeline, (everyone, same))


def _make_mesh(
    config: TrainConfig, device: torch.device, shard_size: int, inner: str
) -> tuple[DeviceMesh, DeviceMesh | None, DeviceMesh | None]:
    size: int = getattr(config, inner)
    workers = torch.distributed.get_world_size() // (size * config.pp)
    replicated = config.sharding.in_groups or config.sharding.stage == 0
    dims = ({"pp": config.pp} if config.pp > 1 else {}) | ({"replicate": workers // shard_size} if replicated else {})
    dims |= {"shard": shard_size} | ({inner: size} if size > 1 else {})
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    neighbours, pipeline = (mesh[each] if each in dims else None for each in (inner, "pp"))
    return mesh[("replicate", "shard") if replicated else "shard"], neighbours, pipeline


def _shard_size(config: TrainConfig, workers: int) -> int:
    return 1 if config.sharding.stage == 0 else config.shard_size or workers


def build_parallel_model(config: TrainConfig, spec: ModelSpec, meshes: Meshes, device: torch.device) -> TrainableModel:
    """The model with the weights of the seed, sharded; with a pipeline, this rank's stage of it. ``fully_shard`` moves
    what it shards to the device, and with ``--cpu-offload`` back."""
    if config.sharding.name == "ddp":
        return _wrap_in_ddp(config, spec, device)

    def on_block(block: nn.Module) -> None:
        if meshes.tensor is not None:
            shard_block(block, meshes.tensor)
        if meshes.experts is not None and isinstance(block, MixtureBlock):
            _shard_experts(config, block.feed_forward.experts, *meshes.experts)
        prepare_block(config, block)
        fully_shard(block, **_block_options(config, meshes.data))

    if meshes.pipeline is None:
        model = build_in_blocks(config, spec, on_block)
        parts = [model]
    else:
        stage = build_stage(config, spec, meshes.pipeline.get_local_rank(), on_block)
        model = TrainableModel(stage)
        parts = [TrainableModel(chunk, list(chunk.layers.values())) for chunk in stage.chunks]
    if meshes.tensor is not None:
        shard_root(model.module, meshes.tensor)
    for part in parts:
        fully_shard(part.module, **_fsdp_options(config, meshes.data))
        _set_prefetch(config, part.blocks)
    return model


def _shard_experts(config: TrainConfig, experts: Experts, everyone: DeviceMesh, same: DeviceMesh) -> None:
    """Split the experts over workers, and shard them over those with the same ones; by rows if these divide."""
    split_experts(experts, everyone)
    rows = Shard(1) if all(one.shape[1] % same.size(-1) == 0 for one in experts.parameters()) else None
    fully_shard(experts, **_block_options(config, same), shard_placement_fn=lambda _: rows)


def _wrap_in_ddp(config: TrainConfig, spec: ModelSpec, device: torch.device) -> TrainableModel:
    """DDP. With ``find_unused_parameters`` the gradient buckets keep their order. Otherwise DDP reorders them after the
    first step of a run, and a resumed run would sum in another order; on a GPU, where sums vary anyway, that is faster.
    """
    model = build_in_blocks(config, spec, lambda block: prepare_block(config, block))
    on_cuda = device.type == "cuda"
    module = DistributedDataParallel(
        model.module.to(device),
        device_ids=[device] if on_cuda else None,
        find_unused_parameters=config.deterministic or not on_cuda,
    )
    return replace(model, module=module)


def _fsdp_options(config: TrainConfig, mesh: DeviceMesh) -> dict[str, Any]:
    """bf16 and fp16 compute in 16 bits, with float32 parameters; gradients are reduced in ``--reduce-dtype``."""
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.cpu_offload else OffloadPolicy()
    computed = None if config.precision == "fp32" else DTYPES[config.precision]
    policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=DTYPES[config.reduce_dtype])
    return {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}


def _block_options(config: TrainConfig, mesh: DeviceMesh) -> dict[str, Any]:
    reshards = config.reshard_after_forward or config.sharding.stage == 3
    return {**_fsdp_options(config, mesh), "reshard_after_forward": reshards}


def _set_prefetch(config: TrainConfig, blocks: Sequence[nn.Module]) -> None:
    """Gather the parameters of the following blocks during the computation of one."""
    sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for at, block in enumerate(sharded):
        if config.forward_prefetch:
            block.set_modules_to_forward_prefetch(sharded[at + 1 : at + 1 + config.forward_prefetch])
        if config.backward_prefetch:
            block.set_modules_to_backward_prefetch(sharded[max(0, at - config.backward_prefetch) : at][::-1])


def shard_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Split a layer over the workers of ``mesh``."""
    plan: dict[str, ParallelStyle] = {}
    for part, columns, rows in (("attention", ("q", "k", "v"), "o"), ("feed_forward", ("gate", "up"), "down")):
        plan[f"{part}_norm"] = SequenceParallel()
        plan[part] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {f"{part}.{name}": ColwiseParallel() for name in columns}
        plan[f"{part}.{rows}"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(block, mesh, plan)


def shard_root(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split embedding and head by vocabulary. They are one matrix; each worker has the same part in both."""
    assert isinstance(model, LanguageModel)
    model.register_forward_pre_hook(partial(check_text_length, mesh.size()))
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model.head.weight = model.embed.weight


def check_text_length(workers: int, _: nn.Module, inputs: tuple[Tensor]) -> None:
    """Slices of a sequence are equal; ``SequenceParallel`` assumes it. Raises ``UsageError``."""
    if (length := inputs[0].shape[1]) % workers:
        raise UsageError(f"--tp {workers} does not divide a text of {length} bytes: give another length of the samples")


def split_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Keep this worker's part of the experts, whose initial weights are the same on all workers of ``mesh``."""
    for name, weight in list(experts.named_parameters()):
        kept = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(kept))
    experts.list_weights = partial(_get_local_experts, experts.list_weights, mesh.size())  # type: ignore[method-assign]
    # A wrapper of the module would change the names of parameters.
    experts.forward = partial(_exchange_tokens, experts.forward, mesh.get_group())  # type: ignore[method-assign]


def _get_local_experts(weights: Callable[[], Sequence[Any]], workers: int) -> list[Tensor]:
    """This worker's experts. Their gradients, from the tokens of all workers of the mesh, become means over them, as
    FSDP2's over its workers. FSDP2's own divisor cannot be used: on a mesh of one worker it divides twice."""
    local: list[Tensor] = [weight.to_local() for weight in weights()]
    for each in local:
        if each.requires_grad:
            each.register_hook(lambda gradient: gradient / workers)
    return local


def _exchange_tokens(compute: Callable[..., Tensor], group: ProcessGroup, tokens: Tensor, counts: Tensor) -> Tensor:
    """Send tokens to the workers of their experts, compute, and send the results back. All counts come to the host at
    once, because each time it waits for the device."""
    leaving = counts.reshape(group.size(), -1)
    arriving = torch.empty_like(leaving)
    torch.distributed.all_to_all_single(arriving, leaving, group=group)
    leaving, arriving = torch.stack([leaving, arriving]).cpu()
    sent, received = (each.sum(1).tolist() for each in (leaving, arriving))
    answers = compute(all_to_all_single_autograd(tokens, received, sent, group), arriving)
    return all_to_all_single_autograd(answers, sent, received, group)
