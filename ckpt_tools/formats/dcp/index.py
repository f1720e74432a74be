"""The ``.metadata`` file as columns: every tensor with its shards, every object with its item.

``storage_data`` is keyed by name and offset, because an FSDP chunk is known by where it starts. An empty chunk starts
where another ends and holds nothing, so it is left out before it can be mistaken for a neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import join_path
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.shards import ByteRange, Framing, Ints, RowTable, ShardTable
from ckpt_tools.core.values import Size, Value, format_brief
from ckpt_tools.core.wording import format_count, join_names
from ckpt_tools.errors import (
    FormatError,
    IncompleteError,
    MalformedError,
    UnsafeError,
    UnsupportedError,
    name_file_in_errors,
)
from ckpt_tools.formats.dcp.items import Items as Templates
from ckpt_tools.formats.dcp.names import DATA, METADATA
from ckpt_tools.formats.state_dict.leaf import TensorLeaf
from ckpt_tools.formats.state_dict.parse import MAX_PATH_PARTS, TreePath
from ckpt_tools.serialization.pickle.dcp_metadata import Metadata, MetadataIndex, StorageInfo, TensorStorageMetadata
from ckpt_tools.serialization.pickle.load import check_pickle_start, loads, refuse_call
from ckpt_tools.serialization.torch_zip import PICKLE_BYTES, read_item_value
from ckpt_tools.serialization.unread_tensors import explain_unreadable
from ckpt_tools.serialization.zstd import open_zstd_stream
from ckpt_tools.stores.source import Source, check_file_name
from ckpt_tools.trainers.run_folders import get_parent_folder

MAX_METADATA_BYTES = 4 << 30
"""A million chunks take 150 MB."""

MAX_ITEMS = 1 << 24
"""Maximum position in a list of the saved tree: torch makes lists of any length that a path asks for."""

_FILE_NAME = re.compile(r"__(\d{1,9})_\d+\.distcp")

Copy = tuple[ShardTable, ShardTable]


@dataclass(frozen=True, slots=True)
class Index:
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
    copies: Mapping[str, Sequence[Copy]] = field(default_factory=dict)
    """Chunks that several ranks saved, each for itself: the one that is read, and another."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """The end of the last item of each file that the index names."""

    @property
    def archives(self) -> tuple[ByteRange, ...]:
        """The items of objects that are not compressed: each is a zip that may hold tensors."""
        return tuple(at for name, at in self.objects.items() if name not in self.compressed)


def most_ranks(indexes: Iterable[Index]) -> int | None:
    """The number of ranks that wrote these together."""
    return max((index.num_ranks for index in indexes if index.num_ranks is not None), default=None)


def read_index(source: Source, path: str) -> Index:
    """The index in the file ``path``.

    Raises:
        FormatError: it breaks a rule, or names a file or a range that is not there. UnsafeError: it names one outside.
    """
    with name_file_in_errors(path):
        return _index_of(source, path)


def _index_of(source: Source, path: str) -> Index:
    check_pickle_start(partial(source.read, path), source.size(path), path=path)
    metadata = loads(source.read_all(path, limit_bytes=MAX_METADATA_BYTES), path=path)
    refuse_call(metadata, path)
    if not isinstance(metadata, Metadata):
        raise MalformedError("it does not contain DCP metadata", path=path)
    files = _Files(source, path.rpartition("/")[0])
    items = metadata.storage_data
    num_ranks = _num_ranks(items.values())  # reading takes items away
    ends, twice = _extents_of_files(items, files)
    looks = _Looks(source)
    tensors: dict[str, TensorLeaf] = {}
    unread: dict[str, str] = {}
    objects: dict[str, ByteRange] = {}
    compressed: set[str] = set()
    planned = {} if metadata.planner_data is None else metadata.planner_data
    if not isinstance(planned, dict):
        raise MalformedError("the planner's data is not a dict of paths")
    # The planner's paths have the order of the saved state dict. That of the metadata is another one, because torch
    # spreads tensors that every rank has whole over the ranks.
    described = metadata.state_dict_metadata
    described = {fqn: described[fqn] for fqn in planned if fqn in described} | described
    for fqn, entry in described.items():
        if isinstance(entry, TensorStorageMetadata):
            try:
                found = _stored(fqn, entry, items, files, looks)
            except MalformedError as error:
                raise MalformedError(error.message, path=error.path, key=error.key or fqn) from error
            if isinstance(found, TensorLeaf):
                tensors[fqn] = found
            else:
                unread[fqn] = found
        else:
            info = _there(items.get(MetadataIndex(fqn)), fqn, None)
            objects[fqn] = files.place(info)
            if _is_compressed([info]):
                compressed.add(fqn)
    if twice is not None:
        raise MalformedError("its item is also that of another piece, or shares bytes with another item", key=twice)
    # Files of before torch 2.4 may have no paths; names then stand alone.
    paths = {fqn: _path(fqn, planned) if planned else (fqn,) for fqn in described}
    unflattened = frozenset(objects.keys() - planned.keys())
    extra = metadata.extra.get("mcore_data")
    is_ordered = tensors.keys() <= planned.keys()
    return Index(
        tensors, objects, paths, frozenset(compressed), extra, unread, unflattened, num_ranks, is_ordered, ends=ends
    )


def _extents_of_files(items: Items, files: _Files) -> tuple[dict[str, int], str | None]:
    """The end of the last item of each file; and the name of an item that shares bytes with another, but for an equal
    item of another name, which is tied to it."""
    keys = [key for key, info in items.items() if info.length]
    numbers, starts, stops = files.places([items[key] for key in keys])
    order = np.lexsort((starts, numbers))
    numbers, starts, stops = numbers[order], starts[order], stops[order]
    last = np.flatnonzero(np.diff(numbers, append=-1))
    ends = {files.names[numbers[row]]: int(stops[row]) for row in last}
    shared = np.flatnonzero((numbers[1:] == numbers[:-1]) & (starts[1:] < stops[:-1]))
    for row in shared.tolist():
        one, other = keys[order[row]], keys[order[row + 1]]
        if one.fqn == other.fqn or (starts[row], stops[row]) != (starts[row + 1], stops[row + 1]):
            return ends, other.fqn
    return ends, None


def notes_on_files(source: Source, indexes: Mapping[str, Index]) -> list[Note]:
    """Files of the folders, and ends of files, that hold no item: a later save by fewer ranks leaves such files, and so
    does a mixture of two saves."""
    ends = {file: end for index in indexes.values() for file, end in index.ends.items()}
    folders = {get_parent_folder(path) for path in indexes}
    data = (
        path for path in source.files if DATA.fullmatch(path.rpartition("/")[2]) and get_parent_folder(path) in folders
    )
    unnamed = [path for path in data if path not in ends]
    more = {file: source.files[file] - end for file, end in ends.items() if source.files[file] > end}
    unnamed += [f"{format_count(rest, 'byte')} at the end of {file}" for file, rest in more.items()]
    return [Note(Outcome.DOUBTFUL, what, f"not read: no item in {METADATA} is there") for what in unnamed]


def _num_ranks(items: Iterable[StorageInfo]) -> int | None:
    """By the files of all items; of a rank that holds no element, torch lists a piece without any."""
    names = (path.rpartition("/")[2] for path in set(map(attrgetter("relative_path"), items)))
    ranks = [int(match[1]) for name in names if (match := _FILE_NAME.fullmatch(name))]
    return max(ranks) + 1 if ranks else None


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
        files = map(self._number, map(attrgetter("relative_path"), infos))
        others = (map(attrgetter(name), infos) for name in ("offset", "length"))
        numbers, starts, lengths = (np.fromiter(column, np.int64, len(infos)) for column in (files, *others))
        wrong = np.flatnonzero(lengths > np.array(self._sizes, np.int64)[numbers] - starts)
        if wrong.size:
            row = int(wrong[0])
            raise self._cut_off(int(numbers[row]), infos[row].offset + infos[row].length)
        return numbers, starts, starts + lengths

    def place(self, info: StorageInfo) -> ByteRange:
        """The same of one item."""
        number, stop = self._number(info.relative_path), info.offset + info.length
        if stop > self._sizes[number]:
            raise self._cut_off(number, stop)
        return ByteRange(self.names[number], info.offset, stop)

    def _cut_off(self, number: int, stop: int) -> IncompleteError:
        size = self._sizes[number]
        return IncompleteError(
            f"it has {size:,} bytes, but one of its items ends at byte {stop:,}; the file is truncated",
            path=self.names[number],
        )

    def _number(self, relative_path: str) -> int:
        number = self._numbers.get(relative_path)
        if number is None:
            name = (
                f"{self._folder}/{check_file_name(relative_path)}" if self._folder else check_file_name(relative_path)
            )
            number = self._numbers[relative_path] = len(self.names)
            self._sizes.append(self._source.size(name))
            self.names.append(name)
        return number


@dataclass(slots=True)
class _Looks:
    """Looks into the items of tensors that may not be plain, such as quantized ones of torchao.

    The index states shape and dtype of a tensor, and not its class. A plain tensor has an item of a known length, as
    current torch writes it. Of items of any other length, one is opened for each shape, dtype and length.
    """

    source: Source
    _plain: Templates = field(default_factory=lambda: Templates({}))
    _known: dict[tuple[Shape, DType, int], str | None] = field(default_factory=dict)

    def why_unread(self, shape: Shape, dtype: DType, at: ByteRange, *, is_compressed: bool) -> str | None:
        """Why the tensor whose piece of ``shape`` is at ``at`` cannot be read; None if it can.

        The length of a compressed item is its own, so that most are looked into. That of complex numbers does not tell
        whether they are conjugated.
        """
        shape, length = tuple(shape), at.stop - at.start
        may_be_flagged = dtype in (DType.COMPLEX32, DType.COMPLEX64, DType.COMPLEX128)
        if not is_compressed and not may_be_flagged and length == self._plain.tensor(shape, dtype).num_bytes:
            return None
        key = (shape, dtype, length)
        if key not in self._known:
            self._known[key] = self._look(at, is_compressed=is_compressed)
        return self._known[key]

    def _look(self, at: ByteRange, *, is_compressed: bool) -> str | None:
        """Reason from the item's pickle; None if it is damaged, which reading finds."""
        size = at.stop - at.start

        def read(start: int, stop: int) -> bytes:
            return self.source.read(at.file, at.start + start, at.start + stop)

        with suppress(FormatError, UnsafeError):
            if is_compressed:
                head = open_zstd_stream(read, size, at.file).read(PICKLE_BYTES)
            else:
                head = read(0, min(PICKLE_BYTES, size))
            return explain_unreadable(read_item_value(head, at.file))
        return None


