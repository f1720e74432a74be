"""Whether a save of files of ranks has finished: each item has a file of every rank."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ckpt_tools.messages.wording import format_ranks
from ckpt_tools.serialization.pickle.load import loads
from ckpt_tools.trainers.names import match_rank_file, parse_world_size
from ckpt_tools.trainers.saved import SavedCheckpoint, get_parent_folder
from ckpt_tools.trainers.torch_checkpointing import INDEX

MAX_INDEX_BYTES = 4 << 30
MAX_RANKS = 1 << 24

_MANAGED_FILE = re.compile(r"(?:model|optimizer)_(\d{1,9})\.(?:pt|safetensors)")


def is_sharded(saved: SavedCheckpoint) -> bool:
    return INDEX in saved.file_names or any(map(match_rank_file, saved.file_names))


def world_size(saved: SavedCheckpoint) -> int:
    """The world size in a name, or one more than the largest rank in them."""
    matches = [match for name in saved.file_names if (match := match_rank_file(name)) is not None]
    managed_matches = (_MANAGED_FILE.fullmatch(path) for path in saved.files if INDEX in saved.files)
    sizes = [parse_world_size(match) or int(match["rank"]) + 1 for match in matches]
    return max([*sizes, *(int(match[1]) + 1 for match in managed_matches if match is not None)], default=0)


def problem(saved: SavedCheckpoint) -> str | None:
    return _check_named_files(saved) or _check_managed_files(saved)


def _check_named_files(saved: SavedCheckpoint) -> str | None:
    """Checks files with a rank in their names: each item has as many as the world size, or ranks from 0 without
    gaps."""
    ranks_by_stem: dict[str, tuple[set[int], int | None]] = {}
    for path in saved.files:
        match = match_rank_file(path)
        if match is not None:
            stem = re.sub(r"(?:_world_size_\d+)?_rank_?\d+\.\w+$", "", path)
            ranks_by_stem.setdefault(stem, (set(), parse_world_size(match)))[0].add(int(match["rank"]))
    for stem, (ranks, size) in ranks_by_stem.items():
        model = f"{get_parent_folder(stem)}/model".lstrip("/")
        if size is not None and model not in ranks_by_stem:
            return f"no {model}_world_size_{size}_rank_0.pt: the save did not finish"
        missing = set(range(max(ranks) + 1 if size is None else size)) - ranks
        if missing:
            return _describe_missing_ranks(stem, missing)
    return None


def _check_managed_files(saved: SavedCheckpoint) -> str | None:
    """Checks the files of torch_checkpointing, whose index has the number of ranks and the items that can be
    resharded."""
    if INDEX not in saved.files:
        is_bare = {"model", "optimizer"} <= {
            path.partition("_")[0] for path in saved.files if _MANAGED_FILE.fullmatch(path)
        }
        return f"no {INDEX}: the save did not finish" if is_bare else None
    index: Any = loads(saved.read_file(INDEX, MAX_INDEX_BYTES), path=INDEX)
    size, items = (index.get(name) if isinstance(index, dict) else None for name in ("world_size", "metadata"))
    if type(size) is not int or not 0 < size <= MAX_RANKS or not isinstance(items, dict):
        return f"{INDEX} does not list the items of a checkpoint"
    ranks_by_item: dict[str, set[int]] = {str(item): set() for item in items}
    for path in saved.files:
        match = re.fullmatch(r"([^/]+)_(\d{1,9})\.pt", path)
        if match is not None and int(match[2]) < size:
            ranks_by_item.setdefault(match[1], set()).add(int(match[2]))
    missing_by_item = ((item, set(range(size)) - ranks) for item, ranks in ranks_by_item.items() if ranks)
    return next((_describe_missing_ranks(item, missing) for item, missing in missing_by_item if missing), None)


def _describe_missing_ranks(item: str, ranks: Iterable[int]) -> str:
    return f"{item} lacks the files of {format_ranks(ranks)}: the save did not finish"
