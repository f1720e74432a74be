"""Signs of state that is not a whole model, which a reader refuses by name wherever they are. Pure.

A reader that does not know a layout can still read each tensor of it, and would take moments for weights, or one rank's
pieces for a model. The signs are: names that only optimizers give, flat parameters of FSDP1, objects that stand for a
part of a tensor, and files that name their rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.values import GlobalRef, Opaque, OrderedDict, StorageRef, StoredTensor, Value, format_brief
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.serialization.unread_tensors import explain_unreadable
from ckpt_tools.trainers.names import match_rank_file, parse_world_size

_OPTIMIZER_SLOTS = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_inf", "momentum_buffer",
     "square_avg", "acc_delta", "grad_avg", "fp32_param", "master_param", "master_weight")
)  # fmt: skip
"""What optimizers of torch, DeepSpeed and Megatron-Core call their state; ``fp32_param`` is the latter's master,
``master_param`` that of TransformerEngine."""

_OPTIMIZER_NAME = re.compile(
    r"(?:^|\.)(?:optim|optimizers?|chained_\d+)\.(?:.*\.)?(?:state|distributed|param_groups)\."
)

FLAT_PARAMETERS = ("_flat_param", "flat_param")

_SHARDED_CLASSES = ("DTensor", "ShardedTensor", "LocalShardsWrapper")
"""Classes of ``torch.distributed`` and of Megatron-Core that hold one rank's part of a tensor."""


def is_optimizer_name(name: str) -> bool:
    """Whether names tell that a tensor of this name is optimizer state."""
    return not _OPTIMIZER_SLOTS.isdisjoint(name.split(".")) or _OPTIMIZER_NAME.search(name) is not None


def refuse_non_weights(names: Iterable[str]) -> None:
    """Raises UnsupportedError for names that are not those of weights."""
    for name in names:
        if name.rpartition(".")[2] in FLAT_PARAMETERS:
            raise UnsupportedError(
                "it is a flat parameter of FSDP1 (LOCAL_STATE_DICT), one rank's elements without the names and shapes "
                "of what they are; save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT",
                key=name,
            )
        if is_optimizer_name(name):
            raise UnsupportedError(
                "it is optimizer state by its name and lies among the weights, in a layout that is not read; save "
                "model and optimizer under keys of their own, as get_state_dict of torch gives them",
                key=name,
            )


def refuse_tensor_object(value: Any, name: str) -> None:
    """Raises UnsupportedError for a weight that is a tensor of an unsupported class."""
    reason = explain_unreadable(value)
    if reason is not None:
        raise UnsupportedError(reason, key=name)


def describe_rank_in_name(path: str) -> str | None:
    """``rank 0 of 2`` where the name of a file says that it holds the part of one of several ranks."""
    match = match_rank_file(path)
    if match is None:
        nanotron_match = _NANOTRON_RANK_SUFFIX.search(path)
        return None if nanotron_match is None else f"rank {nanotron_match[1]} of {nanotron_match[2]}"
    rank, world = int(match["rank"]), parse_world_size(match)
    return f"rank {rank}" if world is None else f"rank {rank} of {world}" if world > 1 else None


_NANOTRON_RANK_SUFFIX = re.compile(r"_(?:pp|tp|dp|exp)-(?:rank-)?(\d{1,9})-of-([2-9]|\d{2,9})(?=[_.])")

_SINGLE_RANK_FILE = re.compile(
    r"(?:model-rank-\d+-part-\d+|model\d+-mp(?!1\.)\d+|rank\d+|(?:\w+_)?tp_rank_?\d+(?:_\w+)?)\.safetensors"
)
"""Files of vLLM and SGLang (``sharded_state``), DeepSeek, TensorRT-LLM and NeuronX Distributed."""


def why_no_model(paths: Iterable[str]) -> str | None:
    """Reason why safetensors of these names are not a model: each has one rank's piece of tensors, under the names of
    whole ones. None if one of them may be a model."""
    names = [path.rpartition("/")[2] for path in paths if path.endswith(".safetensors")]
    if not names or not all(map(_SINGLE_RANK_FILE.fullmatch, names)):
        return None
    subject = "this is one part" if len(names) == 1 else f"these are {len(names):,} parts"
    return (
        f"by name {subject} of a model that tensor parallelism cut ({join_names(names)}), and no file says how; take "
        "the model that was cut"
    )


def why_delta(metadata: Any) -> str | None:
    """Reason why a folder with this ``metadata`` in its index is not a model by itself; None if it may be one."""
    if not isinstance(metadata, Mapping) or "delta_encoding" not in metadata:
        return None
    base = format_brief(metadata.get("base_version", "unknown"))
    return f"it is a delta against an earlier version: {base}; name its folder, or convert that to a model first"


def refuse_rank_part(value: Value, path: str) -> None:
    """Raises UnsupportedError where ``value``, which the file ``path`` holds, is one rank's part of a sharded state."""
    sharded_class, rank_text = find_sharded_class(value), None
    if sharded_class is not None:
        rank_text = next(filter(None, map(_describe_mesh_rank, iter_opaque_objects(value))), None)
    rank_text = rank_text or describe_rank_in_name(path) or ("one rank" if sharded_class else None)
    if rank_text is not None:
        evidence = f" ({sharded_class})" if sharded_class else ", by its name"
        raise UnsupportedError(
            f"this is {rank_text} of a sharded state{evidence}; name the folder that holds the files of all ranks",
            path=path,
        )


