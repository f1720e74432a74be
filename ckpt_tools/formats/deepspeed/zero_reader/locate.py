"""The files of a native DeepSpeed checkpoint, by rank, layer and expert."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.core.wording import format_count
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed import names as file_names
from ckpt_tools.formats.deepspeed.names import is_native, of_rank, place
from ckpt_tools.stores.source import Source

_REFUSED = {
    file_names.OTHER_EXPERTS: "files of experts under other names",
    file_names.OTHER_LAYERS: "files of a pipeline's layers under other names",
    file_names.OFFLOADED: "optimizer state offloaded to NVMe",
}


@dataclass(frozen=True, slots=True)
class TagFiles:
    """The files of one checkpoint. The model has one file, or in stage 3 one a rank; a folder that was written twice
    may hold both, and the stage decides. Without ZeRO there are no files of the optimizer."""

    prefix: str
    mp_rank: int
    model: tuple[str, ...]
    rank_models: tuple[str, ...]
    optim: tuple[str, ...]

    def models(self, stage: int) -> tuple[str, ...]:
        """The model's files in this stage. Raises IncompleteError."""
        found = self.rank_models if stage == 3 else self.model
        if not found:
            mp_rank = self.mp_rank
            name = file_names.rank_model_name(0, mp_rank) if stage == 3 else file_names.model_name(mp_rank)
            raise IncompleteError("this file of the checkpoint is missing", path=self.prefix + name)
        return found


@dataclass(frozen=True, slots=True)
class ExpertFiles:
    """The files of experts by their layer among those with experts, and by their number in it. ``optim`` are, without
    ZeRO, those of the optimizer, one for each expert-parallel rank."""

    prefix: str
    weights: Mapping[tuple[int, int], str]
    optim: tuple[str, ...]


def tag_files(source: Source, folder: str) -> tuple[TagFiles, ...]:
    """The files of the checkpoint in ``folder``, for each rank of model parallelism (``mp_rank_01``). Raises
    UnsupportedError if it is of a kind of parallelism that is not read; IncompleteError if the file of a rank is
    missing; MalformedError if two files claim one rank."""
    prefix, names = _inside(source, folder)
    file_names.refuse((name for name in names if not is_native(name)), folder, _REFUSED)
    kinds = (file_names.MODEL, file_names.RANK_MODEL, file_names.OPTIM)
    found = [_numbered(names, prefix, kind, "mp", "rank") for kind in kinds]
    ranks = max((rank for kind in found for rank in kind), default=0) + 1
    if ranks > 1 + sum(map(len, found)):
        raise MalformedError(f"{place(folder)} has a file of rank {ranks - 1} of model parallelism and few others")
    return tuple(TagFiles(prefix, mp, *(_complete(kind.get(mp, {})) for kind in found)) for mp in range(ranks))


def layer_files(source: Source, folder: str) -> tuple[Mapping[int, str], ...]:
    """The files of a pipeline's layers by their numbers, for each tensor-parallel rank; none where the run has no
    pipeline. Raises MalformedError if two files claim one layer; IncompleteError if a rank has no file of a layer."""
    prefix, names = _inside(source, folder)
    found = _numbered(names, prefix, file_names.LAYER, "tp", "layer")
    layers = sorted({layer for files in found.values() for layer in files})
    for rank, layer in ((rank, layer) for rank in range(len(found)) for layer in layers):
        if layer not in found.get(rank, {}):
            name = file_names.layer_name(layer, f"-model_{rank:02d}")
            raise IncompleteError("this file of a layer is missing, and other ranks have theirs", path=prefix + name)
    return tuple({layer: found[rank][layer] for layer in layers} for rank in range(len(found)))


def expert_files(source: Source, folder: str) -> ExpertFiles:
    """The files of experts; none where the run has no experts. Raises UnsupportedError if the experts are cut by tensor
    parallelism too; MalformedError if two files claim one expert; IncompleteError if the optimizer's file of an
    expert-parallel rank is missing."""
    prefix, names = _inside(source, folder)
    for name in names:
        match = file_names.EXPERT.fullmatch(name) or file_names.EXPERT_OPTIM.fullmatch(name)
        if match is not None and int(match["mp"]):
            raise UnsupportedError(
                f"{place(folder)} holds experts of a tensor-parallel run ({name}), which are not supported; save the "
                "run without tensor parallelism"
            )
    weights = _numbered(names, prefix, file_names.EXPERT, "layer", "expert")
    optim = _numbered(names, prefix, file_names.EXPERT_OPTIM, "mp", "rank")
    by_layer = {(layer, number): path for layer, files in weights.items() for number, path in files.items()}
    return ExpertFiles(prefix, by_layer, _complete(optim.get(0, {})))


def _inside(source: Source, folder: str) -> tuple[str, list[str]]:
    """The prefix of paths in ``folder``, and the names there."""
    prefix = f"{folder}/" if folder else ""
    return prefix, [path.removeprefix(prefix) for path in source.files if path.startswith(prefix)]


def _numbered(
    names: Iterable[str], prefix: str, pattern: re.Pattern[str], outer: str, inner: str
) -> dict[int, dict[int, str]]:
    """The files of a kind by two numbers in their names."""
    found: dict[int, dict[int, str]] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            files, number = found.setdefault(int(match[outer] or 0), {}), int(match.groupdict().get(inner, 0))
            if number in files:
                raise MalformedError(f"it and {files[number]} are both of {inner} {number}", path=prefix + name)
            files[number] = prefix + name
    return found


def _complete(found: Mapping[int, str]) -> tuple[str, ...]:
    """The files in the order of their ranks. Raises IncompleteError naming the first that is missing."""
    for rank in range(len(found)):
        if rank not in found:
            raise IncompleteError("the file of this rank is missing", path=of_rank(found[max(found)], rank))
    return tuple(found[rank] for rank in range(len(found)))


def check_count(paths: Sequence[str], world_size: int) -> None:
    """Raises IncompleteError where a rank has no file, MalformedError where there are more files than ranks."""
    if len(paths) < world_size:
        missing = of_rank(paths[0], len(paths))
        raise IncompleteError(f"the file of this rank, one of {world_size}, is missing", path=missing)
    if len(paths) > world_size:
        raise MalformedError(
            f"the checkpoint is of {format_count(world_size, 'rank')}; this file is of another one, perhaps from an "
            f"earlier "
            "save",
            path=paths[world_size],
        )
