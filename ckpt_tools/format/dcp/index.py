"""The ``.metadata`` file as columns: every tensor with its shards, every object with its item.

``storage_data`` is keyed by name and offset, because an FSDP chunk is known by where it starts. An empty chunk starts
where another ends and holds nothing, so it is left out before it can be mistaken for a neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_tools.containers.dcp_classes import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    TensorStorageMetadata,
)
from ckpt_tools.containers.pickles import loads
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.manifest import ByteRange, Framing, ShardTable
from ckpt_tools.stores.base import Source, checked_name
from ckpt_tools.tree import MAX_PATH_PARTS, Path, TensorLeaf

MAX_METADATA_BYTES = 4 << 30
"""A million chunks take 150 MB."""

_FILE_NAME = re.compile(r"__(\d{1,9})_\d+\.distcp")


@dataclass(frozen=True, slots=True)
class Index:
    """What a ``.metadata`` file says, checked against the files that are there."""

    tensors: Mapping[str, TensorLeaf]
    objects: Mapping[str, ByteRange]
    paths: Mapping[str, Path]

    @property
    def num_ranks(self) -> int | None:
        """One more than the highest rank that wrote a file, as the files are named."""
        files = {file for tensor in self.tensors.values() for file in tensor.shards.files}
        ranks = [int(match[1]) for file in files if (match := _FILE_NAME.fullmatch(file.rpartition("/")[2]))]
        return max(ranks) + 1 if ranks else None


def read_index(source: Source, path: str) -> Index:
    """The index in the file ``path``.

    Raises:
        FormatError: it breaks a rule, or names a file or a range that is not there. UnsafeError: it names one outside.
    """
    metadata = loads(source.read_all(path, limit_bytes=MAX_METADATA_BYTES), path=path)
    if not isinstance(metadata, Metadata):
        raise MalformedError("it holds no DCP metadata", path=path)
    files = _Files(source, path.rpartition("/")[0])
    items = {index: files.at(info) for index, info in metadata.storage_data.items()}
    tensors, objects = {}, {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[fqn] = _stored(fqn, entry, items, files)
        else:
            objects[fqn] = files.range(_item(fqn, None, items))
    return Index(tensors, objects, _paths(metadata))


class _Files:
    """Numbers for file names, each name checked once."""

    def __init__(self, source: Source, folder: str) -> None:
        self._source = source
        self._folder = folder
        self._numbers: dict[str, int] = {}
        self.names: list[str] = []
        self._sizes: list[int] = []

    def at(self, info: StorageInfo) -> tuple[int, int, int]:
        """File number, start and stop of an item."""
        if info.transform_descriptors:
            names = ", ".join(info.transform_descriptors)
            raise UnsupportedError(f"its items are stored through {names}; save it without", path=info.relative_path)
        number = self._numbers.get(info.relative_path)
        if number is None:
            number = self._new(info.relative_path)
        stop = info.offset + info.length
        if stop > self._sizes[number]:
            raise IncompleteError(
                f"it has {self._sizes[number]:,} bytes and an item of it ends at {stop:,}; it was cut off",
                path=self.names[number],
            )
        return number, info.offset, stop

    def _new(self, relative_path: str) -> int:
        name = f"{self._folder}/{checked_name(relative_path)}" if self._folder else checked_name(relative_path)
        number = self._numbers[relative_path] = len(self.names)
        self._sizes.append(self._source.size(name))
        self.names.append(name)
        return number

    def range(self, item: tuple[int, int, int]) -> ByteRange:
        return ByteRange(self.names[item[0]], item[1], item[2])


Items = Mapping[MetadataIndex, tuple[int, int, int]]


def _item(fqn: str, chunk: ChunkStorageMetadata | None, items: Items) -> tuple[int, int, int]:
    found = items.get(MetadataIndex(fqn, None if chunk is None else chunk.offsets))
    if found is None:
        where = "" if chunk is None else f" at {list(chunk.offsets)}"
        raise IncompleteError(f"its piece{where} has no place in any file", key=fqn)
    return found


def _stored(fqn: str, entry: TensorStorageMetadata, items: Items, files: _Files) -> TensorLeaf:
    shape = tuple(entry.size)
    chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
    if any(len(chunk.sizes) != len(shape) for chunk in chunks):
        raise MalformedError("a chunk has other dims than its tensor", key=fqn)
    places = np.array([_item(fqn, chunk, items) for chunk in chunks], np.int64).reshape(len(chunks), 3)
    starts = np.array([chunk.offsets for chunk in chunks], np.int64).reshape(len(chunks), len(shape))
    extents = np.array([chunk.sizes for chunk in chunks], np.int64).reshape(len(chunks), len(shape))
    dtype = entry.properties.element_type
    table = ShardTable(
        shape=shape,
        dtype=dtype,
        starts=starts,
        stops=starts + extents,
        files=files.names,
        file_ids=places[:, 0],
        byte_starts=places[:, 1],
        byte_stops=places[:, 2],
        framing=Framing.TORCH_ITEM,
    )
    _check_room(fqn, table)
    _refuse_safetensors(table)
    return TensorLeaf(shape, dtype, table)


def _refuse_safetensors(table: ShardTable) -> None:
    """``FileSystemWriter(serialization_format=SAFETENSORS)`` gives every piece the place where the file's header begins
    and the length of the piece alone; torch's zip of a tensor is longer."""
    bare = (table.byte_stops - table.byte_starts == table.numels * table.dtype.item_bytes) & (table.numels > 0)
    if bare.any():
        raise UnsupportedError(
            "its tensors were saved as safetensors under an index that does not say where they are, which torch cannot "
            "read either; save with HuggingFaceStorageWriter, or without serialization_format",
            path=table.files[int(table.file_ids[int(np.flatnonzero(bare)[0])])],
        )


def _check_room(fqn: str, table: ShardTable) -> None:
    small = table.byte_stops - table.byte_starts < table.numels * table.dtype.item_bytes
    if small.any():
        row = int(np.flatnonzero(small)[0])
        raise MalformedError(f"its piece {table.box(row)} is larger than the item that holds it", key=fqn)


def _paths(metadata: Metadata) -> dict[str, Path]:
    """Each entry's path in the tree that was saved; files of before torch 2.4 may have none, and names stand alone."""
    planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return {fqn: _path(planned.get(fqn, (fqn,))) for fqn in metadata.state_dict_metadata}


def _path(found: Any) -> Path:
    is_tuple = isinstance(found, tuple) and 0 < len(found) <= MAX_PATH_PARTS
    if not is_tuple or not all(type(part) in (str, int) for part in found):
        raise MalformedError("the planner's data holds a path of the wrong kind")
    return tuple(found)
