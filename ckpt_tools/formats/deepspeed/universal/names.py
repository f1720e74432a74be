"""Where the files of a universal checkpoint lie, from their names alone.

A tag folder holds ``zero/<fqn>/<slot>.pt`` for each parameter, ``zero/optimizer_state.pt``, and the model's files;
``latest_universal`` beside it names the tag. deepspeed/checkpoint/ds_to_universal.py and engine.py ``load_checkpoint``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from ckpt_tools.core.wording import natural
from ckpt_tools.errors import IncompleteError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.tags import choose_tag
from ckpt_tools.stores.source import Source

LATEST = "latest_universal"

MODEL_NAME = "mp_rank_00_model_states.pt"
"""What stages 1 and 2 open, engine.py ``_get_ckpt_name``."""

STAGE3_MODEL_NAME = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""What stage 3 opens on every rank."""

OPTIMIZER_NAME = "zero/optimizer_state.pt"

MASTER_FILE = "fp32"
"""The file of a parameter's fp32 master, and the one that every parameter has; without its suffix."""

_SLOTS = (MASTER_FILE, "exp_avg", "exp_avg_sq", "step")
"""The files that ``ds_to_universal`` makes of every parameter."""

_STATE = re.compile(r"(?:(?P<folder>.+?)/)??zero/(?P<fqn>.+)/(?P<slot>[^/]+)\.pt", re.DOTALL)
_MODEL = re.compile(r"mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
_RANK_MODEL = re.compile(r"zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
_NATIVE = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|.*optim_states\.pt")
_FOREIGN = {
    re.compile(r"(layer_\d+_)?expert_.*|expp_rank_.*"): "experts (mixture of experts)",
    re.compile(r"layer_\d+[-_].*"): "files of a pipeline's layers",
}


@dataclass(frozen=True, slots=True)
class UniversalFiles:
    """The files of one checkpoint: ``states`` by fqn and slot, and the model's, one or in stage 3 one a rank.

    ``model_parts`` are the model's files of the other tensor-parallel ranks, one each. ``tag`` is empty where the
    folder is the source itself.
    """

    tag: str
    states: Mapping[str, Mapping[str, str]]
    model: tuple[str, ...]
    optimizer: str
    model_parts: tuple[str, ...] = ()


def universal_folders(paths: Iterable[str]) -> list[str]:
    """The folders that hold universal checkpoints, in the order of their names; ``""`` is the source itself."""
    found = {match["folder"] or "" for path in paths if (match := _state(path)) and match["slot"] == MASTER_FILE}
    return sorted(found, key=natural)


def _state(path: str) -> re.Match[str] | None:
    # Where no slot follows, the pattern would try every way to cut the path first.
    return _STATE.fullmatch(path) if path.endswith(".pt") and not path.endswith("/.pt") else None


def is_universal(paths: Iterable[str]) -> bool:
    """Whether there are universal checkpoints and no native ones.

    ``ds_to_universal`` writes beside the checkpoint that it converts; the folder is then a native one.
    """
    paths = list(paths)
    folders = set(universal_folders(paths))
    return bool(folders) and not any(_is_native(path, folders) for path in paths)


def _is_native(path: str, universal: set[str]) -> bool:
    folder, _, name = path.rpartition("/")
    return folder not in universal and _NATIVE.fullmatch(name) is not None


def choose_folder(source: Source, tag: str | None) -> str:
    """The folder of ``tag``, or of the checkpoint that ``latest_universal`` points to."""
    return choose_tag(source, tag, universal_folders(source.files), latest=LATEST, what="universal checkpoint")


def universal_files(source: Source, folder: str) -> UniversalFiles:
    """The files of the checkpoint in ``folder``.

    Raises:
        UnsupportedError: it is of a kind of parallelism that is not read; IncompleteError: the model's file, or that of
        a rank, is missing.
    """
    prefix = f"{folder}/" if folder else ""
    inside = [path for path in source.files if path.startswith(prefix)]
    names = [path.removeprefix(prefix) for path in inside]
    _refuse_foreign(names, folder)
    states: dict[str, dict[str, str]] = {}
    for path in inside:
        match = _state(path)
        if match and (match["folder"] or "") == folder:
            states.setdefault(match["fqn"], {})[match["slot"]] = path
    models = _models(names, prefix)
    return UniversalFiles(
        folder.rpartition("/")[2], states, models, prefix + OPTIMIZER_NAME, _model_parts(names, prefix)
    )


def own_files(paths: Iterable[str], files: UniversalFiles, folder: str, used: Container[str]) -> frozenset[str]:
    """The files of the checkpoint in ``folder``; none where nothing in the source itself says that it is the one.

    ``used`` are the files that hold its tensors, and the names of its parameters and buffers: of the latter
    DeepSpeed leaves copies in ``zero/``.
    """
    found = set(paths)
    if folder and LATEST not in found:
        return frozenset()
    prefix = f"{folder}/" if folder else ""
    models = {path for path in found if path.startswith(prefix) and _is_model(path.removeprefix(prefix))}
    states = {
        path
        for fqn, slots in files.states.items()
        for slot, path in slots.items()
        if path in used or (fqn in used and slot in _SLOTS)
    }
    beside = {LATEST} if folder else set()
    return frozenset(models | states | (found & {files.optimizer, *beside}))


def _is_model(name: str) -> bool:
    return _MODEL.fullmatch(name) is not None or _RANK_MODEL.fullmatch(name) is not None


def _refuse_foreign(names: list[str], folder: str) -> None:
    place = f"the tag {folder!r}" if folder else "the folder"
    for name in names:
        for pattern, what in _FOREIGN.items():
            if pattern.fullmatch(name):
                raise UnsupportedError(f"{place} holds {what} ({name}), which are not supported")


def _models(names: list[str], prefix: str) -> tuple[str, ...]:
    """The file of all ranks if there is one, for it has the weights; else that of each rank."""
    if MODEL_NAME in names:
        return (prefix + MODEL_NAME,)
    matches = [(name, match) for name in names if (match := _RANK_MODEL.fullmatch(name))]
    ranks = {int(match["rank"]): name for name, match in matches if not int(match["mp"])}
    for rank in range(max(1, len(ranks))):
        if rank not in ranks:
            missing = STAGE3_MODEL_NAME.replace("rank_0", f"rank_{rank}", 1) if ranks else MODEL_NAME
            raise IncompleteError("this file of the checkpoint is missing", path=prefix + missing)
    return tuple(prefix + ranks[rank] for rank in range(len(ranks)))


def _model_parts(names: list[str], prefix: str) -> tuple[str, ...]:
    """A file of each tensor-parallel rank but the first. Raises IncompleteError."""
    found: dict[int, str] = {}
    for name in names:
        match = _MODEL.fullmatch(name) or _RANK_MODEL.fullmatch(name)
        if match and int(match["mp"]) and not int(match.groupdict().get("rank", 0)):
            found[int(match["mp"])] = prefix + name
    for rank in range(1, len(found) + 1):
        if rank not in found:
            raise IncompleteError("this file of the checkpoint is missing", path=f"{prefix}mp_rank_{rank:02d}_*")
    return tuple(found[rank] for rank in range(1, len(found) + 1))
