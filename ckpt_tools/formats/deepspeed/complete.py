"""Whether a save of DeepSpeed has finished: every rank's files are there, by the counts that a model file states.

DeepSpeed writes ``latest`` after all ranks have saved: beside its tags, which are the checkpoints of a run, or in the
folder of a trainer that holds one tag.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from typing import Any

from ckpt_tools.core.wording import format_ranks
from ckpt_tools.formats.deepspeed.names import (
    LATEST,
    LATEST_UNIVERSAL,
    LAYER,
    MASTER_FILE,
    MODELS,
    OPTIM,
    expert_name,
    expert_optim_name,
    is_model,
    layer_name,
    numbers,
    slot_file,
)
from ckpt_tools.serialization.torch_zip import open_archive
from ckpt_tools.trainers.run_folders import get_parent_folder
from ckpt_tools.trainers.saved import SavedCheckpoint

MAX_RANKS = 1 << 24
MAX_EXPERTS = 1 << 20

_NUMBERED = re.compile(r"(\d{1,9})\..+", re.DOTALL)
_EP_SIZE = re.compile(r"ep_size_(\d{1,9})")

_Head = Mapping[Any, Any]
"""The content of a model file."""


def problem(saved: SavedCheckpoint) -> str | None:
    """Why a native checkpoint is not complete."""
    tags: dict[str, list[str]] = {}
    for path in saved.files:
        if path.endswith("_states.pt"):
            tags.setdefault(get_parent_folder(path), []).append(path.rpartition("/")[2])
    found = (text for tag, names in tags.items() if (text := _tag(saved, tag, names)) is not None)
    return next(found, None) or _latest(saved, {*tags} - {""})


def universal_problem(saved: SavedCheckpoint) -> str | None:
    """Each parameter has a folder with its fp32 values; the model's file is copied last."""
    folders = {get_parent_folder(path) for path in saved.files if slot_file(path) is not None}
    if not folders:
        return None
    bare = sorted(folder for folder in folders if f"{folder}/{MASTER_FILE}.pt" not in saved.files)
    if bare:
        return f"{bare[0]} has no fp32.pt: the conversion to universal did not finish"
    return None if any(name.endswith("_model_states.pt") for name in saved.file_names) else "no *_model_states.pt"


def is_native(saved: SavedCheckpoint) -> bool:
    return any(name.endswith("_states.pt") for name in saved.file_names) and not is_universal(saved)


def is_universal(saved: SavedCheckpoint) -> bool:
    return any(path.endswith(f"/{MASTER_FILE}.pt") for path in saved.files)


def is_shown_by_reading(saved: SavedCheckpoint) -> bool:
    """Whether only the reader sees that a layer is missing: without ZeRO the model files of a pipeline do not name the
    parameters of its layers."""
    stages = [path for path in saved.files if is_model(path.rpartition("/")[2])]
    if not stages or not any(map(LAYER.fullmatch, saved.file_names)):
        return False
    head = open_archive(*saved.get_archive_arguments(min(stages))).value
    return isinstance(head, dict) and not head.get("param_shapes")


def world_size(saved: SavedCheckpoint) -> int:
    """Number of ranks, by the names of the optimizer's files."""
    cut = numbers(saved.file_names, OPTIM)
    return (max(rank for rank, _ in cut) + 1) * (max(part for _, part in cut) + 1) if cut else 0


def _tag(saved: SavedCheckpoint, tag: str, names: list[str]) -> str | None:
    models = sorted(filter(is_model, names))
    if not models:
        return "no *_model_states.pt: the save did not finish"
    head = _head(saved, tag, models[0])
    if not isinstance(head, dict):
        return None
    dp, mp = head.get("dp_world_size"), _model_parallel_size(head)
    if type(dp) is not int or type(mp) is not int or not 0 < dp * mp <= MAX_RANKS:
        return f"{models[0]} does not state the number of ranks"
    wanted = {(r, m) for r in range(dp) for m in range(mp)}
    is_zero3 = any(name.startswith("zero_pp_rank_") for name in models)
    optims = numbers(names, OPTIM)
    is_universal = any(path.startswith(f"{tag}/zero/" if tag else "zero/") for path in saved.files)
    if any(name.startswith(("layer_", "expp_")) for name in names) or head.get("num_experts"):
        if missing := {(0, m) for m in range(mp)} - numbers(names, *MODELS):
            return f"model states of mp_rank_{min(missing)[1]:02d} are missing: the save did not finish"
        file = _missing_file(names, filter(None, (_head(saved, tag, name) for name in models)))
        if file is not None:
            return f"{file} is missing: the save did not finish"
    if is_zero3 and (missing := wanted - numbers(names, *MODELS)) and not is_universal:
        return f"model states of {_ranks(missing)} are missing: the save did not finish"
    has_zero = head.get("param_shapes") is not None and not is_universal
    if (optims or has_zero) and (missing := wanted - optims):
        return f"optimizer states of {_ranks(missing)} are missing: the save did not finish"
    return None


