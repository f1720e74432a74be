"""Whether a save of DeepSpeed has finished: every rank's files are there, by the counts that a model file states.

DeepSpeed writes ``latest`` after all ranks have saved: beside its tags, which are the checkpoints of a run, or in the
folder of a trainer that holds one tag.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ckpt_tools.formats.deepspeed.common.model_file import count_model_parts
from ckpt_tools.formats.deepspeed.names import (
    LATEST,
    LATEST_UNIVERSAL,
    LAYER_FILE,
    MAX_EXPERTS,
    MODEL_FILES,
    OPTIM_FILE,
    UNIVERSAL_MASTER_SLOT,
    expert_file_name,
    expert_optim_file_name,
    is_model_file_name,
    layer_file_name,
    match_slot_file,
    parse_rank_pairs,
)
from ckpt_tools.messages.wording import format_ranks
from ckpt_tools.serialization.torch_zip import open_archive
from ckpt_tools.trainers.saved import SavedCheckpoint, get_parent_folder

MAX_RANKS = 1 << 24

_LAYER_PARAMETER = re.compile(r"(\d{1,9})\..+", re.DOTALL)
_EXPERT_GROUP_NAME = re.compile(r"ep_size_(\d{1,9})")

_ModelContent = Mapping[Any, Any]
"""The content of a model file."""


def find_native_problem(checkpoint: SavedCheckpoint) -> str | None:
    """Why a native checkpoint is not complete; None if it is."""
    names_by_tag: dict[str, list[str]] = {}
    for path in checkpoint.files:
        if path.endswith("_states.pt"):
            names_by_tag.setdefault(get_parent_folder(path), []).append(path.rpartition("/")[2])
    for tag, names in names_by_tag.items():
        if (problem := _find_tag_problem(checkpoint, tag, names)) is not None:
            return problem
    return _find_latest_problem(checkpoint, {*names_by_tag} - {""})


def find_universal_problem(checkpoint: SavedCheckpoint) -> str | None:
    """Why a universal checkpoint is not complete; None if it is. Each parameter has a folder with its fp32 values; the
    model's file is copied last."""
    folders = {get_parent_folder(path) for path in checkpoint.files if match_slot_file(path) is not None}
    if not folders:
        return None
    master = f"{UNIVERSAL_MASTER_SLOT}.pt"
    if lacking := sorted(folder for folder in folders if f"{folder}/{master}" not in checkpoint.files):
        return f"{lacking[0]} has no fp32.pt: the conversion to universal did not finish"
    return None if any(name.endswith("_model_states.pt") for name in checkpoint.file_names) else "no *_model_states.pt"


def has_native_files(checkpoint: SavedCheckpoint) -> bool:
    return any(name.endswith("_states.pt") for name in checkpoint.file_names) and not has_universal_files(checkpoint)


def has_universal_files(checkpoint: SavedCheckpoint) -> bool:
    return any(path.endswith(f"/{UNIVERSAL_MASTER_SLOT}.pt") for path in checkpoint.files)


def needs_reader_check(checkpoint: SavedCheckpoint) -> bool:
    """Whether the reader alone can tell that a layer is missing: without ZeRO the model files of a pipeline do not name
    the parameters of its layers."""
    model_paths = [path for path in checkpoint.files if is_model_file_name(path.rpartition("/")[2])]
    if not model_paths or not any(map(LAYER_FILE.fullmatch, checkpoint.file_names)):
        return False
    model_content = open_archive(*checkpoint.get_archive_arguments(min(model_paths))).value
    return isinstance(model_content, dict) and not model_content.get("param_shapes")


def count_ranks(checkpoint: SavedCheckpoint) -> int:
    """Number of ranks, by the names of the optimizer's files; 0 if there are none."""
    rank_pairs = parse_rank_pairs(checkpoint.file_names, OPTIM_FILE)
    return (max(rank for rank, _ in rank_pairs) + 1) * (max(part for _, part in rank_pairs) + 1) if rank_pairs else 0


def _find_tag_problem(checkpoint: SavedCheckpoint, tag: str, names: list[str]) -> str | None:
    """The first kind of files that the folder ``tag`` has not all of: model files, files of layers and experts, ranks'
    model files (stage 3), optimizer files. A folder that was converted to universal, with ``zero/`` in it, needs no
    ranks' model files, and of optimizer files none or all."""
    model_names = sorted(filter(is_model_file_name, names))
    if not model_names:
        return "no *_model_states.pt: the save did not finish"
    model_content = _read_model_content(checkpoint, tag, model_names[0])
    if not isinstance(model_content, dict):
        return None
    dp_size, mp_size = model_content.get("dp_world_size"), count_model_parts(model_content)
    states_mp_size = type(model_content.get("mp_world_size")) is int
    if type(dp_size) is not int or not states_mp_size or not 0 < dp_size * mp_size <= MAX_RANKS:
        return f"{model_names[0]} does not state the number of ranks"
    expected_ranks = {(r, m) for r in range(dp_size) for m in range(mp_size)}
    is_zero3 = any(name.startswith("zero_pp_rank_") for name in model_names)
    optim_ranks = parse_rank_pairs(names, OPTIM_FILE)
    has_universal_folder = any(path.startswith(f"{tag}/zero/" if tag else "zero/") for path in checkpoint.files)
    if any(name.startswith(("layer_", "expp_")) for name in names) or model_content.get("num_experts"):
        if missing_ranks := {(0, m) for m in range(mp_size)} - parse_rank_pairs(names, *MODEL_FILES):
            return f"model states of mp_rank_{min(missing_ranks)[1]:02d} are missing: the save did not finish"
        model_contents = filter(None, (_read_model_content(checkpoint, tag, name) for name in model_names))
        if (missing_file := _find_missing_file(names, model_contents)) is not None:
            return f"{missing_file} is missing: the save did not finish"
    missing_ranks = expected_ranks - parse_rank_pairs(names, *MODEL_FILES)
    if is_zero3 and missing_ranks and not has_universal_folder:
        return f"model states of {_format_ranks(missing_ranks)} are missing: the save did not finish"
    has_zero = model_content.get("param_shapes") is not None and not has_universal_folder
    if (optim_ranks or has_zero) and (missing_ranks := expected_ranks - optim_ranks):
        return f"optimizer states of {_format_ranks(missing_ranks)} are missing: the save did not finish"
    return None


