"""A manifest as a DCP of N ranks, which ``torch.distributed.checkpoint.load`` resumes at any number of them.

Parameters and their state are cut by rows as FSDP2 cuts them, chunk r into the file of rank r. Whole tensors (buffers,
0-d tensors, the user's own) are written once, in the smallest file; objects are items too. A tied name has an entry of
its own which points at the items of its owner: its bytes are written once. ``.metadata`` is the last file.

A checkpoint of a thousand ranks has millions of items. Tensors of one shape share their chunks, and the position of
each item follows from the lengths of a few templates; so a file's segments are made when they are needed, and only
those of the files being written are kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, FileLayoutCache, FileSpec, LazyFile, Literal, Payload, Segment
from ckpt_tools.core.limits import check_ranks_by_rows
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.shards import Ints
from ckpt_tools.core.values import GlobalRef, Opaque, Size
from ckpt_tools.formats.dcp.items import DcpItem, ItemFactory
from ckpt_tools.formats.state_dict.build import Entries
from ckpt_tools.serialization.pickle.dcp_metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorStorageMetadata,
)
from ckpt_tools.serialization.pickle.dump import StreamedDict, dumps

METADATA = ".metadata"

VERSION = "1.0.0"
"""filesystem.py, CURRENT_DCP_VERSION of torch 2.15.0."""


def build_dcp_files(manifest: Manifest, entries: Entries, world_size: int, folder: str = "") -> list[FileSpec]:
    """The files of one DCP, which lies in ``folder`` of the output: ``.metadata`` is the last one.

    Raises:
        UsageError: ``world_size`` is larger than is useful.
    """
    placement = place_items(manifest, entries, world_size)
    prefix = f"{folder}/" if folder else ""
    metadata = FileLayout(f"{prefix}{METADATA}", (Literal(dumps(build_metadata(entries, placement))),))
    return [*RankFiles(placement, prefix).list_files(), metadata]


@dataclass(frozen=True, slots=True)
class UncutItem:
    """An item that is not cut: a tensor, or an object where ``key`` is None."""

    item: DcpItem
    key: StateKey | None
    rank: int
    offset: int


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Cut of tensors of one shape and dtype, and the item of each chunk."""

    boxes: tuple[Box, ...]
    items: tuple[DcpItem, ...]
    lengths: Ints


@dataclass(frozen=True, slots=True)
class CutTensor:
    """A tensor cut by rows; chunk r is at ``offsets[r]`` of the file of rank r."""

    key: StateKey
    chunks: ChunkLayout
    offsets: Ints


@dataclass(frozen=True, slots=True)
class EmptyRanks:
    """The ranks from ``first_rank`` on, which hold no element. As in torch's own files, each writes an empty piece,
    here of the tensor ``tensor_name`` alone, and the index lists the last one."""

    first_rank: int
    tensor_name: str


@dataclass(frozen=True, slots=True)
class ItemPlacement:
    """Places of all items of a checkpoint. Names are those of the entries, without aliases.

    ``file_sizes`` are the bytes of each rank's file, 0 where a rank has none.
    """

    tensors: Mapping[StateKey, TensorEntry]
    uncut_items: Mapping[str, UncutItem]
    cut_tensors: Mapping[str, CutTensor]
    file_sizes: Ints
    owners: Mapping[StateKey, StateKey] = field(default_factory=dict)
    """Tensors that another one is read for, such as a weight for the fp32 copy of it that the source lacks."""
    empty_ranks: EmptyRanks | None = None


def place_items(manifest: Manifest, entries: Entries, world_size: int) -> ItemPlacement:
    """Every item in the file of a rank: whole ones first, spread so that the files are of one size.

    Raises:
        UsageError: ``world_size`` is larger than is useful.
    """
    # rank 0:  | object | whole tensor |  chunk 0 of v | chunk 0 of w |
    # rank 1:  | whole tensor |           chunk 1 of v | chunk 1 of w |
    #           uncut items: each in      chunks, in the order
    #           the smallest file so far  of the entries
    # The bytes of the chunks are counted first, so that the uncut items even out the files. An offset is the sum of the
    # lengths before it: no segment is built here.
    check_ranks_by_rows(manifest, world_size)
    item_factory = ItemFactory(manifest.tensors)
    chunk_cache = _ChunkCache(item_factory, world_size)
    chunks_by_name = {
        name: chunk_cache.get_layout(manifest.tensors[key])
        for name, key in entries.tensors.items()
        if _is_cut_by_rows(manifest, key)
    }
    cut_bytes = np.zeros(world_size, np.int64)
    for chunk_layout in chunks_by_name.values():
        cut_bytes[: len(chunk_layout.lengths)] += chunk_layout.lengths
    uncut_items = _balance_items(_iter_uncut_items(manifest, entries, item_factory, chunks_by_name), cut_bytes)
    file_ends = np.zeros(world_size, np.int64)
    for uncut_item in uncut_items.values():
        file_ends[uncut_item.rank] += uncut_item.item.num_bytes
    cut_tensors = {}
    for name, chunk_layout in chunks_by_name.items():
        cut_tensors[name] = CutTensor(
            entries.tensors[name], chunk_layout, file_ends[: len(chunk_layout.lengths)].copy()
        )
        file_ends[: len(chunk_layout.lengths)] += chunk_layout.lengths
    empty_files = np.flatnonzero(file_ends == 0)
    if not (empty_files.size and cut_tensors):
        return ItemPlacement(manifest.tensors, uncut_items, cut_tensors, file_ends)
    name, filler = next(iter(cut_tensors.items()))
    file_ends[empty_files] = filler.chunks.lengths[-1]
    return ItemPlacement(
        manifest.tensors, uncut_items, cut_tensors, file_ends, empty_ranks=EmptyRanks(int(empty_files[0]), name)
    )


