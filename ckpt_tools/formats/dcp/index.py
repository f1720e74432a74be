"""The ``.metadata`` file as columns: every tensor with its shards, every object with its item.

``storage_data`` is keyed by name and offset, because an FSDP chunk is known by where it starts. An empty chunk starts
where another ends and holds nothing, so it is left out before it can be mistaken for a neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import TreePath, join_path
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.shards import ByteRange, Framing, Ints, RowTable, ShardTable
from ckpt_tools.core.values import Size, Value, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError, name_file_in_errors
from ckpt_tools.formats.dcp.item_inspector import ItemInspector
from ckpt_tools.formats.dcp.names import DATA_FILE_NAME, METADATA
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.serialization.pickle.dcp_metadata import Metadata, MetadataIndex, StorageInfo, TensorStorageMetadata
from ckpt_tools.serialization.pickle.load import check_pickle_start, loads, refuse_call
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.state_tree.prefixes import MAX_PATH_PARTS
from ckpt_tools.stores.source import Source, check_file_name
from ckpt_tools.trainers.saved import get_parent_folder

MAX_METADATA_BYTES = 4 << 30
"""A million chunks take 150 MB."""

MAX_ITEMS = 1 << 24
"""Maximum position in a list of the saved tree: torch makes lists of any length that a path asks for."""

_FILE_NAME = re.compile(r"__(\d{1,9})_\d+\.distcp")

ChunkCopy = tuple[ShardTable, ShardTable]


@dataclass(frozen=True, slots=True)
class DcpIndex:
    """Content of a ``.metadata`` file, checked against the files that are there."""

    tensors: Mapping[str, TensorLeaf]
    objects: Mapping[str, ByteRange]
    paths: Mapping[str, TreePath]
    compressed: frozenset[str] = frozenset()
    """The names of those objects whose items are compressed with zstd."""
    mcore_data: Value = None
    """Facts about tensors by name that Megatron-Core keeps beside torch's own."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Tensors that cannot be read, and why."""
    unflattened: frozenset[str] = frozenset()
    """Objects that were saved as they are, with the dicts and tensors in them: all objects of
    ``DefaultSavePlanner(flatten_state_dict=False)``."""
    num_ranks: int | None = None
    """One more than the highest rank that wrote a file, as the files are named."""
    is_ordered: bool = True
    """True if the tensors are in the order of the saved state dict."""
    copies: Mapping[str, Sequence[ChunkCopy]] = field(default_factory=dict)
    """Chunks that several ranks saved, each for itself: the one that is read, and another."""
    file_ends: Mapping[str, int] = field(default_factory=dict)
    """The end of the last item of each file that the index names."""

    @property
    def archives(self) -> tuple[ByteRange, ...]:
        """The items of objects that are not compressed: each is a zip that may hold tensors."""
        return tuple(at for name, at in self.objects.items() if name not in self.compressed)


def count_ranks(indexes: Iterable[DcpIndex]) -> int | None:
    """The number of ranks that wrote these together."""
    return max((index.num_ranks for index in indexes if index.num_ranks is not None), default=None)


def read_index(source: Source, path: str) -> DcpIndex:
    """The index in the file ``path``.

    Raises:
        FormatError: it breaks a rule, or names a file or a range that is not there. UnsafeError: it names one outside.
    """
    with name_file_in_errors(path):
        return _parse_index(source, path)


