"""The files of a native DeepSpeed checkpoint, by rank, layer and expert."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed import names as file_names
from ckpt_tools.formats.deepspeed.names import describe_folder, is_native_file_name, replace_rank
from ckpt_tools.stores.source import Source

_UNSUPPORTED_FILES = {
    file_names.UNSUPPORTED_EXPERT_FILES: "files of experts under other names",
    file_names.UNSUPPORTED_LAYER_FILES: "files of a pipeline's layers under other names",
    file_names.OFFLOADED_FILES: "optimizer state offloaded to NVMe",
}


@dataclass(frozen=True, slots=True)
class TagFiles:
    """Paths of the files of one model-parallel rank, ``mp_rank``. The model has one file, or in stage 3 one a
    data-parallel rank; a folder that was written twice may hold both, and the stage decides. Without ZeRO there are no
    files of the optimizer. ``prefix`` is the start of all paths in the folder."""

    prefix: str
    mp_rank: int
    model_paths: tuple[str, ...]
    rank_model_paths: tuple[str, ...]
    optim_paths: tuple[str, ...]

    def require_model_paths(self, stage: int) -> tuple[str, ...]:
        """The model's files in this stage. Raises IncompleteError."""
        paths = self.rank_model_paths if stage == 3 else self.model_paths
        if not paths:
            mp_rank = self.mp_rank
            name = file_names.rank_model_file_name(0, mp_rank) if stage == 3 else file_names.model_file_name(mp_rank)
            raise IncompleteError("this file of the checkpoint is missing", path=self.prefix + name)
        return paths


@dataclass(frozen=True, slots=True)
class ExpertFiles:
    """Paths of the files of experts by (layer, expert), the layer's number among those with experts and the expert's in
    it. ``optim_paths`` are, without ZeRO, the optimizer's files, one for each expert-parallel rank."""

    prefix: str
    weight_paths: Mapping[tuple[int, int], str]
    optim_paths: tuple[str, ...]


def find_tag_files(source: Source, folder: str) -> tuple[TagFiles, ...]:
    """The files of the checkpoint in ``folder``, for each rank of model parallelism (``mp_rank_01``). Raises
    UnsupportedError if it is of a kind of parallelism that is not read; IncompleteError if the file of a rank is
    missing; MalformedError if two files claim one rank."""
    prefix, names = _list_folder(source, folder)
    file_names.refuse_files((name for name in names if not is_native_file_name(name)), folder, _UNSUPPORTED_FILES)
    patterns = (file_names.MODEL_FILE, file_names.RANK_MODEL_FILE, file_names.OPTIM_FILE)
    paths_by_pattern = [_group_by_numbers(names, prefix, kind, "mp", "rank") for kind in patterns]
    num_mp_ranks = max((rank for kind in paths_by_pattern for rank in kind), default=0) + 1
    if num_mp_ranks > 1 + sum(map(len, paths_by_pattern)):
        raise MalformedError(
            f"{describe_folder(folder)} has a file of rank {num_mp_ranks - 1} of model parallelism and few others"
        )
    return tuple(
        TagFiles(prefix, mp, *(_require_consecutive_ranks(kind.get(mp, {})) for kind in paths_by_pattern))
        for mp in range(num_mp_ranks)
    )


def find_layer_files(source: Source, folder: str) -> tuple[Mapping[int, str], ...]:
    """The files of a pipeline's layers by their numbers, for each tensor-parallel rank; none where the run has no
    pipeline. Raises MalformedError if two files claim one layer; IncompleteError if a rank has no file of a layer."""
    prefix, names = _list_folder(source, folder)
    paths_by_tp_rank = _group_by_numbers(names, prefix, file_names.LAYER_FILE, "tp", "layer")
    layers = sorted({layer for files in paths_by_tp_rank.values() for layer in files})
    for rank, layer in ((rank, layer) for rank in range(len(paths_by_tp_rank)) for layer in layers):
        if layer not in paths_by_tp_rank.get(rank, {}):
            name = file_names.layer_file_name(layer, f"-model_{rank:02d}")
            raise IncompleteError("this file of a layer is missing, and other ranks have theirs", path=prefix + name)
    return tuple({layer: paths_by_tp_rank[rank][layer] for layer in layers} for rank in range(len(paths_by_tp_rank)))


def find_expert_files(source: Source, folder: str) -> ExpertFiles:
    """The files of experts; none where the run has no experts. Raises UnsupportedError if the experts are cut by tensor
    parallelism too; MalformedError if two files claim one expert; IncompleteError if the optimizer's file of an
    expert-parallel rank is missing."""
    prefix, names = _list_folder(source, folder)
    for name in names:
        match = file_names.EXPERT_FILE.fullmatch(name) or file_names.EXPERT_OPTIM_FILE.fullmatch(name)
        if match is not None and int(match["mp"]):
            raise UnsupportedError(
                f"{describe_folder(folder)} holds experts of a tensor-parallel run ({name}), which are not supported; "
                "save the run without tensor parallelism"
            )
    weights = _group_by_numbers(names, prefix, file_names.EXPERT_FILE, "layer", "expert")
    optim = _group_by_numbers(names, prefix, file_names.EXPERT_OPTIM_FILE, "mp", "rank")
    by_layer = {(layer, number): path for layer, files in weights.items() for number, path in files.items()}
    return ExpertFiles(prefix, by_layer, _require_consecutive_ranks(optim.get(0, {})))


def _list_folder(source: Source, folder: str) -> tuple[str, list[str]]:
    """The prefix of paths in ``folder``, and the names there."""
    prefix = f"{folder}/" if folder else ""
    return prefix, [path.removeprefix(prefix) for path in source.files if path.startswith(prefix)]


def _group_by_numbers(
    names: Iterable[str], prefix: str, pattern: re.Pattern[str], outer_group: str, inner_group: str
) -> dict[int, dict[int, str]]:
    """Paths of the files that match ``pattern``, by the numbers in two of its groups; a missing one is 0. Raises
    MalformedError if two files have the same numbers."""
    paths_by_numbers: dict[int, dict[int, str]] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            files = paths_by_numbers.setdefault(int(match[outer_group] or 0), {})
            number = int(match.groupdict().get(inner_group, 0))
            if number in files:
                raise MalformedError(f"it and {files[number]} are both of {inner_group} {number}", path=prefix + name)
            files[number] = prefix + name
    return paths_by_numbers


def _require_consecutive_ranks(path_by_rank: Mapping[int, str]) -> tuple[str, ...]:
    """The paths in the order of their ranks. Raises IncompleteError for the first rank that has none."""
    for rank in range(len(path_by_rank)):
        if rank not in path_by_rank:
            path = replace_rank(path_by_rank[max(path_by_rank)], rank)
            raise IncompleteError("the file of this rank is missing", path=path)
    return tuple(path_by_rank[rank] for rank in range(len(path_by_rank)))