def _head(saved: SavedCheckpoint, tag: str, name: str) -> Any:
    return open_archive(*saved.get_archive_arguments(f"{tag}/{name}" if tag else name)).value


def _ranks(missing: Iterable[tuple[int, int]]) -> str:
    return format_ranks({rank for rank, _ in missing})


def _latest(saved: SavedCheckpoint, tags: set[str]) -> str | None:
    named = (LATEST, LATEST_UNIVERSAL)
    if tags and not any(
        f"{get_parent_folder(tag)}/{name}".lstrip("/") in saved.files for tag in tags for name in named
    ):
        return "no file latest beside the folder of the tag: the save did not finish"
    if not is_native(saved) or saved.step is None or (text := saved.read_sibling_line(LATEST)) is None:
        return None
    ours, theirs = (re.fullmatch(r"(.*?)(\d+)", name) for name in (saved.base_name, text))
    if ours is None or theirs is None or ours[1] != theirs[1] or int(ours[2]) <= int(theirs[2]):
        return None
    return f"the file latest names {text}: this save did not finish, or the run went back to that tag"


def _model_parallel_size(head: _Head) -> int | None:
    """Tensor-parallel ranks times stages of a pipeline; None if the file does not state them."""
    size, parallel = head.get("mp_world_size"), head.get("checkpoint_parallel_dimensions")
    degrees = [each for each in (parallel.values() if isinstance(parallel, dict) else ()) if type(each) is int]
    return max(size, prod(degrees)) if type(size) is int else None


def _missing_file(names: Collection[str], heads: Iterable[_Head]) -> str | None:
    """The first file of a layer or an expert that ``names`` lack; ``heads`` are all model files."""
    cuts: dict[str, set[int]] = {}
    for match in filter(None, map(LAYER.fullmatch, names)):
        cuts.setdefault(match["cut"] or "", set()).add(int(match["layer"]))
    for cut, held in cuts.items():
        if others := set().union(*cuts.values()) - held:
            return layer_name(min(others), cut)
    for head in heads:
        for name in (*_experts(head), *_expert_optimizers(head)):
            if name not in names:
                return name
        layers = _layers(head).difference(*cuts.values()) if head.get("module") is None else set()
        if layers:
            return layer_name(min(layers), min(cuts, default=""))
    return None


def _experts(head: _Head) -> Iterator[str]:
    """A file for each expert of each layer, if they are not in the model's own file."""
    counts, module = head.get("num_experts"), head.get("module")
    is_whole = isinstance(module, dict) and any(".deepspeed_experts." in str(name) for name in module)
    for layer, count in enumerate(counts if isinstance(counts, list) and not is_whole else ()):
        if type(count) is int and count <= MAX_EXPERTS:
            yield from (expert_name(layer, number) for number in range(count))


def _expert_optimizers(head: _Head) -> Iterator[str]:
    """Without ZeRO a file for each expert-parallel rank; groups of experts are called after their number."""
    found = head.get("optimizer")
    inner = found.get("optimizer_state_dict", found) if isinstance(found, dict) else {}
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    owned = [group for group in groups or () if isinstance(group, dict) and group.get("moe")]
    sizes = [int(match[1]) for group in owned if (match := _EP_SIZE.fullmatch(str(group.get("name"))))]
    yield from map(expert_optim_name, range(min(max(sizes, default=0), MAX_EXPERTS)))


def _layers(head: _Head) -> set[int]:
    """The layers of a stage that have parameters or buffers, by its names (``3.weight``)."""
    shapes = head.get("param_shapes")
    lists = [*(shapes if isinstance(shapes, list) else ()), head.get("buffer_names"), head.get("frozen_param_shapes")]
    names = (name for found in lists if isinstance(found, list | dict) for name in found)
    return {int(match[1]) for match in map(_NUMBERED.fullmatch, map(str, names)) if match}
