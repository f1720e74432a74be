"""The index of torch_checkpointing, ``metadata.pkl`` (torch_checkpointing 0.1.1, metadata_manager.py).

It is a pickle of plain dicts. It names the files of the items that can be resharded, if any, and describes their
tensors. With torch's own serialization the files have the same descriptions, which are used; safetensors hold local
shapes alone, and are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.serialization.pickle.load import loads
from ckpt_tools.stores.source import Source, check_file_name
from ckpt_tools.trainers.torch_checkpointing import INDEX, has_index

MAX_INDEX_BYTES = 1 << 30
MAX_RANKS = 1 << 20

_TORCH_SERIALIZATION = "TorchSerialization"


def read_index_world_size(source: Source, folder: str, folder_files: Collection[str]) -> int | None:
    """The number of ranks in the index of a folder; None where it has no index. Raises FormatError if the index breaks
    a rule, or a file is stored in another way than by ``torch.save``, or is missing."""
    path = f"{folder}/{INDEX}" if folder else INDEX
    if not has_index(source, folder):
        return None
    index = loads(source.read_all(path, limit_bytes=MAX_INDEX_BYTES), path=path)
    world_size, items = (index.get(name) if isinstance(index, dict) else None for name in ("world_size", "metadata"))
    if type(world_size) is not int or not 0 < world_size <= MAX_RANKS or not isinstance(items, dict):
        raise MalformedError("it does not contain the metadata of torch_checkpointing", path=path)
    for name, item in items.items():
        for file, kind in _iter_item_files(str(name), item, path):
            _check_item_file(source, f"{folder}/{file}" if folder else file, str(name), kind)
    for file in folder_files:
        if file.endswith(".safetensors"):
            _check_item_file(source, file, file.rpartition("/")[2].rpartition("_")[0], "SafetensorsSerialization")
    return world_size


def _check_item_file(source: Source, file: str, item: str, serializer: str) -> None:
    if serializer != _TORCH_SERIALIZATION:
        raise UnsupportedError(
            f"item {item!r} is stored by {serializer}, which is not supported; use {_TORCH_SERIALIZATION}", path=file
        )
    if file not in source.files:
        raise IncompleteError(f"the file of item {item!r} is missing", path=file)


def _iter_item_files(name: str, item: Any, path: str) -> Iterator[tuple[str, str]]:
    """The file of each rank and how it is stored."""
    ranks = item.get("rank_to_layout_info") if isinstance(item, dict) else None
    for layout_info in ranks.values() if isinstance(ranks, dict) else [ranks]:
        file = layout_info.get("file_path") if isinstance(layout_info, Mapping) else None
        serializer = layout_info.get("serialization_format") if isinstance(layout_info, Mapping) else None
        serializer = serializer.get("type") if isinstance(serializer, Mapping) else serializer
        if layout_info is None and isinstance(ranks, dict):
            continue
        if type(file) is not str or type(serializer) is not str:
            raise MalformedError(f"item {name!r} does not state where its files are, or how they are stored", path=path)
        yield check_file_name(file), serializer
