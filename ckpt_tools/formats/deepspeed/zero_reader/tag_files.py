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

    def __bool__(self) -> bool:
        return bool(self.weight_paths or self.optim_paths)


@dataclass(frozen=True, slots=True)
class TagFolder:
    """The files of the checkpoint in a folder, by their names: those of each rank of model parallelism
    (``mp_rank_01``), of a pipeline's layers by number for each tensor-parallel rank, and of experts. There are no files
    of layers where the run has no pipeline, and none of experts where it has no experts."""

    mp_ranks: tuple[TagFiles, ...]
    layer_paths: tuple[Mapping[int, str], ...]
    experts: ExpertFiles

    @classmethod
    def of(cls, source: Source, folder: str) -> TagFolder:
        """Raises UnsupportedError if the run is of a kind of parallelism that is not read; IncompleteError if the file
        of a rank or a layer is missing; MalformedError if two files claim one rank, layer or expert."""
        prefix = f"{folder}/" if folder else ""
        names = [path.removeprefix(prefix) for path in source.files if path.startswith(prefix)]
        file_names.refuse_files((name for name in names if not is_native_file_name(name)), folder, _UNSUPPORTED_FILES)

        def group_paths(pattern: re.Pattern[str], outer: str, inner: str) -> dict[int, dict[int, str]]:
            return _group_by_numbers(names, prefix, pattern, outer, inner)

        patterns = (file_names.MODEL_FILE, file_names.RANK_MODEL_FILE, file_names.OPTIM_FILE)
        paths_by_pattern = [group_paths(pattern, "mp", "rank") for pattern in patterns]
        num_mp_ranks = max((rank for kind in paths_by_pattern for rank in kind), default=0) + 1
        if num_mp_ranks > 1 + sum(map(len, paths_by_pattern)):
            raise MalformedError(
                f"{describe_folder(folder)} has a file of rank {num_mp_ranks - 1} of model parallelism and few others"
            )
        mp_ranks = tuple(
            TagFiles(prefix, mp, *(_require_consecutive_ranks(kind.get(mp, {})) for kind in paths_by_pattern))
            for mp in range(num_mp_ranks)
        )
        layer_paths = _order_layers(group_paths(file_names.LAYER_FILE, "tp", "layer"), prefix)
        for name in names:
            match = file_names.EXPERT_FILE.fullmatch(name) or file_names.EXPERT_OPTIM_FILE.fullmatch(name)
            if match is not None and int(match["mp"]):
                raise UnsupportedError(
                    f"{describe_folder(folder)} holds experts of a tensor-parallel run ({name}), which are not "
                    "supported; save the run without tensor parallelism"
                )
        experts_by_layer = group_paths(file_names.EXPERT_FILE, "layer", "expert")
        weight_paths = {(layer, n): path for layer, files in experts_by_layer.items() for n, path in files.items()}
        optim_paths = group_paths(file_names.EXPERT_OPTIM_FILE, "mp", "rank").get(0, {})
        return cls(mp_ranks, layer_paths, ExpertFiles(prefix, weight_paths, _require_consecutive_ranks(optim_paths)))


def _order_layers(paths_by_tp_rank: Mapping[int, Mapping[int, str]], prefix: str) -> tuple[Mapping[int, str], ...]:
    """The files of layers in the order of their numbers, for each tensor-parallel rank. Raises IncompleteError if a
    rank has no file of a layer."""
    layers = sorted({layer for files in paths_by_tp_rank.values() for layer in files})
    for rank, layer in ((rank, layer) for rank in range(len(paths_by_tp_rank)) for layer in layers):
        if layer not in paths_by_tp_rank.get(rank, {}):
            name = file_names.layer_file_name(layer, f"-model_{rank:02d}")
            raise IncompleteError("this file of a layer is missing, and other ranks have theirs", path=prefix + name)
    return tuple({layer: paths_by_tp_rank[rank][layer] for layer in layers} for rank in range(len(paths_by_tp_rank)))


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