Items = dict[MetadataIndex, StorageInfo]

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
                f"its items were written through the stream extensions {join_names(found)}, of which only "
                f"stream.zstd/1 "
                "is supported; save without the others",
                path=info.relative_path,
            )
    if transformed and len(transformed) < len(infos):
        raise UnsupportedError(
            "some pieces of a tensor are compressed and others are not, which torch never writes",
            path=transformed[0].relative_path,
        )
    return bool(transformed)


def _there(found: StorageInfo | None, fqn: str, offsets: Size | None) -> StorageInfo:
    if found is None:
        where = "" if offsets is None else f" at {list(offsets)}"
        raise IncompleteError(f"its piece{where} is not in any file", key=fqn)
    return found


def _extents(sizes: Iterable[Size], num_rows: int, ndim: int) -> Ints:
    return np.fromiter(chain.from_iterable(sizes), np.int64, num_rows * ndim).reshape(num_rows, ndim)


def _stored(fqn: str, entry: TensorStorageMetadata, items: Items, files: _Files, looks: _Looks) -> TensorLeaf | str:
    dtype = entry.properties.dtype.dtype
    if dtype is None:
        return f"it has the dtype {entry.properties.dtype}, which is not supported"
    if len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.size and not any(entry.chunks[0].offsets):
        return _stored_whole(fqn, entry, dtype, items, files, looks)
    return _stored_in_pieces(fqn, entry, dtype, items, files, looks)


