"""The files of a universal checkpoint, by parameter and slot."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from ckpt_tools.errors import IncompleteError
from ckpt_tools.formats.deepspeed.common.tags import choose_tag
from ckpt_tools.formats.deepspeed.names import (
    LATEST_UNIVERSAL,
    MASTER_FILE,
    MODEL,
    OPTIMIZER_STATE,
    OTHER_EXPERTS,
    OTHER_LAYERS,
    RANK_MODEL,
    model_name,
    rank_model_name,
    refuse,
    slot_file,
    universal_folders,
)
from ckpt_tools.stores.source import Source

_SLOTS = (MASTER_FILE, "exp_avg", "exp_avg_sq", "step")
"""The files that ``ds_to_universal`` makes of every parameter."""

_REFUSED = {OTHER_EXPERTS: "experts (mixture of experts)", OTHER_LAYERS: "files of a pipeline's layers"}


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


def choose_folder(source: Source, tag: str | None) -> str:
    """The folder of ``tag``, or of the checkpoint that ``latest_universal`` points to."""
    return choose_tag(
        source, tag, universal_folders(source.files), latest=LATEST_UNIVERSAL, what="universal checkpoint"
    )


def universal_files(source: Source, folder: str) -> UniversalFiles:
    """The files of the checkpoint in ``folder``.

    Raises:
        UnsupportedError: it is of a kind of parallelism that is not read; IncompleteError: the model's file, or that of
        a rank, is missing.
    """
    prefix = f"{folder}/" if folder else ""
    inside = [path for path in source.files if path.startswith(prefix)]
    names = [path.removeprefix(prefix) for path in inside]
    refuse(names, folder, _REFUSED)
    states: dict[str, dict[str, str]] = {}
    for path in inside:
        match = slot_file(path)
        if match and (match["folder"] or "") == folder:
            states.setdefault(match["fqn"], {})[match["slot"]] = path
    models = _models(names, prefix)
    return UniversalFiles(
        folder.rpartition("/")[2], states, models, prefix + OPTIMIZER_STATE, _model_parts(names, prefix)
    )


def own_files(paths: Iterable[str], files: UniversalFiles, folder: str, used: Container[str]) -> frozenset[str]:
    """The files of the checkpoint in ``folder``; none where nothing in the source itself says that it is the one.

    ``used`` are the files that hold its tensors, and the names of its parameters and buffers: of the latter
    DeepSpeed leaves copies in ``zero/``.
    """
    found = set(paths)
    if folder and LATEST_UNIVERSAL not in found:
        return frozenset()
    prefix = f"{folder}/" if folder else ""
    models = {path for path in found if path.startswith(prefix) and _is_model(path.removeprefix(prefix))}
    states = {
        path
        for fqn, slots in files.states.items()
        for slot, path in slots.items()
        if path in used or (fqn in used and slot in _SLOTS)
    }
    beside = {LATEST_UNIVERSAL} if folder else set()
    return frozenset(models | states | (found & {files.optimizer, *beside}))


def _is_model(name: str) -> bool:
    return MODEL.fullmatch(name) is not None or RANK_MODEL.fullmatch(name) is not None


def _models(names: list[str], prefix: str) -> tuple[str, ...]:
    """The file of all ranks if there is one, for it has the weights; else that of each rank."""
    if model_name() in names:
        return (prefix + model_name(),)
    matches = [(name, match) for name in names if (match := RANK_MODEL.fullmatch(name))]
    ranks = {int(match["rank"]): name for name, match in matches if not int(match["mp"])}
    for rank in range(max(1, len(ranks))):
        if rank not in ranks:
            missing = rank_model_name(rank) if ranks else model_name()
            raise IncompleteError("this file of the checkpoint is missing", path=prefix + missing)
    return tuple(prefix + ranks[rank] for rank in range(len(ranks)))


def _model_parts(names: list[str], prefix: str) -> tuple[str, ...]:
    """A file of each tensor-parallel rank but the first. Raises IncompleteError."""
    found: dict[int, str] = {}
    for name in names:
        match = MODEL.fullmatch(name) or RANK_MODEL.fullmatch(name)
        if match and int(match["mp"]) and not int(match.groupdict().get("rank", 0)):
            found[int(match["mp"])] = prefix + name
    for rank in range(1, len(found) + 1):
        if rank not in found:
            raise IncompleteError("this file of the checkpoint is missing", path=f"{prefix}mp_rank_{rank:02d}_*")
    return tuple(found[rank] for rank in range(1, len(found) + 1))
