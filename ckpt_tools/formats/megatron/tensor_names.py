"""Names of the tensors and objects in a checkpoint of Megatron-Core.

The slots of an optimizer stand in front of the name: ``optimizer.state.exp_avg.<name>``, with ``chained_1.`` before it
where experts have an optimizer of their own (megatron-core 0.16.1, optimizer/optimizer.py, distrib_optimizer.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import MASTER

COMMON_ITEM = "common_state/shard_0_1"
"""The item of the common state since megatron-core 0.19; older versions write ``common.pt``."""

OWN_ITEM = "ckpt_tools/shard_0_1"
"""The item of ckpt-tools' own entries, which a ``torch_dist`` has no place for: a sharded object of one piece."""

MASTER_SLOTS = ("param", "fp32_param")
"""Slots of the fp32 copy of a parameter: of the distributed optimizer, and of the other (and of both up to 0.14)."""

_STATE_NAME = re.compile(r"(?:chained_(\d{1,9})\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_BUCKET_NAME = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..+", re.DOTALL)
_STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
_SINGLE_LAYER = re.compile(r"(?:^|\.)(?:de|en)coder\.layers\.\d+\.", re.ASCII)
_LOCAL_SHARD = re.compile(r"\.linear_fc1\.(?:weight|bias)_[wv]$|\.experts\.experts\.\d+\.", re.ASCII)
_STACKED_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d)")
_NUMBER = re.compile(r"\.\d+(?=\.)", re.ASCII)
_EXTRA_STATE = re.compile(r".+\._extra_state/shard_[\d.]+_[\d.]+", re.ASCII)
_IN_MODULE = re.compile(
    r"((?:.+\.)?(?:decoder|encoder|mtp)\..+?)\.(?:weight|bias|layer_norm_weight|layer_norm_bias)(?:[._][^.]+)?"
)


@dataclass(frozen=True, slots=True)
class StateName:
    """Optimizer state of the parameter ``name``; ``optimizer_number`` is the number of its optimizer, where the key
    has it."""

    name: str
    slot: str
    optimizer_number: int | None


def parse_state_name(key: str) -> StateName | None:
    """The optimizer state that ``key`` names; None if it names none."""
    match = _STATE_NAME.fullmatch(key)
    if match is None:
        return None
    slot = MASTER if match[2] in MASTER_SLOTS else match[2]
    return StateName(match[3], slot, int(match[1]) if match[1] is not None else None)


def is_bucket_state(key: str) -> bool:
    """Whether ``key`` is state in the distributed optimizer's own buffers: of ``dp_reshardable`` each is a tensor, of
    ``dp_zero_gather_scatter`` all are one object."""
    return _BUCKET_NAME.fullmatch(key) is not None


def find_content_flags(names: Iterable[str]) -> dict[str, bool]:
    """Flags of ``content_metadata`` with which Megatron's modules declare their tensors under these names. Megatron-LM
    and Megatron-Bridge pass them to the modules.

    Source: megatron-core 0.16.1, ``transformer/transformer_block.py``, ``transformer/mlp.py`` and
    ``transformer/moe/experts.py``, ``sharded_state_dict``.
    """
    names = list(names)
    patterns = {"non_homogeneous_layers": _SINGLE_LAYER, "singleton_local_shards": _LOCAL_SHARD}
    return {flag: any(map(pattern.search, names)) for flag, pattern in patterns.items()}


def is_expert_bias(name: str) -> bool:
    """Whether it is a router's correction bias: a buffer that stays fp32 in a model of 16 bits.

    Source: megatron-core 0.16.1, ``transformer/moe/router.py``, ``_maintain_float32_expert_bias``.
    """
    return name.endswith(".router.expert_bias")


def is_expert(name: str) -> bool:
    """Whether it is a parameter of an expert, which expert parallelism distributes. Shared experts are not."""
    return ".experts." in f".{name}"


def count_dims(name: str, stored_dims: int) -> int:
    """Dims of the parameter itself; ``stored_dims`` counts the layers and experts that are stacked in front as well."""
    return stored_dims - (_STACKED_LAYERS.search(name) is not None) - (_STACKED_EXPERTS.search(f".{name}") is not None)


def is_extra_state_item(name: str) -> bool:
    """Whether it names a piece of the object in which a module keeps what is not a tensor, such as scales of fp8."""
    return _EXTRA_STATE.fullmatch(name) is not None


def strip_numbers(name: str) -> str:
    """The module of such an object without the numbers of layers and experts, which not all forms have."""
    return _NUMBER.sub("", name.partition("/")[0])


def list_extra_states(weights: Mapping[str, Shape]) -> list[str]:
    """The pieces of such objects that modules with these weights may ask for when they load: one for each layer, and
    each expert. Attention has one, without any weight.

    Source: megatron-core 0.16.1, ``transformer/utils.py``, ``make_sharded_object_for_checkpoint``.
    """
    grid_by_module: dict[str, Shape] = {}
    for name, shape in weights.items():
        match = _IN_MODULE.fullmatch(name)
        if match is not None:
            grid_by_module[match[1]] = shape[: len(shape) - count_dims(name, len(shape))]
    if "decoder.final_norm" in grid_by_module and "output_layer.weight" in weights:
        # Of hybrid models; GPTModel asks for none of its head.
        grid_by_module["output_layer"] = ()
    attention = {
        f"{module.removesuffix('linear_proj')}core_attention": grid
        for module, grid in grid_by_module.items()
        if module.endswith(".linear_proj")
    }
    return [
        f"{module}._extra_state/shard_{'.'.join(map(str, at)) or 0}_{'.'.join(map(str, grid)) or 1}"
        for module, grid in (grid_by_module | attention).items()
        for at in product(*map(range, grid))
    ]
