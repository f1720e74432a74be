"""The ``.metadata`` file as columns: every tensor with its shards, every object with its item.

``storage_data`` is keyed by name and offset, because an FSDP chunk is known by where it starts. An empty chunk starts
where another ends and holds nothing, so it is left out before it can be mistaken for a neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.shards import ByteRange, Framing, Ints, ShardTable
from ckpt_tools.core.values import Size, Value
from ckpt_tools.core.wording import listed
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError, errors_name
from ckpt_tools.formats.state_dict.parse import MAX_PATH_PARTS, TensorLeaf, TreePath
from ckpt_tools.serialization.pickle.dcp_metadata import Metadata, MetadataIndex, StorageInfo, TensorStorageMetadata
from ckpt_tools.serialization.pickle.load import loads, refuse_call
from ckpt_tools.stores.source import Source, checked_name

MAX_METADATA_BYTES = 4 << 30
"""A million chunks take 150 MB."""

MAX_ITEMS = 1 << 24
"""Of a list in the tree that was saved. torch makes lists of any length that a path asks for, and never returns."""

_FILE_NAME = re.compile(r"__(\d{1,9})_\d+\.distcp")


@dataclass(frozen=True, slots=True)
class Index:
    """What a ``.metadata`` file says, checked against the files that are there."""

    tensors: Mapping[str, TensorLeaf]
    objects: Mapping[str, ByteRange]
    paths: Mapping[str, TreePath]
    compressed: frozenset[str] = frozenset()
    """The names of those objects whose items are compressed with zstd."""
    mcore_data: Value = None
    """What Megatron-Core keeps in it beside torch's own: more about its tensors, by name."""

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
    data = source.read_all(path, limit_bytes=MAX_METADATA_BYTES)
    with errors_name(path):
        return _index_of(data, source, path)


def _index_of(data: bytes, source: Source, path: str) -> Index:
    metadata = loads(data, path=path)
    del data
    refuse_call(metadata, path)
    if not isinstance(metadata, Metadata):
        raise MalformedError("it does not contain DCP metadata", path=path)
    files = _Files(source, path.rpartition("/")[0])
    items = metadata.storage_data
    tensors: dict[str, TensorLeaf] = {}
    objects: dict[str, ByteRange] = {}
    compressed: set[str] = set()
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[fqn] = _stored(fqn, entry, items, files)
        else:
            objects[fqn] = _object(fqn, items, files)
            if _is_compressed([_info(fqn, None, items)]):
                compressed.add(fqn)
    return Index(tensors, objects, _paths(metadata), frozenset(compressed), metadata.extra.get("mcore_data"))


class _Files:
    """Numbers for file names, each name checked once."""

    def __init__(self, source: Source, folder: str) -> None:
        self._source = source
        self._folder = folder
        self._numbers: dict[str, int] = {}
        self.names: list[str] = []
        self._sizes: list[int] = []

    def places(self, infos: Sequence[StorageInfo]) -> tuple[Ints, Ints, Ints]:
        """File number, start and stop of each item: a microsecond an item, since a checkpoint may have a million.

        Raises IncompleteError.
        """
        numbers = self._column(map(self._number, map(attrgetter("relative_path"), infos)), len(infos))
        starts = self._column(map(attrgetter("offset"), infos), len(infos))
        lengths = self._column(map(attrgetter("length"), infos), len(infos))
        sizes = np.array(self._sizes, np.int64)[numbers]
        self._refuse_cut_off(numbers, sizes, lengths > sizes - starts, infos)
        return numbers, starts, starts + lengths

    @staticmethod
    def _column(values: Iterable[int], count: int) -> Ints:
        return np.fromiter(values, np.int64, count)

    def _refuse_cut_off(
        self, numbers: Ints, sizes: Ints, wrong: NDArray[np.bool_], infos: Sequence[StorageInfo]
    ) -> None:
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            stop = infos[row].offset + infos[row].length
            raise IncompleteError(
                f"it has {int(sizes[row]):,} bytes, but one of its items ends at byte {stop:,}; the file is truncated",
                path=self.names[int(numbers[row])],
            )

    def _number(self, relative_path: str) -> int:
        number = self._numbers.get(relative_path)
        return self._new(relative_path) if number is None else number

    def _new(self, relative_path: str) -> int:
        name = f"{self._folder}/{checked_name(relative_path)}" if self._folder else checked_name(relative_path)
        number = self._numbers[relative_path] = len(self.names)
        self._sizes.append(self._source.size(name))
        self.names.append(name)
        return number