def _parse_index(source: Source, path: str) -> DcpIndex:
    check_pickle_start(partial(source.read, path), source.size(path), path=path)
    metadata = loads(source.read_all(path, limit_bytes=MAX_METADATA_BYTES), path=path)
    refuse_call(metadata, path)
    if not isinstance(metadata, Metadata):
        raise MalformedError("it does not contain DCP metadata", path=path)
    file_table = _FileTable(source, path.rpartition("/")[0])
    items = metadata.storage_data
    # Counted before leaves are made, which takes items away. Ranks without elements count: torch lists an empty piece.
    data_files = {info.relative_path for info in items.values()}
    matches = (_FILE_NAME.fullmatch(path.rpartition("/")[2]) for path in data_files)
    num_ranks = max((int(match[1]) + 1 for match in matches if match), default=None)
    # A checkpoint may have a million items. They are compared as columns of numpy, and ``_make_whole_leaf`` drops each
    # description when its table is built, which halves the peak of memory.
    file_ends, shared_item_name = _measure_files(items, file_table)
    inspector = ItemInspector(source)
    tensors: dict[str, TensorLeaf] = {}
    unread: dict[str, str] = {}
    objects: dict[str, ByteRange] = {}
    compressed: set[str] = set()
    planner_paths = {} if metadata.planner_data is None else metadata.planner_data
    if not isinstance(planner_paths, dict):
        raise MalformedError("the planner's data is not a dict of paths")
    # The planner's paths have the order of the saved state dict. That of the metadata is another one, because torch
    # spreads tensors that every rank has whole over the ranks.
    entry_metadata = metadata.state_dict_metadata
    entry_metadata = {fqn: entry_metadata[fqn] for fqn in planner_paths if fqn in entry_metadata} | entry_metadata
    for fqn, entry in entry_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            try:
                stored = _make_leaf(fqn, entry, items, file_table, inspector)
            except MalformedError as error:
                raise MalformedError(error.message, path=error.path, key=error.key or fqn) from error
            if isinstance(stored, TensorLeaf):
                tensors[fqn] = stored
            else:
                unread[fqn] = stored
        else:
            item_info = _require_item(items.get(MetadataIndex(fqn)), fqn, None)
            objects[fqn] = file_table.locate_item(item_info)
            if _is_compressed([item_info]):
                compressed.add(fqn)
    if shared_item_name is not None:
        raise MalformedError(
            "its item is also that of another piece, or shares bytes with another item", key=shared_item_name
        )
    # Files of before torch 2.4 may have no paths; names then stand alone.
    paths = {fqn: _get_path(fqn, planner_paths) if planner_paths else (fqn,) for fqn in entry_metadata}
    unflattened = frozenset(objects.keys() - planner_paths.keys())
    mcore_data = metadata.extra.get("mcore_data")
    is_ordered = tensors.keys() <= planner_paths.keys()
    return DcpIndex(
        tensors,
        objects,
        paths,
        frozenset(compressed),
        mcore_data,
        unread,
        unflattened,
        num_ranks,
        is_ordered,
        file_ends=file_ends,
    )


def _measure_files(items: StorageItems, file_table: _FileTable) -> tuple[dict[str, int], str | None]:
    """The end of the last item of each file; and the name of an item that shares bytes with another, but for an equal
    item of another name, which is tied to it."""
    # Rows sorted by (file, start):
    #   file    0    0    0  | 1    1
    #   start   0   10   20  | 0    8     overlap: the next row is of the same file and starts before this one stops
    #   stop   10   25*  30  | 8   16     (* overlaps); the last row of a file has the file's end
    # Two names with the very same range are tied, which is allowed.
    keys = [key for key, info in items.items() if info.length]
    file_numbers, starts, stops = file_table.locate_items([items[key] for key in keys])
    order = np.lexsort((starts, file_numbers))
    file_numbers, starts, stops = file_numbers[order], starts[order], stops[order]
    last_rows = np.flatnonzero(np.diff(file_numbers, append=-1))
    file_ends = {file_table.names[file_numbers[row]]: int(stops[row]) for row in last_rows}
    overlapping_rows = np.flatnonzero((file_numbers[1:] == file_numbers[:-1]) & (starts[1:] < stops[:-1]))
    for row in overlapping_rows.tolist():
        one, other = keys[order[row]], keys[order[row + 1]]
        if one.fqn == other.fqn or (starts[row], stops[row]) != (starts[row + 1], stops[row + 1]):
            return file_ends, other.fqn
    return file_ends, None


def note_unread_files(source: Source, indexes: Mapping[str, DcpIndex]) -> list[Note]:
    """Files of the folders, and ends of files, that hold no item: a later save by fewer ranks leaves such files, and so
    does a mixture of two saves."""
    file_ends = {file: end for index in indexes.values() for file, end in index.file_ends.items()}
    folders = {get_parent_folder(path) for path in indexes}
    data_files = (
        path
        for path in source.files
        if DATA_FILE_NAME.fullmatch(path.rpartition("/")[2]) and get_parent_folder(path) in folders
    )
    unlisted = [path for path in data_files if path not in file_ends]
    trailing_bytes = {file: source.files[file] - end for file, end in file_ends.items() if source.files[file] > end}
    unlisted += [f"{format_count(rest, 'byte')} at the end of {file}" for file, rest in trailing_bytes.items()]
    return [Note(Outcome.DOUBTFUL, what, f"not read: no item in {METADATA} is there") for what in unlisted]