def _stored_whole(
    fqn: str, entry: TensorStorageMetadata, dtype: DType, items: Items, files: _Files, looks: _Looks
) -> TensorLeaf | str:
    """A tensor in one piece, as most are where a rank keeps whole tensors: 200,000 take a tenth of the time, and half
    the memory because the description of a piece is dropped when it was used."""
    offsets = entry.chunks[0].offsets
    if 0 in entry.size:
        return _stored_in_pieces(fqn, entry, dtype, items, files, looks)
    info = _there(items.pop(MetadataIndex(fqn, offsets), None), fqn, offsets)
    is_compressed = bool(info.transform_descriptors) and _is_compressed([info])
    framing = Framing.ZSTD_ITEM if is_compressed else Framing.TORCH_ITEM
    at = files.place(info)
    table = ShardTable.whole(entry.size, dtype, at, framing=framing)
    num_bytes = prod(entry.size) * dtype.item_bytes
    if not is_compressed and info.length == num_bytes:
        raise _safetensors(table.files[0])
    reason = looks.why_unread(entry.size, dtype, at, is_compressed=is_compressed)
    if reason is not None:
        return reason
    if not is_compressed and info.length < num_bytes:
        raise _no_room(fqn, offsets)
    return TensorLeaf(table.shape, dtype, table)


