"""The index of torch_checkpointing: which items there are, and the file of each rank.

``metadata.pkl`` (torch_checkpointing 0.1.1, metadata_manager.py) is a pickle of plain dicts. Each item says for every
rank where its file is and how it is stored, and describes its sharded tensors. With torch's own serialization the files
say the same again, and are believed; safetensors hold local shapes alone, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.sharded.names import MANAGER
from ckpt_tools.serialization.pickle.load import loads
from ckpt_tools.stores.source import Source, checked_name

MAX_BYTES = 1 << 30
MAX_RANKS = 1 << 20


def read_items(source: Source, folder: str) -> dict[str, dict[int, str]]:
    """The files of torch's serialization by item and rank.

    Raises:
        FormatError: the index breaks a rule, or an item is stored in another way; a file that it names is missing.
    """
    path = f"{folder}/{MANAGER}" if folder else MANAGER
    found = loads(source.read_all(path, limit_bytes=MAX_BYTES), path=path)
    world = found.get("world_size") if isinstance(found, dict) else None
    items = found.get("metadata") if isinstance(found, dict) else None
    if type(world) is not int or not 0 < world <= MAX_RANKS or not isinstance(items, dict):
        raise MalformedError("it does not contain the metadata of torch_checkpointing", path=path)
    files = {str(name): _files(str(name), item, folder, path) for name, item in items.items()}
    for name, by_rank in files.items():
        missing = [file for file in by_rank.values() if file not in source.files]
        if missing:
            raise IncompleteError(f"the file of item {name!r} is missing", path=missing[0])
        if by_rank and not by_rank.keys() <= set(range(world)):
            raise MalformedError(f"item {name!r} names a rank that is not one of {world}", path=path)
    return {name: by_rank for name, by_rank in files.items() if by_rank}


def _files(name: str, item: Any, folder: str, path: str) -> dict[int, str]:
    ranks = item.get("rank_to_layout_info") if isinstance(item, dict) else None
    if not isinstance(ranks, dict) or not all(type(rank) is int for rank in ranks):
        raise MalformedError(f"item {name!r} does not say where its files are", path=path)
    return {rank: _file(name, where, folder, path) for rank, where in sorted(ranks.items()) if where is not None}


def _file(name: str, where: Any, folder: str, path: str) -> str:
    kind = where.get("serialization_format") if isinstance(where, Mapping) else None
    file = where.get("file_path") if isinstance(where, Mapping) else None
    kind = kind.get("type") if isinstance(kind, Mapping) else kind
    if type(file) is not str or type(kind) is not str:
        raise MalformedError(f"item {name!r} does not say how its files are stored", path=path)
    if kind != "TorchSerialization":
        raise UnsupportedError(
            f"item {name!r} is stored by {kind}, which is not supported; save with TorchSerialization", path=path
        )
    inside = checked_name(file)
    return f"{folder}/{inside}" if folder else inside