def refuse_rank_files(rank_files: Mapping[str, str]) -> None:
    """Raises UnsupportedError for ``rank_files`` of single ranks, which maps each to what was found in it."""
    if rank_files:
        shown = ", ".join(f"{path}: {found}" for path, found in list(rank_files.items())[:4])
        raise UnsupportedError(
            f"there are files of single ranks of a sharded state here ({shown}), and none of them is the whole model; "
            f"read them together with {format_option('from_', 'sharded')}"
        )


def find_sharded_class(value: Value) -> str | None:
    """The class of what in ``value`` is one rank's part of something, as a plural, or None."""
    class_refs = [ref for ref in iter_global_refs(value) if ref.module.startswith(("torch.distributed.", "megatron."))]
    return next((f"{ref.name}s" for ref in class_refs if ref.name in _SHARDED_CLASSES), None)


def iter_global_refs(value: Value) -> Iterator[GlobalRef]:
    """Every class, function and constant that ``value`` names."""
    return (item for item in _walk_values(value) if isinstance(item, GlobalRef))


def iter_opaque_objects(value: Value) -> Iterator[Opaque]:
    """Every object of a class that is not interpreted in ``value``."""
    return (item for item in _walk_values(value) if isinstance(item, Opaque))


def has_bare_storage(value: Value) -> bool:
    """Whether ``value`` has a storage outside of a tensor."""
    return any(isinstance(item, StorageRef) for item in _walk_values(value))


def _describe_mesh_rank(opaque: Opaque) -> str | None:
    """The rank of a ``DeviceMesh`` or of a ``ShardedTensor``'s process group, and of how many."""
    attributes = opaque.attributes
    rank, num_ranks = attributes.get("_rank", attributes.get("global_rank")), attributes.get("global_world_size")
    ranks = attributes.get("mesh", attributes.get("_rank_map"))
    if isinstance(ranks, StoredTensor):
        num_ranks = ranks.numel
    return f"rank {rank} of {num_ranks}" if type(rank) is int and type(num_ranks) is int else None


def _walk_values(value: Value) -> Iterator[Value]:
    """Everything inside ``value``, once each."""
    pending, seen_ids = [value], set[int]()
    while pending:
        item = pending.pop()
        yield item
        if isinstance(item, dict | list | tuple | set | frozenset | Opaque | StoredTensor) and id(item) not in seen_ids:
            seen_ids.add(id(item))
            pending.extend(_list_children(item))


def _list_children(item: Value) -> Iterable[Value]:
    if isinstance(item, OrderedDict):
        return (*item.keys(), *item.values(), item.attributes)
    if isinstance(item, dict):
        return (*item.keys(), *item.values())
    if isinstance(item, StoredTensor):
        return (item.wrapper, item.state)
    if isinstance(item, Opaque):
        return (item.ref, *item.args, item.kwargs, item.state, *item.items, *item.pairs)
    return item  # type: ignore[no-any-return]


_DEEPSPEED_MASTERS = ("fp32_groups", "fp32_groups_flat")
_DEEPSPEED_PARTITIONS = ("single_partition_of_fp32_groups", "fp32_flat_groups", "zero_stage")


def refuse_single_deepspeed_file(value: Value, path: str) -> None:
    """Raises UnsupportedError where a file of DeepSpeed's, opened by itself, would lose what makes it whole."""
    if not isinstance(value, dict):
        return
    optimizer, zero_state = value.get("optimizer"), value.get("optimizer_state_dict")
    if isinstance(optimizer, dict) and any(name in optimizer for name in _DEEPSPEED_MASTERS):
        raise UnsupportedError(
            "it is of a DeepSpeed run in 16 bit without ZeRO (stage 0), whose fp32 masters lie in its optimizer; open "
            f"it as what it is, with {format_option('from_', 'deepspeed')}",
            path=path,
        )
    if isinstance(zero_state, dict) and any(name in zero_state for name in _DEEPSPEED_PARTITIONS):
        raise UnsupportedError("it is one rank's file of a DeepSpeed ZeRO checkpoint; name its folder", path=path)
    if {"param", "cat_dim"} <= value.keys():
        raise UnsupportedError("it is the state of one parameter of a universal checkpoint; name its folder", path=path)
    # In stage 3 ``module`` keeps an empty tensor for each parameter that is cut.
    module_state, groups = value.get("module"), value.get("param_shapes")
    shapes = groups if isinstance(groups, list) else [groups]
    for name, shape in ((n, s) for group in shapes if isinstance(group, dict) for n, s in group.items()):
        weight = module_state.get(name) if isinstance(module_state, dict) else None
        if isinstance(weight, StoredTensor) and isinstance(shape, tuple) and tuple(weight.shape) != tuple(shape):
            raise UnsupportedError(
                f"it is one file of a DeepSpeed ZeRO checkpoint and has no elements of {name}; name the folder",
                path=path,
            )