def _stored_in_pieces(
    fqn: str, entry: TensorStorageMetadata, dtype: DType, items: Items, files: _Files, looks: _Looks
) -> TensorLeaf | str:
    shape = tuple(entry.size)
    chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
    if any(len(chunk.sizes) != len(shape) for chunk in chunks):
        raise MalformedError("a chunk has a different number of dims than its tensor", key=fqn)
    infos = [_there(items.get(MetadataIndex(fqn, chunk.offsets)), fqn, chunk.offsets) for chunk in chunks]
    is_compressed = _is_compressed(infos)
    numbers, byte_starts, byte_stops = files.places(infos)
    starts = _extents(map(attrgetter("offsets"), chunks), len(chunks), len(shape))
    extents = _extents(map(attrgetter("sizes"), chunks), len(chunks), len(shape))
    table = RowTable(
        shape=shape,
        dtype=dtype,
        starts=starts,
        stops=starts + extents,
        files=files.names,
        file_ids=numbers,
        byte_starts=byte_starts,
        byte_stops=byte_stops,
        framing=Framing.ZSTD_ITEM if is_compressed else Framing.TORCH_ITEM,
    )
    held, needed = table.byte_stops - table.byte_starts, table.numels * dtype.item_bytes
    if not is_compressed and (bare := np.flatnonzero((held == needed) & (needed > 0))).size:
        raise _safetensors(table.files[int(table.file_ids[int(bare[0])])])
    if chunks:
        reason = looks.why_unread(chunks[0].sizes, dtype, table.get_byte_range(0), is_compressed=is_compressed)
        if reason is not None:
            return reason
    if not is_compressed and (small := np.flatnonzero(held < needed)).size:
        raise _no_room(fqn, table.get_box(int(small[0])).start)
    return TensorLeaf(shape, dtype, table)


def _safetensors(file: str) -> UnsupportedError:
    """``FileSystemWriter(serialization_format=SAFETENSORS)`` gives every piece the place where the file's header begins
    and the length of the piece alone; torch's zip of a tensor is longer."""
    return UnsupportedError(
        "its tensors were saved as safetensors under an index that does not say where they are, which torch cannot "
        "read either; save with HuggingFaceStorageWriter, or without serialization_format",
        path=file,
    )


def _no_room(fqn: str, offsets: Sequence[int]) -> MalformedError:
    return MalformedError(f"its piece at {list(offsets)} is larger than the item that holds it", key=fqn)


def _path(fqn: str, planned: Mapping[Any, Any]) -> TreePath:
    """The path of an entry, whose name torch makes of it: a damaged one is seen by that (``_nested_dict.py``)."""
    found: Any = planned.get(fqn)
    is_tuple = isinstance(found, tuple) and 0 < len(found) <= MAX_PATH_PARTS
    if not is_tuple or not all(type(part) is str or (type(part) is int and 0 <= part < MAX_ITEMS) for part in found):
        raise MalformedError("the planner's data has no path for it, or one of the wrong type", key=fqn)
    if join_path(found) != fqn:
        raise MalformedError(f"the planner's data has another path for it: {format_brief(found)}", key=fqn)
    return tuple(found)
