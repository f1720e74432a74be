"""The files of a native DeepSpeed checkpoint, by rank, layer and expert."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed import names as file_names
from ckpt_tools.formats.deepspeed.common.tags import choose_tag
from ckpt_tools.formats.deepspeed.names import LATEST, SCRIPTS, is_native, of_rank, place, tag_folders
from ckpt_tools.stores.source import Source

_REFUSED = {
    file_names.OTHER_EXPERTS: "files of experts under other names",
    file_names.OTHER_LAYERS: "files of a pipeline's layers under other names",
    file_names.OFFLOADED: "optimizer state offloaded to NVMe",
}


@dataclass(frozen=True, slots=True)
class TagFiles:
    """The files of one checkpoint. Of the model there is one file, or in stage 3 one a rank; a folder that was
    written twice may hold both, and the stage decides. Without ZeRO there are no files of the optimizer."""

    prefix: str
    mp_rank: int
    model: tuple[str, ...]
    rank_models: tuple[str, ...]
    optim: tuple[str, ...]

    def models(self, stage: int) -> tuple[str, ...]:
        """The model's files in this stage. Raises IncompleteError."""
        found = self.rank_models if stage == 3 else self.model
        if not found:
            is_cut = stage == 3
            name = file_names.rank_model_name(0, self.mp_rank) if is_cut else file_names.model_name(self.mp_rank)
            raise IncompleteError("this file of the checkpoint is missing", path=self.prefix + name)
        return found


@dataclass(frozen=True, slots=True)
class ExpertFiles:
    """The files of experts by their layer among those with experts, and by their number in it. ``optim`` are, without
    ZeRO, those of the optimizer, one for each expert-parallel rank."""

    prefix: str
    weights: Mapping[tuple[int, int], str]
    optim: tuple[str, ...]

    def weight(self, layer: int, expert: int) -> str:
        """The path that the file of an expert has."""
        return self.prefix + file_names.expert_name(layer, expert)


def choose_folder(source: Source, tag: str | None) -> str:
    """The folder of ``tag``, or of the checkpoint that ``latest`` points to. Raises as ``choose_tag`` does."""
    return choose_tag(source, tag, tag_folders(source.files), latest=LATEST, what="DeepSpeed checkpoint")


def own_files(paths: Iterable[str], folder: str) -> frozenset[str]:
    """The files of the checkpoint in ``folder``, and those that DeepSpeed lays beside that; none where nothing in the
    source itself says that it is the one."""
    found = set(paths)
    if not folder:
        return frozenset(path for path in found if is_native(path))
    inside = {path for path in found if path.rpartition("/")[0] == folder and is_native(path.rpartition("/")[2])}
    return frozenset(inside | ({LATEST, *SCRIPTS} & found)) if LATEST in found else frozenset()


def tag_files(source: Source, folder: str) -> tuple[TagFiles, ...]:
    """The files of the checkpoint in ``folder``, for each rank of model parallelism (``mp_rank_01``).

    Raises:
        UnsupportedError: it is of a kind of parallelism that is not read; IncompleteError: the file of a rank is
        missing; MalformedError: two files claim one rank.
    """
    prefix = f"{folder}/" if folder else ""
    names = [path.removeprefix(prefix) for path in source.files if path.startswith(prefix)]
    file_names.refuse((name for name in names if not is_native(name)), folder, _REFUSED)
    found = [_by_rank(names, kind) for kind in (file_names.MODEL, file_names.RANK_MODEL, file_names.OPTIM)]
    ranks = max((rank for kind in found for rank in kind), default=0) + 1
    if ranks > 1 + sum(map(len, found)):
        raise MalformedError(f"{place(folder)} has a file of rank {ranks - 1} of model parallelism and few others")
    return tuple(
        TagFiles(prefix, mp_rank, *(_complete(kind.get(mp_rank, {}), prefix) for kind in found))
        for mp_rank in range(ranks)
    )