Items = Mapping[MetadataIndex, StorageInfo]

ZSTD = re.compile(r"stream\.zstd/1(?:\..*)?")
"""What torch's ``ZStandard`` calls itself, with its version (checkpoint/_extension.py)."""


def _is_compressed(infos: Sequence[StorageInfo]) -> bool:
    """Whether the items of an entry are compressed with zstd.

    Raises:
        UnsupportedError: they went through anything else, or some are compressed and some are not.
    """
    transformed = list(filter(attrgetter("transform_descriptors"), infos))
    for info in transformed:
        found = info.transform_descriptors or ()
        if len(found) != 1 or ZSTD.fullmatch(found[0]) is None:
            raise UnsupportedError(
                f"its items were written through the stream extensions {listed(found)}, of which only stream.zstd/1 "
                "is supported; save without the others",
                path=info.relative_path,
            )
    if transformed and len(transformed) < len(infos):
        raise UnsupportedError(
            "some pieces of a tensor are compressed and others are not, which torch never writes",
            path=transformed[0].relative_path,
        )
    return bool(transformed)


def _object(fqn: str, items: Items, files: _Files) -> ByteRange:
    numbers, starts, stops = files.places([_info(fqn, None, items)])
    return ByteRange(files.names[int(numbers[0])], int(starts[0]), int(stops[0]))


def _info(fqn: str, offsets: Size | None, items: Items) -> StorageInfo:
    found = items.get(MetadataIndex(fqn, offsets))
    if found is None:
        where = "" if offsets is None else f" at {list(offsets)}"
        raise IncompleteError(f"its piece{where} is not in any file", key=fqn)
    return found


def _extents(sizes: Iterable[Size], num_rows: int, ndim: int) -> Ints:
    return np.fromiter(chain.from_iterable(sizes), np.int64, num_rows * ndim).reshape(num_rows, ndim)


def _stored(fqn: str, entry: TensorStorageMetadata, items: Items, files: _Files) -> TensorLeaf:
    shape = tuple(entry.size)
    chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
    if any(len(chunk.sizes) != len(shape) for chunk in chunks):
        raise MalformedError("a chunk has a different number of dims than its tensor", key=fqn)
    infos = [_info(fqn, chunk.offsets, items) for chunk in chunks]
    is_compressed = _is_compressed(infos)
    numbers, byte_starts, byte_stops = files.places(infos)
    dtype = entry.properties.element_type
    framing = Framing.ZSTD_ITEM if is_compressed else Framing.TORCH_ITEM
    if len(chunks) == 1 and chunks[0].sizes == shape and not any(chunks[0].offsets):
        at = ByteRange(files.names[int(numbers[0])], int(byte_starts[0]), int(byte_stops[0]))
        table = ShardTable.whole(shape, dtype, at, framing=framing)
    else:
        starts = _extents(map(attrgetter("offsets"), chunks), len(chunks), len(shape))
        extents = _extents(map(attrgetter("sizes"), chunks), len(chunks), len(shape))
        table = ShardTable(
            shape=shape,
            dtype=dtype,
            starts=starts,
            stops=starts + extents,
            files=files.names,
            file_ids=numbers,
            byte_starts=byte_starts,
            byte_stops=byte_stops,
            framing=framing,
        )
    if not is_compressed:
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
        raise MalformedError(
            f"its piece at {list(table.box(row).start)} is larger than the item that holds it", key=fqn
        )


def _paths(metadata: Metadata) -> dict[str, TreePath]:
    """Each entry's path in the tree that was saved; files of before torch 2.4 may have none, and names stand alone."""
    planned = {} if metadata.planner_data is None else metadata.planner_data
    if not isinstance(planned, dict):
        raise MalformedError("the planner's data is not a dict of paths")
    return {fqn: _path(planned.get(fqn, (fqn,))) for fqn in metadata.state_dict_metadata}


def _path(found: Any) -> TreePath:
    is_tuple = isinstance(found, tuple) and 0 < len(found) <= MAX_PATH_PARTS
    if not is_tuple or not all(type(part) is str or (type(part) is int and 0 <= part < MAX_ITEMS) for part in found):
        raise MalformedError("the planner's data contains a path of the wrong type")
    return tuple(found)