def _read_model_content(checkpoint: SavedCheckpoint, tag: str, name: str) -> Any:
    return open_archive(*checkpoint.get_archive_arguments(f"{tag}/{name}" if tag else name)).value


def _format_ranks(rank_pairs: Iterable[tuple[int, int]]) -> str:
    return format_ranks({rank for rank, _ in rank_pairs})


def _find_latest_problem(checkpoint: SavedCheckpoint, tags: set[str]) -> str | None:
    """Whether the file ``latest`` is missing, or names a tag of the same run with a lower number."""
    latest_files = (LATEST, LATEST_UNIVERSAL)
    places = {f"{get_parent_folder(tag)}/{name}".lstrip("/") for tag in tags for name in latest_files}
    if tags and places.isdisjoint(checkpoint.files):
        return "no file latest beside the folder of the tag: the save did not finish"
    if not has_native_files(checkpoint) or checkpoint.step is None:
        return None
    if (latest_tag := checkpoint.read_sibling_line(LATEST)) is None:
        return None
    own, latest = (re.fullmatch(r"(.*?)(\d+)", name) for name in (checkpoint.base_name, latest_tag))
    if own is None or latest is None or own[1] != latest[1] or int(own[2]) <= int(latest[2]):
        return None
    return f"the file latest names {latest_tag}: this save did not finish, or the run went back to that tag"


def _find_missing_file(names: Collection[str], model_contents: Iterable[_ModelContent]) -> str | None:
    """The first file of a layer or an expert that ``names`` lack; ``model_contents`` are those of all model files."""
    # Each tensor-parallel rank has files of the same layers.
    layers_by_suffix: dict[str, set[int]] = {}
    for match in filter(None, map(LAYER_FILE.fullmatch, names)):
        layers_by_suffix.setdefault(match["cut"] or "", set()).add(int(match["layer"]))
    for tp_suffix, saved_layers in layers_by_suffix.items():
        if layers_elsewhere := set().union(*layers_by_suffix.values()) - saved_layers:
            return layer_file_name(min(layers_elsewhere), tp_suffix)
    for model_content in model_contents:
        for name in (*_list_expert_files(model_content), *_list_expert_optim_files(model_content)):
            if name not in names:
                return name
        missing_layers = _list_layers(model_content).difference(*layers_by_suffix.values())
        if model_content.get("module") is None and missing_layers:
            return layer_file_name(min(missing_layers), min(layers_by_suffix, default=""))
    return None


def _list_expert_files(model_content: _ModelContent) -> Iterator[str]:
    """Names of the files of all experts, one an expert of a layer; none if the model's file has experts."""
    counts, module = model_content.get("num_experts"), model_content.get("module")
    has_experts_in_module = isinstance(module, dict) and any(".deepspeed_experts." in str(name) for name in module)
    for layer, count in enumerate(counts if isinstance(counts, list) and not has_experts_in_module else ()):
        if type(count) is int and count <= MAX_EXPERTS:
            yield from (expert_file_name(layer, number) for number in range(count))


def _list_expert_optim_files(model_content: _ModelContent) -> Iterator[str]:
    """Names of the optimizer's files of a run without ZeRO, one an expert-parallel rank. The param groups of experts
    are called after the number of these ranks."""
    optimizer = model_content.get("optimizer")
    state_dict = optimizer.get("optimizer_state_dict", optimizer) if isinstance(optimizer, dict) else {}
    groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    names = [str(group.get("name")) for group in groups or () if isinstance(group, dict) and group.get("moe")]
    sizes = [int(match[1]) for name in names if (match := _EXPERT_GROUP_NAME.fullmatch(name))]
    yield from map(expert_optim_file_name, range(min(max(sizes, default=0), MAX_EXPERTS)))


def _list_layers(model_content: _ModelContent) -> set[int]:
    """Numbers of a stage's layers that have parameters or buffers, by the names of these (``3.weight``)."""
    param_shapes = model_content.get("param_shapes")
    name_lists = [model_content.get("buffer_names"), model_content.get("frozen_param_shapes")]
    name_lists += param_shapes if isinstance(param_shapes, list) else ()
    names = (name for found in name_lists if isinstance(found, list | dict) for name in found)
    return {int(match[1]) for match in map(_LAYER_PARAMETER.fullmatch, map(str, names)) if match}
