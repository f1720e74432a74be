"""Where the files of a DeepSpeed checkpoint lie, from their names alone.

A save directory holds a folder for each tag, and ``latest`` names one of them. deepspeed/runtime/engine.py:
``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``, ``_get_expert_ckpt_name`` and ``_get_optimizer_ckpt_name``. Folders
of NVMe offload, and other names of experts and layers, are recognised so that they can be refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt_tools.core.wording import natural
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.tags import choose_tag
from ckpt_tools.stores.source import Source

LATEST = "latest"

SCRIPTS = frozenset({"zero_to_fp32.py", "zero_to_torch.py"})
"""DeepSpeed lays them beside ``latest``, engine.py ``_copy_recovery_script``."""

_MODEL = re.compile(r"mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
_RANK_MODEL = re.compile(r"zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
# The engine still reads names without the last underscore, _get_all_zero_checkpoint_names.
_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_?optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d{1,9})(-model_(?P<tp>\d{1,9}))?-model_states\.pt")
_EXPERT = re.compile(r"layer_(?P<layer>\d{1,9})_expert_(?P<expert>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_optim_states\.pt")
_UNIVERSAL = re.compile(r"(?P<folder>.*?)/?zero/.+/fp32\.pt")

_OWN = (_MODEL, _RANK_MODEL, _OPTIM, _LAYER, _EXPERT, _EXPERT_OPTIM)

_FOREIGN = {
    re.compile(r"(layer_\d+_)?expert_.*|expp_rank_.*"): "files of experts under other names",
    re.compile(r"layer_\d+[-_].*"): "files of a pipeline's layers under other names",
    re.compile(r"offloaded_tensors/.*"): "optimizer state offloaded to NVMe",
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
            kind = "zero_pp_rank_0_" if stage == 3 else ""
            name = f"{kind}mp_rank_{self.mp_rank:02d}_model_states.pt"
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
        return f"{self.prefix}layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def tag_folders(paths: Iterable[str]) -> list[str]:
    """The folders that hold native ZeRO files, in the order of their names; ``""`` is the source itself."""
    native, universal = set(), set()
    for path in paths:
        folder, _, name = path.rpartition("/")
        if is_own_name(name):
            native.add(folder)
        elif path.endswith("/fp32.pt") and (match := _UNIVERSAL.fullmatch(path)):
            universal.add(match["folder"])
    return sorted(native - universal, key=natural)


def choose_folder(source: Source, tag: str | None) -> str:
    """The folder of ``tag``, or of the checkpoint that ``latest`` points to. Raises as ``choose_tag`` does."""
    return choose_tag(source, tag, tag_folders(source.files), latest=LATEST, what="DeepSpeed checkpoint")


def own_files(paths: Iterable[str], folder: str) -> frozenset[str]:
    """The files of the checkpoint in ``folder``, and those that DeepSpeed lays beside that; none where nothing in the
    source itself says that it is the one."""
    found = set(paths)
    if not folder:
        return frozenset(path for path in found if is_own_name(path))
    inside = {path for path in found if path.rpartition("/")[0] == folder and is_own_name(path.rpartition("/")[2])}
    return frozenset(inside | ({LATEST, *SCRIPTS} & found)) if LATEST in found else frozenset()


def is_own_name(name: str) -> bool:
    """Whether DeepSpeed gives this name to a file of a tag folder."""
    return any(pattern.fullmatch(name) for pattern in _OWN)


def tag_files(source: Source, folder: str) -> tuple[TagFiles, ...]:
    """The files of the checkpoint in ``folder``, for each rank of model parallelism (``mp_rank_01``).

    Raises:
        UnsupportedError: it is of a kind of parallelism that is not read; IncompleteError: the file of a rank is
        missing; MalformedError: two files claim one rank.
    """
    prefix = f"{folder}/" if folder else ""
    names = [path.removeprefix(prefix) for path in source.files if path.startswith(prefix)]
    _refuse_foreign([name for name in names if not is_own_name(name)], folder)
    found = [_by_rank(names, kind) for kind in (_MODEL, _RANK_MODEL, _OPTIM)]
    ranks = max((rank for kind in found for rank in kind), default=0) + 1
    if ranks > 1 + sum(map(len, found)):
        raise MalformedError(f"{_place(folder)} has a file of rank {ranks - 1} of model parallelism and few others")
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
        match = _LAYER.fullmatch(path.removeprefix(prefix)) if path.startswith(prefix) else None
        if match is None:
            continue
        key = int(match["tp"] or 0), int(match["layer"])
        if key in found:
            raise MalformedError(f"{path} and {found[key]} are both of one layer")
        found[key] = path
    ranks, layers = {rank for rank, _ in found}, sorted({layer for _, layer in found})
    for rank, layer in ((rank, layer) for rank in range(len(ranks)) for layer in layers):
        if (rank, layer) not in found:
            name = f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
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
        match = _EXPERT.fullmatch(name)
        if match is None:
            continue
        _refuse_cut(name, int(match["mp"]), folder)
        key = int(match["layer"]), int(match["expert"])
        if key in weights:
            raise MalformedError(f"{prefix}{name} and {weights[key]} are both of one expert")
        weights[key] = prefix + name
    optim = _by_rank(names, _EXPERT_OPTIM)
    for rank, found in optim.items():
        _refuse_cut(next(iter(found.values())), rank, folder)
    return ExpertFiles(prefix, weights, _complete(optim.get(0, {}), prefix))


def _refuse_cut(name: str, mp_rank: int, folder: str) -> None:
    if mp_rank:
        raise UnsupportedError(
            f"{_place(folder)} holds experts of a tensor-parallel run ({name}), which are not supported; save the run "
            "without tensor parallelism"
        )


def no_optimizer(files: TagFiles) -> IncompleteError:
    """A checkpoint of ZeRO has no optimizer's files."""
    return IncompleteError(
        f"{_place(files.prefix.rstrip('/'))} has no *_optim_states.pt, the optimizer's files, which ZeRO writes",
        path=files.prefix + f"zero_pp_rank_0_mp_rank_{files.mp_rank:02d}_optim_states.pt",
    )


def _place(folder: str) -> str:
    return f"the tag {folder!r}" if folder else "the folder"


def _refuse_foreign(names: list[str], folder: str) -> None:
    for name in names:
        for pattern, what in _FOREIGN.items():
            if pattern.fullmatch(name):
                raise UnsupportedError(f"{_place(folder)} holds {what} ({name}), which are not supported")


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


def of_rank(name: str, rank: int) -> str:
    """The name that a file of the same kind has on ``rank``."""
    return re.sub(r"(zero_pp|expp)_rank_\d+", rf"\1_rank_{rank}", name)