def layer_files(source: Source, folder: str) -> tuple[Mapping[int, str], ...]:
    """The files of a pipeline's layers by their numbers, for each tensor-parallel rank; none where the run has no
    pipeline.

    Raises:
        MalformedError: two files claim one layer; IncompleteError: a rank has no file of a layer.
    """
    prefix = f"{folder}/" if folder else ""
    found: dict[tuple[int, int], str] = {}
    for path in source.files:
        match = file_names.LAYER.fullmatch(path.removeprefix(prefix)) if path.startswith(prefix) else None
        if match is None:
            continue
        key = int(match["tp"] or 0), int(match["layer"])
        if key in found:
            raise MalformedError(f"{path} and {found[key]} are both of one layer")
        found[key] = path
    ranks, layers = {rank for rank, _ in found}, sorted({layer for _, layer in found})
    for rank, layer in ((rank, layer) for rank in range(len(ranks)) for layer in layers):
        if (rank, layer) not in found:
            name = file_names.layer_name(layer, f"-model_{rank:02d}")
            raise IncompleteError("this file of a layer is missing, and other ranks have theirs", path=prefix + name)
    return tuple({layer: found[rank, layer] for layer in layers} for rank in range(len(ranks)))


def expert_files(source: Source, folder: str) -> ExpertFiles:
    """The files of experts; none where the run has no experts.

    Raises:
        UnsupportedError: the experts are cut by tensor parallelism too; MalformedError: two files claim one expert;
        IncompleteError: the optimizer's file of an expert-parallel rank is missing.
    """
    prefix = f"{folder}/" if folder else ""
    names = [path.removeprefix(prefix) for path in source.files if path.startswith(prefix)]
    weights: dict[tuple[int, int], str] = {}
    for name in names:
        match = file_names.EXPERT.fullmatch(name)
        if match is None:
            continue
        _refuse_cut(name, int(match["mp"]), folder)
        key = int(match["layer"]), int(match["expert"])
        if key in weights:
            raise MalformedError(f"{prefix}{name} and {weights[key]} are both of one expert")
        weights[key] = prefix + name
    optim = _by_rank(names, file_names.EXPERT_OPTIM)
    for rank, found in optim.items():
        _refuse_cut(next(iter(found.values())), rank, folder)
    return ExpertFiles(prefix, weights, _complete(optim.get(0, {}), prefix))


def _refuse_cut(name: str, mp_rank: int, folder: str) -> None:
    if mp_rank:
        raise UnsupportedError(
            f"{place(folder)} holds experts of a tensor-parallel run ({name}), which are not supported; save the run "
            "without tensor parallelism"
        )


def no_optimizer(files: TagFiles) -> IncompleteError:
    """A checkpoint of ZeRO has no optimizer's files."""
    return IncompleteError(
        f"{place(files.prefix.rstrip('/'))} has no *_optim_states.pt, the optimizer's files, which ZeRO writes",
        path=files.prefix + file_names.optim_name(0, files.mp_rank),
    )


def _by_rank(names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, dict[int, str]]:
    """The files of a kind by their rank of model parallelism, and then of data parallelism."""
    found: dict[int, dict[int, str]] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match:
            rank, ranks = int(match.groupdict().get("rank", 0)), found.setdefault(int(match["mp"]), {})
            if rank in ranks:
                raise MalformedError(f"it and {ranks[rank]} are both of rank {rank}", path=name)
            ranks[rank] = name
    return found


def _complete(found: Mapping[int, str], prefix: str) -> tuple[str, ...]:
    """The files in the order of their ranks. Raises IncompleteError naming the first that is missing."""
    for rank in range(len(found)):
        if rank not in found:
            raise IncompleteError("the file of this rank is missing", path=prefix + of_rank(found[max(found)], rank))
    return tuple(prefix + found[rank] for rank in range(len(found)))
