"""Small ZeRO checkpoints made by hand after docs/formats/deepspeed.md, for tests that break one rule at a time.

``build`` gives the dictionaries of every file, which a test changes as it likes; ``store_of`` saves them with torch.
The values are counted up, so that each element of a checkpoint is told from every other.
"""

import io
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from ckpt_tools.stores.memory import MemoryStore

TAG = "global_step7"
MODEL = f"{TAG}/mp_rank_00_model_states.pt"

Files = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


def rank_model(rank: int) -> str:
    return f"{TAG}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def optim(rank: int) -> str:
    return f"{TAG}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def own(files: Files, rank: int = 0) -> dict[str, Any]:
    return files[optim(rank)]["optimizer_state_dict"]


def values_of(groups: Iterable[Shapes], first: int = 0) -> dict[str, Tensor]:
    """fp32 tensors of these shapes, their elements counted up through all of them."""
    found = {}
    for name, shape in [item for group in groups for item in group.items()]:
        found[name] = torch.arange(first, first + prod(shape), dtype=torch.float32).reshape(shape)
        first += prod(shape)
    return found


def moments_of(groups: Iterable[Shapes]) -> dict[str, Tensor]:
    return values_of(groups, first=10_000)


def build(stage: int, world_size: int, groups: list[Shapes], frozen: Shapes | None = None) -> Files:
    """Masters, one slot ``exp_avg`` and a step; weights in bf16; one buffer; ``latest``."""
    files: Files = {"latest": TAG}
    for rank in range(world_size):
        files[optim(rank)] = {
            "optimizer_state_dict": _optimizer(stage, rank, world_size, groups),
            "ds_version": "0.19.8",
        }
    if stage < 3:
        files[MODEL] = _model(stage, 0, world_size, groups, frozen or {})
    else:
        files |= {rank_model(rank): _model(3, rank, world_size, groups, frozen or {}) for rank in range(world_size)}
    return files


def _model(stage: int, rank: int, world_size: int, groups: list[Shapes], frozen: Shapes) -> dict[str, Any]:
    weights = {name: tensor.bfloat16() for name, tensor in values_of([*groups, frozen]).items()}
    pieces = {name: _cut(weights[name], world_size, rank) if stage == 3 else weights[name] for name in frozen}
    empty = torch.empty(0, dtype=torch.bfloat16)
    return {
        "module": OrderedDict({n: empty if stage == 3 else t for n, t in weights.items()}, count=torch.tensor([3, 4])),
        "buffer_names": ["count"],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in groups],
        "frozen_param_shapes": {name: torch.Size(shape) for name, shape in frozen.items()} if stage > 1 else None,
        "frozen_param_fragments": pieces if stage > 1 else None,
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": 7,
        "skipped_steps": 0,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
    }


def _optimizer(stage: int, rank: int, world_size: int, groups: list[Shapes]) -> dict[str, Any]:
    flat = _stage3_flats if stage == 3 else _even_flats
    masters = flat(values_of(groups), groups, rank, world_size)
    moments = flat(moments_of(groups), groups, rank, world_size)
    numel = [sum(map(prod, group.values())) for group in groups]
    lean = [max(0, min(len(m), n - rank * len(m))) for m, n in zip(masters, numel, strict=True)]
    state = {i: {"step": torch.tensor(7.0), "exp_avg": moment} for i, moment in enumerate(moments)}
    torch_state = {"state": state, "param_groups": [{"lr": 0.1 * i, "params": [i]} for i in range(len(groups))]}
    if stage == 3:
        return {
            "zero_stage": 3,
            "partition_count": world_size,
            "optimizer_state_dict": torch_state,
            "fp32_flat_groups": masters,
        }
    return {
        "zero_stage": stage,
        "partition_count": [world_size] * len(groups),
        "base_optimizer_state": torch_state,
        "single_partition_of_fp32_groups": [m[:n].clone() for m, n in zip(masters, lean, strict=True)],
        "group_paddings": [len(m) - n for m, n in zip(masters, lean, strict=True)],
    }


def _even_flats(values: Mapping[str, Tensor], groups: list[Shapes], rank: int, world_size: int) -> list[Tensor]:
    """A rank's part of each flattened group, padded to a multiple of twice the world size."""
    found = []
    for group in groups:
        flat = torch.cat([values[name].flatten() for name in group])
        size = 2 * ceil(len(flat) / (2 * world_size))
        padded = torch.cat([flat, flat.new_zeros(size * world_size - len(flat))])
        found.append(padded[rank * size : (rank + 1) * size].clone())
    return found


def _stage3_flats(values: Mapping[str, Tensor], groups: list[Shapes], rank: int, world_size: int) -> list[Tensor]:
    """A rank's cuts of each parameter, one sub-group after the other."""
    return [torch.cat([_cut(values[name], world_size, rank) for name in group]) for group in groups]


def _cut(value: Tensor, world_size: int, rank: int) -> Tensor:
    size = ceil(value.numel() / world_size)
    padded = torch.cat([value.flatten(), value.new_zeros(size * world_size - value.numel())])
    return padded[rank * size : (rank + 1) * size].clone()


def store_of(files: Files) -> MemoryStore:
    """Dictionaries as torch saves them, text and bytes as they are."""
    return MemoryStore({path: bytearray(_saved(content)) for path, content in files.items()})


def _saved(content: Any) -> bytes:
    if isinstance(content, str | bytes):
        return content.encode() if isinstance(content, str) else content
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()