class _FileTable:
    """Numbers for file names, each name checked once."""

    def __init__(self, source: Source, folder: str) -> None:
        self._source = source
        self._folder = folder
        self._numbers: dict[str, int] = {}
        self.names: list[str] = []
        self._sizes: list[int] = []

    def locate_items(self, item_infos: Sequence[StorageInfo]) -> tuple[Ints, Ints, Ints]:
        """File number, start and stop of each item: a microsecond an item, since a checkpoint may have a million.

        Raises IncompleteError.
        """
        files = map(self._get_file_number, map(attrgetter("relative_path"), item_infos))
        offset_and_length = (map(attrgetter(name), item_infos) for name in ("offset", "length"))
        numbers, starts, lengths = (
            np.fromiter(column, np.int64, len(item_infos)) for column in (files, *offset_and_length)
        )
        truncated_rows = np.flatnonzero(lengths > np.array(self._sizes, np.int64)[numbers] - starts)
        if truncated_rows.size:
            row = int(truncated_rows[0])
            raise self._make_truncated_error(int(numbers[row]), item_infos[row].offset + item_infos[row].length)
        return numbers, starts, starts + lengths

    def locate_item(self, item_info: StorageInfo) -> ByteRange:
        """File, start and stop of one item. Raises IncompleteError."""
        number, stop = self._get_file_number(item_info.relative_path), item_info.offset + item_info.length
        if stop > self._sizes[number]:
            raise self._make_truncated_error(number, stop)
        return ByteRange(self.names[number], item_info.offset, stop)

    def _make_truncated_error(self, file_number: int, item_stop: int) -> IncompleteError:
        size = self._sizes[file_number]
        return IncompleteError(
            f"it has {size:,} bytes, but one of its items ends at byte {item_stop:,}; the file is truncated",
            path=self.names[file_number],
        )

    def _get_file_number(self, relative_path: str) -> int:
        number = self._numbers.get(relative_path)
        if number is None:
            name = (
                f"{self._folder}/{check_file_name(relative_path)}" if self._folder else check_file_name(relative_path)
            )
            number = self._numbers[relative_path] = len(self.names)
            self._sizes.append(self._source.size(name))
            self.names.append(name)
        return number


StorageItems = dict[MetadataIndex, StorageInfo]

ZSTD = re.compile(r"stream\.zstd/1(?:\..*)?")
"""What torch's ``ZStandard`` calls itself, with its version (checkpoint/_extension.py)."""


def _is_compressed(item_infos: Sequence[StorageInfo]) -> bool:
    """Whether the items of an entry are compressed with zstd.

    Raises:
        UnsupportedError: they went through anything else, or some are compressed and some are not.
    """
    transformed_infos = list(filter(attrgetter("transform_descriptors"), item_infos))
    for info in transformed_infos:
        descriptors = info.transform_descriptors or ()
        if len(descriptors) != 1 or ZSTD.fullmatch(descriptors[0]) is None:
            raise UnsupportedError(
                f"its items were written through the stream extensions {join_names(descriptors)}, of which only "
                "stream.zstd/1 is supported; save without the others",
                path=info.relative_path,
            )
    if transformed_infos and len(transformed_infos) < len(item_infos):
        raise UnsupportedError(
            "some pieces of a tensor are compressed and others are not, which torch never writes",
            path=transformed_infos[0].relative_path,
        )
    return bool(transformed_infos)


def _require_item(item_info: StorageInfo | None, fqn: str, offsets: Size | None) -> StorageInfo:
    if item_info is None:
        where = "" if offsets is None else f" at {list(offsets)}"
        raise IncompleteError(f"its piece{where} is not in any file", key=fqn)
    return item_info


def _stack_sizes(sizes: Iterable[Size], num_rows: int, ndim: int) -> Ints:
    return np.fromiter(chain.from_iterable(sizes), np.int64, num_rows * ndim).reshape(num_rows, ndim)


def _make_leaf(
    fqn: str, entry: TensorStorageMetadata, items: StorageItems, file_table: _FileTable, inspector: ItemInspector
) -> TensorLeaf | str:
    dtype = entry.properties.dtype.dtype
    if dtype is None:
        return f"it has the dtype {entry.properties.dtype}, which is not supported"
    if len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.size and not any(entry.chunks[0].offsets):
        return _make_whole_leaf(fqn, entry, dtype, items, file_table, inspector)
    return _make_chunked_leaf(fqn, entry, dtype, items, file_table, inspector)