def _is_cut_by_rows(manifest: Manifest, key: StateKey) -> bool:
    """FSDP2 refuses 0-d parameters and cannot train empty ones."""
    entry = manifest.tensors[key]
    return entry.kind in (Kind.PARAMETER, Kind.STATE) and bool(entry.shape) and 0 not in entry.shape


def split_into_row_chunks(shape: Shape, world_size: int) -> list[Box]:
    """The chunks of a tensor that is cut, chunk r being rank r's; where ranks are left over, the last one is empty.

    FSDP2 cuts dim 0 as ``torch.chunk`` does: ceil(rows / ranks) rows each, fewer for the last, none for the ranks
    behind it. DCP lists the empty chunks of these too. All of them start where the tensor ends, and an item is known by
    its name and its start, so only one of them is kept.
    """
    num_rows = shape[0]
    step = -(-num_rows // world_size)
    starts = list(range(0, num_rows, step))
    if len(starts) < world_size:
        starts.append(num_rows)
    inner, origin = shape[1:], (0,) * (len(shape) - 1)
    return [Box((start, *origin), (min(start + step, num_rows), *inner)) for start in starts]


class _ChunkCache:
    def __init__(self, items: ItemFactory, world_size: int) -> None:
        self._items = items
        self._world_size = world_size
        self._layouts: dict[tuple[Shape, DType], ChunkLayout] = {}

    def get_layout(self, entry: TensorEntry) -> ChunkLayout:
        chunk_layout = self._layouts.get((entry.shape, entry.dtype))
        if chunk_layout is None:
            boxes = tuple(split_into_row_chunks(entry.shape, self._world_size))
            items = tuple(self._items.make_tensor_item(box.shape, entry.dtype) for box in boxes)
            chunk_layout = ChunkLayout(boxes, items, np.array([item.num_bytes for item in items], np.int64))
            self._layouts[entry.shape, entry.dtype] = chunk_layout
        return chunk_layout


def _iter_uncut_items(
    manifest: Manifest, entries: Entries, items: ItemFactory, cut_names: Mapping[str, ChunkLayout]
) -> Iterator[tuple[str, StateKey | None, DcpItem]]:
    """Objects first, as torch writes them."""
    for name, value in entries.objects.items():
        yield name, None, items.make_object_item(value)
    for name, key in entries.tensors.items():
        if name not in cut_names:
            entry = manifest.tensors[key]
            yield name, key, items.make_tensor_item(entry.shape, entry.dtype)


def _balance_items(items: Iterator[tuple[str, StateKey | None, DcpItem]], cut_bytes: Ints) -> dict[str, UncutItem]:
    """Each in the file that is smallest by then."""
    file_loads = [(size, rank) for rank, size in enumerate(cut_bytes.tolist())]
    heapq.heapify(file_loads)
    file_ends = [0] * len(file_loads)
    uncut_items = {}
    for name, key, item in items:
        load, rank = file_loads[0]
        heapq.heapreplace(file_loads, (load + item.num_bytes, rank))
        uncut_items[name] = UncutItem(item, key, rank, file_ends[rank])
        file_ends[rank] += item.num_bytes
    return uncut_items


def make_rank_file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


class RankFiles:
    """The segments of the ranks' files, made when they are asked for."""

    def __init__(self, placement: ItemPlacement, prefix: str = "") -> None:
        self._placement = placement
        self._prefix = prefix
        self._uncut_by_rank: list[list[UncutItem]] = [[] for _ in placement.file_sizes]
        for uncut_item in placement.uncut_items.values():
            self._uncut_by_rank[uncut_item.rank].append(uncut_item)

    def list_files(self) -> list[LazyFile]:
        cache = FileLayoutCache(self.build_file)
        sizes = enumerate(self._placement.file_sizes.tolist())
        return [LazyFile(self._prefix + make_rank_file_name(rank), size, rank, cache) for rank, size in sizes if size]

    def build_file(self, rank: int) -> FileLayout:
        return FileLayout(
            self._prefix + make_rank_file_name(rank), tuple(chain.from_iterable(self._iter_item_segments(rank)))
        )

    def _iter_item_segments(self, rank: int) -> Iterator[list[Segment]]:
        for uncut_item in self._uncut_by_rank[rank]:
            if uncut_item.key is None:
                yield uncut_item.item.segments_at(uncut_item.offset)
            else:
                box = Box.whole(self._placement.tensors[uncut_item.key].shape)
                yield uncut_item.item.segments_with(self._make_payload(uncut_item.key, box), uncut_item.offset)
        for cut_tensor in self._placement.cut_tensors.values():
            if rank < len(cut_tensor.offsets):
                payload = self._make_payload(cut_tensor.key, cut_tensor.chunks.boxes[rank])
                yield cut_tensor.chunks.items[rank].segments_with(payload, int(cut_tensor.offsets[rank]))
        if (empty_ranks := self._placement.empty_ranks) is not None and rank >= empty_ranks.first_rank:
            cut_tensor = self._placement.cut_tensors[empty_ranks.tensor_name]
            yield cut_tensor.chunks.items[-1].segments_with(
                self._make_payload(cut_tensor.key, cut_tensor.chunks.boxes[-1]), 0
            )

    def _make_payload(self, key: StateKey, box: Box) -> Payload:
        entry = self._placement.tensors[key]
        return Payload(self._placement.owners.get(key, key), box, entry.shape, entry.dtype)


def build_metadata(entries: Entries, placement: ItemPlacement) -> Metadata:
    """The index of the checkpoint, as torch would pickle it; descriptions of items are made while they are written."""
    builder = _MetadataBuilder(placement)
    owners = {name: entries.aliases.get(name, name) for name in entries.paths}
    descriptions = {name: builder.describe_entry(owner) for name, owner in owners.items()}
    storage: Any = StreamedDict(
        item for name, owner in owners.items() for item in builder.iter_storage_items(name, owner)
    )
    return Metadata(descriptions, dict(entries.paths), storage, StorageMeta(), VERSION)


class _MetadataBuilder:
    def __init__(self, placement: ItemPlacement) -> None:
        self._placement = placement
        self._properties_cache = _TensorPropertiesCache()
        self._files = [make_rank_file_name(rank) for rank in range(len(placement.file_sizes))]
        self._chunks: dict[int, list[ChunkStorageMetadata]] = {}

    def describe_entry(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        cut_tensor = self._placement.cut_tensors.get(name)
        key = cut_tensor.key if cut_tensor is not None else self._placement.uncut_items[name].key
        if key is None:
            return BytesStorageMetadata()
        entry = self._placement.tensors[key]
        chunks = (
            self._get_chunk_metadata(cut_tensor)
            if cut_tensor is not None
            else [_make_chunk_metadata(Box.whole(entry.shape))]
        )
        return TensorStorageMetadata(self._properties_cache.get_properties(entry.dtype), Size(entry.shape), chunks)

    def iter_storage_items(self, name: str, owner: str) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
        """Place of each item of an entry; an alias has those of its owner."""
        cut_tensor = self._placement.cut_tensors.get(owner)
        if cut_tensor is None:
            uncut_item = self._placement.uncut_items[owner]
            info = StorageInfo(self._files[uncut_item.rank], uncut_item.offset, uncut_item.item.num_bytes)
            # An object has no shape.
            shape = None if uncut_item.key is None else self._placement.tensors[uncut_item.key].shape
            yield MetadataIndex(name) if shape is None else MetadataIndex(name, Size((0,) * len(shape)), 0), info
            return
        lengths, offsets = cut_tensor.chunks.lengths.tolist(), cut_tensor.offsets.tolist()
        files = self._files[: len(lengths)]
        # torch finds an item by its name and the start of its box. All empty chunks of a tensor start where it ends, so
        # one key stands for them. Of the tensor that every empty rank writes, it names the last file, as in torch's own
        # index.
        if self._placement.empty_ranks is not None and self._placement.empty_ranks.tensor_name == owner:
            files[-1], offsets[-1] = self._files[-1], 0
        for rank, (file, offset, length) in enumerate(zip(files, offsets, lengths, strict=True)):
            item_key = MetadataIndex(name, self._get_chunk_metadata(cut_tensor)[rank].offsets, rank)
            yield item_key, StorageInfo(file, offset, length)

    def _get_chunk_metadata(self, cut_tensor: CutTensor) -> list[ChunkStorageMetadata]:
        """One list for all tensors that are cut alike; it is pickled once."""
        cached = self._chunks.get(id(cut_tensor.chunks))
        if cached is None:
            cached = self._chunks[id(cut_tensor.chunks)] = list(map(_make_chunk_metadata, cut_tensor.chunks.boxes))
        return cached


def _make_chunk_metadata(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(box.start), Size(box.shape))


class _TensorPropertiesCache:
    """``TensorProperties`` by dtype, each the same object wherever it is meant.

    Their state has the five fields of torch before 2.8, which later versions read as well.
    """

    def __init__(self) -> None:
        self._layout = Opaque(GlobalRef("torch.serialization", "_get_layout"), ("torch.strided",))
        self._format = Opaque(GlobalRef("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), (0,))
        self._properties: dict[DType, Any] = {}

    def get_properties(self, dtype: DType) -> Any:
        if dtype not in self._properties:
            state = (GlobalRef("torch", dtype.value), self._layout, False, self._format, False)
            kind = GlobalRef("torch.distributed.checkpoint.metadata", "TensorProperties")
            self._properties[dtype] = Opaque(kind, form="new", state=state)
        return self._properties[dtype]
