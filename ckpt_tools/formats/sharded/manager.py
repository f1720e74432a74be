"""The index of torch_checkpointing: the number of ranks, and the serialization of each item.

``metadata.pkl`` (torch_checkpointing 0.1.1, metadata_manager.py) is a pickle of plain dicts. It names the files of the
items that can be resharded, which may be none of them, and describes their tensors. With torch's own serialization the
files say the same again, and are believed; safetensors hold local shapes alone, and are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.serialization.pickle.load import loads
from ckpt_tools.stores.source import Source, checked_name
from ckpt_tools.trainers.torch_checkpointing import INDEX, is_managed

MAX_BYTES = 1 << 30
MAX_RANKS = 1 << 20

_TORCH = "TorchSerialization"


def check_index(source: Source, folder: str, here: Collection[str]) -> int | None:
    """The number of ranks in the index of a folder; None where it has no index. Raises FormatError if the index breaks
    a rule, or a file is stored in another way than by ``torch.save``, or is missing."""
    path = f"{folder}/{INDEX}" if folder else INDEX
    if not is_managed(source, folder):
        return None
    found = loads(source.read_all(path, limit_bytes=MAX_BYTES), path=path)
    world, items = (found.get(name) if isinstance(found, dict) else None for name in ("world_size", "metadata"))
    if type(world) is not int or not 0 < world <= MAX_RANKS or not isinstance(items, dict):
        raise MalformedError("it does not contain the metadata of torch_checkpointing", path=path)
    for name, item in items.items():
        for file, kind in _files(str(name), item, path):
            _check(source, f"{folder}/{file}" if folder else file, str(name), kind)
    for file in here:
        if file.endswith(".safetensors"):
            _check(source, file, file.rpartition("/")[2].rpartition("_")[0], "SafetensorsSerialization")
    return world


def _check(source: Source, file: str, item: str, kind: str) -> None:
    if kind != _TORCH:
        raise UnsupportedError(f"item {item!r} is stored by {kind}, which is not supported; use {_TORCH}", path=file)
    if file not in source.files:
        raise IncompleteError(f"the file of item {item!r} is missing", path=file)


def _files(name: str, item: Any, path: str) -> Iterator[tuple[str, str]]:
    """The file of each rank and how it is stored."""
    ranks = item.get("rank_to_layout_info") if isinstance(item, dict) else None
    for where in ranks.values() if isinstance(ranks, dict) else [ranks]:
        file = where.get("file_path") if isinstance(where, Mapping) else None
        kind = where.get("serialization_format") if isinstance(where, Mapping) else None
        kind = kind.get("type") if isinstance(kind, Mapping) else kind
        if where is None and isinstance(ranks, dict):
            continue
        if type(file) is not str or type(kind) is not str:
            raise MalformedError(f"item {name!r} does not say where its files are, or how they are stored", path=path)
        yield checked_name(file), kind