def _make_whole_leaf(
    fqn: str,
    entry: TensorStorageMetadata,
    dtype: DType,
    items: StorageItems,
    file_table: _FileTable,
    inspector: ItemInspector,
) -> TensorLeaf | str:
    """A tensor in one piece, as most are where a rank keeps whole tensors: 200,000 take a tenth of the time, and half
    the memory because the description of a piece is dropped when it was used."""
    offsets = entry.chunks[0].offsets
    if 0 in entry.size:
        return _make_chunked_leaf(fqn, entry, dtype, items, file_table, inspector)
    item_info = _require_item(items.pop(MetadataIndex(fqn, offsets), None), fqn, offsets)
    is_compressed = bool(item_info.transform_descriptors) and _is_compressed([item_info])
    framing = Framing.ZSTD_ITEM if is_compressed else Framing.TORCH_ITEM
    item_range = file_table.locate_item(item_info)
    table = ShardTable.whole(entry.size, dtype, item_range, framing=framing)
    num_bytes = prod(entry.size) * dtype.item_bytes
    if not is_compressed and item_info.length == num_bytes:
        raise _make_safetensors_error(table.files[0])
    reason = inspector.find_unread_reason(entry.size, dtype, item_range, is_compressed=is_compressed)
    if reason is not None:
        return reason
    if not is_compressed and item_info.length < num_bytes:
        raise _make_oversized_error(fqn, offsets)
    return TensorLeaf(table.shape, dtype, table)


def _make_chunked_leaf(
    fqn: str,
    entry: TensorStorageMetadata,
    dtype: DType,
    items: StorageItems,
    file_table: _FileTable,
    inspector: ItemInspector,
) -> TensorLeaf | str:
    shape = tuple(entry.size)
    chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
    if any(len(chunk.sizes) != len(shape) for chunk in chunks):
        raise MalformedError("a chunk has a different number of dims than its tensor", key=fqn)
    item_infos = [_require_item(items.get(MetadataIndex(fqn, chunk.offsets)), fqn, chunk.offsets) for chunk in chunks]
    is_compressed = _is_compressed(item_infos)
    file_numbers, byte_starts, byte_stops = file_table.locate_items(item_infos)
    starts = _stack_sizes(map(attrgetter("offsets"), chunks), len(chunks), len(shape))
    extents = _stack_sizes(map(attrgetter("sizes"), chunks), len(chunks), len(shape))
    table = RowTable(
        shape=shape,
        dtype=dtype,
        starts=starts,
        stops=starts + extents,
        files=file_table.names,
        file_ids=file_numbers,
        byte_starts=byte_starts,
        byte_stops=byte_stops,
        framing=Framing.ZSTD_ITEM if is_compressed else Framing.TORCH_ITEM,
    )
    held_bytes, needed_bytes = table.byte_stops - table.byte_starts, table.numels * dtype.item_bytes
    if not is_compressed and (bare_rows := np.flatnonzero((held_bytes == needed_bytes) & (needed_bytes > 0))).size:
        raise _make_safetensors_error(table.files[int(table.file_ids[int(bare_rows[0])])])
    if chunks:
        reason = inspector.find_unread_reason(
            chunks[0].sizes, dtype, table.get_byte_range(0), is_compressed=is_compressed
        )
        if reason is not None:
            return reason
    if not is_compressed and (short_rows := np.flatnonzero(held_bytes < needed_bytes)).size:
        raise _make_oversized_error(fqn, table.get_box(int(short_rows[0])).start)
    return TensorLeaf(shape, dtype, table)


def _make_safetensors_error(file: str) -> UnsupportedError:
    """``FileSystemWriter(serialization_format=SAFETENSORS)`` gives every piece the place where the file's header begins
    and the length of the piece alone; torch's zip of a tensor is longer."""
    return UnsupportedError(
        "its tensors were saved as safetensors under an index that does not say where they are, which torch cannot "
        "read either; save with HuggingFaceStorageWriter, or without serialization_format",
        path=file,
    )


def _make_oversized_error(fqn: str, offsets: Sequence[int]) -> MalformedError:
    return MalformedError(f"its piece at {list(offsets)} is larger than the item that holds it", key=fqn)


def _get_path(fqn: str, planner_paths: Mapping[Any, Any]) -> TreePath:
    """The path of an entry, whose name torch makes of it: a damaged one is seen by that (``_nested_dict.py``)."""
    tree_path: Any = planner_paths.get(fqn)
    is_tuple = isinstance(tree_path, tuple) and 0 < len(tree_path) <= MAX_PATH_PARTS
    if not is_tuple or not all(
        type(part) is str or (type(part) is int and 0 <= part < MAX_ITEMS) for part in tree_path
    ):
        raise MalformedError("the planner's data has no path for it, or one of the wrong type", key=fqn)
    if join_path(tree_path) != fqn:
        raise MalformedError(f"the planner's data has another path for it: {format_brief(tree_path)}", key=fqn)
    return tuple(tree_path)
