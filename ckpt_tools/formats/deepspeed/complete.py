"""Whether a save of DeepSpeed has finished: every rank's files are there, by the counts that a model file states.

DeepSpeed writes ``latest`` after all ranks have saved: beside its tags, which are the checkpoints of a run, or in the
folder of a trainer that holds one tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ckpt_tools.core.run_folders import parent_of
from ckpt_tools.core.wording import of_ranks
from ckpt_tools.formats.deepspeed.common.tag_files import is_layer, model_parallel_size
from ckpt_tools.formats.deepspeed.common.tag_files import missing as missing_file
from ckpt_tools.serialization.torch_zip import open_archive
from ckpt_tools.trainers.saved import Saved

MAX_RANKS = 1 << 24

_MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_STATE = re.compile(r"(?:^|.*/)zero/[^/]+/[^/]+\.pt")


def problem(saved: Saved) -> str | None:
    """Why a native checkpoint is not complete."""
    tags: dict[str, list[str]] = {}
    for path in saved.files:
        if path.endswith("_states.pt"):
            tags.setdefault(parent_of(path), []).append(path.rpartition("/")[2])
    found = (text for tag, names in tags.items() if (text := _tag(saved, tag, names)) is not None)
    return next(found, None) or _latest(saved, {*tags} - {""})


def universal_problem(saved: Saved) -> str | None:
    """Each parameter has a folder with its fp32 values; the model's file is copied last."""
    folders = {parent_of(path) for path in saved.files if _STATE.fullmatch(path)}
    if not folders:
        return None
    bare = sorted(folder for folder in folders if f"{folder}/fp32.pt" not in saved.files)
    if bare:
        return f"{bare[0]} has no fp32.pt: the conversion to universal did not finish"
    return None if any(name.endswith("_model_states.pt") for name in saved.names) else "no *_model_states.pt"


def is_native(saved: Saved) -> bool:
    return any(name.endswith("_states.pt") for name in saved.names) and not is_universal(saved)


def is_universal(saved: Saved) -> bool:
    return any(path.endswith("/fp32.pt") for path in saved.files)


def is_shown_by_reading(saved: Saved) -> bool:
    """Whether only the reader sees that a layer is missing: without ZeRO the model files of a pipeline do not name the
    parameters of its layers."""
    stages = [path for path in saved.files if _MODEL_STATES.fullmatch(path.rpartition("/")[2])]
    if not stages or not any(is_layer(path.rpartition("/")[2]) for path in saved.files):
        return False
    head = open_archive(*saved.part(min(stages))).value
    return isinstance(head, dict) and not head.get("param_shapes")


def world_size(saved: Saved) -> int | None:
    """Number of ranks, by the names of the optimizer's files."""
    cut = _numbers((path.rpartition("/")[2] for path in saved.files), _OPTIM_STATES)
    return (max(rank for rank, _ in cut) + 1) * (max(part for _, part in cut) + 1) if cut else None


def _tag(saved: Saved, tag: str, names: list[str]) -> str | None:
    models = sorted(name for name in names if _MODEL_STATES.fullmatch(name))
    if not models:
        return "no *_model_states.pt: the save did not finish"
    head = _head(saved, tag, models[0])
    if not isinstance(head, dict):
        return None
    dp, mp = head.get("dp_world_size"), model_parallel_size(head)
    if type(dp) is not int or type(mp) is not int or not 0 < dp * mp <= MAX_RANKS:
        return f"{models[0]} does not state the number of ranks"
    wanted = {(r, m) for r in range(dp) for m in range(mp)}
    is_zero3 = any(name.startswith("zero_pp_rank_") for name in models)
    optims = _numbers(names, _OPTIM_STATES)
    is_universal = any(path.startswith(f"{tag}/zero/" if tag else "zero/") for path in saved.files)
    if any(name.startswith(("layer_", "expp_")) for name in names) or head.get("num_experts"):
        if missing := {(0, m) for m in range(mp)} - _numbers(names, _MODEL_STATES):
            return f"model states of mp_rank_{min(missing)[1]:02d} are missing: the save did not finish"
        file = missing_file(names, filter(None, (_head(saved, tag, name) for name in models)))
        if file is not None:
            return f"{file} is missing: the save did not finish"
    if is_zero3 and (missing := wanted - _numbers(names, _MODEL_STATES)) and not is_universal:
        return f"model states of {_ranks(missing)} are missing: the save did not finish"
    has_zero = head.get("param_shapes") is not None and not is_universal
    if (optims or has_zero) and (missing := wanted - optims):
        return f"optimizer states of {_ranks(missing)} are missing: the save did not finish"
    return None


def _head(saved: Saved, tag: str, name: str) -> Any:
    return open_archive(*saved.part(f"{tag}/{name}" if tag else name)).value


def _numbers(names: Iterable[str], form: re.Pattern[str]) -> set[tuple[int, int]]:
    return {(int(match[1] or 0), int(match[2])) for name in names if (match := form.fullmatch(name))}


def _ranks(missing: Iterable[tuple[int, int]]) -> str:
    return of_ranks({rank for rank, _ in missing})


def _latest(saved: Saved, tags: set[str]) -> str | None:
    named = {"latest", "latest_universal"}
    if tags and not any(f"{parent_of(tag)}/{name}".lstrip("/") in saved.files for tag in tags for name in named):
        return "no file latest beside the folder of the tag: the save did not finish"
    if not is_native(saved) or saved.step is None or (text := saved.text_beside("latest")) is None:
        return None
    ours, theirs = (re.fullmatch(r"(.*?)(\d+)", name) for name in (saved.title, text))
    if ours is None or theirs is None or ours[1] != theirs[1] or int(ours[2]) <= int(theirs[2]):
        return None
    return f"the file latest names {text}: this save did not finish, or the run went back to that tag"
