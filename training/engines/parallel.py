"""Device meshes of a run, and sharding of a model over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from ..config.options import Precision
from ..config.train_config import TrainConfig
from ..models.zoo import ModelSpec
from .base import DTYPES
from .blocks import build, prepare
from .expert_parallel import experts_of, split_experts
from .pipeline import build_stage
from .tensor_parallel import shard_block, shard_root

SHARD = "shard"
REPLICATE = "replicate"
TENSOR = "tp"
PIPELINE = "pp"
EXPERT = "ep"


@dataclass(frozen=True, slots=True)
class Meshes:
    """Meshes of workers: with different samples (``data``), with parts of each layer (``tensor``), with the stages of a
    pipeline, with the same experts, and with all experts together."""

    data: DeviceMesh
    tensor: DeviceMesh | None
    pipeline: DeviceMesh | None = None
    same_experts: DeviceMesh | None = None
    all_experts: DeviceMesh | None = None

    @property
    def data_rank(self) -> int:
        """Number of this rank's share of the samples."""
        return torch.distributed.get_rank() // (1 if self.tensor is None else self.tensor.size()) % self.data.size()


def meshes_of(config: TrainConfig, device: torch.device) -> Meshes:
    """Stages are outermost, then replicas; tensor and expert parallelism are innermost, so that their many messages
    stay on one machine."""
    workers = torch.distributed.get_world_size() // config.pp
    data, tensor, pipeline = _mesh(config, device, _shard_size(config, workers // config.tp), {TENSOR: config.tp})
    if config.ep == 1:
        return Meshes(data, tensor, pipeline)
    shard_size = max(_shard_size(config, workers) // config.ep, 1)
    same_experts, all_experts, _ = _mesh(config, device, shard_size, {EXPERT: config.ep})
    return Meshes(data, tensor, pipeline, same_experts, all_experts)


def _mesh(
    config: TrainConfig, device: torch.device, shard_size: int, inner: dict[str, int]
) -> tuple[DeviceMesh, DeviceMesh | None, DeviceMesh | None]:
    """Mesh for FSDP2, mesh of the inner dimension and mesh of stages, if there are any."""
    [(name, size)] = inner.items()
    workers = torch.distributed.get_world_size() // (size * config.pp)
    replicated = config.sharding.in_groups or config.sharding.stage == 0
    dims = ({PIPELINE: config.pp} if config.pp > 1 else {}) | ({REPLICATE: workers // shard_size} if replicated else {})
    dims |= {SHARD: shard_size} | (inner if size > 1 else {})
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    data = mesh[(REPLICATE, SHARD)] if replicated else mesh[SHARD]
    neighbours, pipeline = (mesh[each] if each in dims else None for each in (name, PIPELINE))
    return data, neighbours, pipeline


def _shard_size(config: TrainConfig, workers: int) -> int:
    return 1 if config.sharding.stage == 0 else config.shard_size or workers


def parallel_model(config: TrainConfig, spec: ModelSpec, meshes: Meshes, device: torch.device) -> nn.Module:
    """The model with the weights of the seed, sharded; with a pipeline, this rank's stage of it."""
    if config.sharding.name == "ddp":
        return _replicated(config, spec, device)
    options = _options(config, meshes.data)

    def on_block(block: nn.Module) -> None:
        block.to(device)
        if meshes.tensor is not None:
            shard_block(block, meshes.tensor)
        if meshes.all_experts is not None:
            _shard_experts(config, block, meshes)
        prepare(config, block)
        fully_shard(block, **options, reshard_after_forward=_reshards(config))

    if meshes.pipeline is None:
        model = build(config, spec, on_block).to(device)
    else:
        model = build_stage(config, spec, meshes.pipeline.get_local_rank(), on_block).to(device)
    if meshes.tensor is not None:
        shard_root(model, meshes.tensor)
    fully_shard(model, **options)
    _prefetch(config, spec.blocks_of(model))
    return model


def _shard_experts(config: TrainConfig, block: nn.Module, meshes: Meshes) -> None:
    """Split the experts over workers, and shard them over workers with the same ones: by rows if these divide evenly,
    because experts are few."""
    experts, same = experts_of(block), meshes.same_experts
    if experts is None:
        return
    assert same is not None and meshes.all_experts is not None
    split_experts(experts, meshes.all_experts)
    rows = Shard(1) if all(one.shape[1] % same.size(-1) == 0 for one in experts.parameters()) else None
    fully_shard(
        experts,
        **_options(config, same),
        reshard_after_forward=_reshards(config),
        shard_placement_fn=lambda _: rows,
    )


def _replicated(config: TrainConfig, spec: ModelSpec, device: torch.device) -> nn.Module:
    """DDP. With ``find_unused_parameters`` the gradient buckets keep their order. Otherwise DDP reorders them after the
    first step of a run, and a resumed run would sum in another order.
    """
    model = build(config, spec, lambda block: prepare(config, block)).to(device)
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, find_unused_parameters=True)


def _options(config: TrainConfig, mesh: DeviceMesh) -> dict[str, Any]:
    on_cuda = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_cuda) if config.cpu_offload else OffloadPolicy()
    return {"mesh": mesh, "mp_policy": precision_policy(config.precision), "offload_policy": offload}


def _reshards(config: TrainConfig) -> bool | int:
    return config.reshard_after_forward or config.sharding.stage == 3


def precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    """bf16 and fp16 compute in 16 bits, with float32 parameters and gradient reduction."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)


def _prefetch(config: TrainConfig, blocks: list[nn.Module]) -> None:
    """Gather the parameters of the following blocks during the computation of one."""
    sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for at, block in enumerate(sharded):
        if config.forward_prefetch:
            block.set_modules_to_forward_prefetch(sharded[at + 1 : at + 1 + config.forward_prefetch])
        if config.backward_prefetch:
            block.set_modules_to_backward_prefetch(sharded[max(0, at - config.backward_prefetch) : at][::-1])
