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
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.rank_limits import check_ranks_by_rows
from ckpt_tools.core.shards import Ints
from ckpt_tools.core.values import GlobalRef, Opaque, Size
from ckpt_tools.formats.dcp.items import Item, Items
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


def dcp_files(manifest: Manifest, entries: Entries, world_size: int, folder: str = "") -> list[FileSpec]:
    """The files of one DCP, which lies in ``folder`` of the output: ``.metadata`` is the last one.

    Raises:
        UsageError: ``world_size`` is larger than is useful.
    """
    placed = place(manifest, entries, world_size)
    prefix = f"{folder}/" if folder else ""
    metadata = FileLayout(f"{prefix}{METADATA}", (Literal(dumps(metadata_of(entries, placed))),))
    return [*RankFiles(placed, prefix).files(), metadata]


@dataclass(frozen=True, slots=True)
class Whole:
    """An item that is not cut: a tensor, or an object where ``key`` is None."""

    item: Item
    key: StateKey | None
    rank: int
    offset: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """Cut of tensors of one shape and dtype, and the item of each chunk."""

    boxes: tuple[Box, ...]
    items: tuple[Item, ...]
    lengths: Ints


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor cut by rows; chunk r is at ``offsets[r]`` of the file of rank r."""

    key: StateKey
    chunks: Chunks
    offsets: Ints


@dataclass(frozen=True, slots=True)
class Idle:
    """The ranks from ``first`` on, which hold no element. As in torch's own files, each writes an empty piece, here of
    the tensor ``name`` alone, and the index lists the last one."""

    first: int
    name: str


@dataclass(frozen=True, slots=True)
class Placed:
    """Places of all items of a checkpoint. Names are those of the entries, without aliases.

    ``sizes`` are the bytes of each rank's file, 0 where a rank has none.
    """

    tensors: Mapping[StateKey, TensorEntry]
    whole: Mapping[str, Whole]
    cut: Mapping[str, Cut]
    sizes: Ints
    owners: Mapping[StateKey, StateKey] = field(default_factory=dict)
    """Tensors that another one is read for, such as a weight for the fp32 copy of it that the source lacks."""
    idle: Idle | None = None


def place(manifest: Manifest, entries: Entries, world_size: int) -> Placed:
    """Every item in the file of a rank: whole ones first, spread so that the files are of one size.

    Raises:
        UsageError: ``world_size`` is larger than is useful.
    """
    check_ranks_by_rows(manifest, world_size)
    items = Items(manifest.tensors)
    chunks = _Cutter(items, world_size)
    cut = {name: chunks.of(manifest.tensors[key]) for name, key in entries.tensors.items() if _is_cut(manifest, key)}
    sizes = np.zeros(world_size, np.int64)
    for found in cut.values():
        sizes[: len(found.lengths)] += found.lengths
    whole = _spread(_whole_items(manifest, entries, items, cut), sizes)
    ends = np.zeros(world_size, np.int64)
    for piece in whole.values():
        ends[piece.rank] += piece.item.num_bytes
    placed = {}
    for name, found in cut.items():
        placed[name] = Cut(entries.tensors[name], found, ends[: len(found.lengths)].copy())
        ends[: len(found.lengths)] += found.lengths
    idle = np.flatnonzero(ends == 0)
    if not (idle.size and placed):
        return Placed(manifest.tensors, whole, placed, ends)
    name, filler = next(iter(placed.items()))
    ends[idle] = filler.chunks.lengths[-1]
    return Placed(manifest.tensors, whole, placed, ends, idle=Idle(int(idle[0]), name))


def _is_cut(manifest: Manifest, key: StateKey) -> bool:
    """FSDP2 refuses 0-d parameters and cannot train empty ones."""
    entry = manifest.tensors[key]
    return entry.kind in (Kind.PARAMETER, Kind.STATE) and bool(entry.shape) and 0 not in entry.shape


def row_chunks(shape: Shape, world_size: int) -> list[Box]:
    """The chunks of a tensor that is cut, chunk r being rank r's; where ranks are left over, the last one is empty.

    FSDP2 cuts dim 0 as ``torch.chunk`` does: ceil(rows / ranks) rows each, fewer for the last, none for the ranks
    behind it. DCP lists the empty chunks of these too. All of them start where the tensor ends, and an item is known by
    its name and its start, so only one of them is kept.
    """
    rows = shape[0]
    step = -(-rows // world_size)
    starts = list(range(0, rows, step))
    if len(starts) < world_size:
        starts.append(rows)
    inner, origin = shape[1:], (0,) * (len(shape) - 1)
    return [Box((start, *origin), (min(start + step, rows), *inner)) for start in starts]


class _Cutter:
    def __init__(self, items: Items, world_size: int) -> None:
        self._items = items
        self._world_size = world_size
        self._known: dict[tuple[Shape, DType], Chunks] = {}

    def of(self, entry: TensorEntry) -> Chunks:
        found = self._known.get((entry.shape, entry.dtype))
        if found is None:
            boxes = tuple(row_chunks(entry.shape, self._world_size))
            items = tuple(self._items.tensor(box.shape, entry.dtype) for box in boxes)
            found = Chunks(boxes, items, np.array([item.num_bytes for item in items], np.int64))
            self._known[entry.shape, entry.dtype] = found
        return found


def _whole_items(
    manifest: Manifest, entries: Entries, items: Items, cut: Mapping[str, Chunks]
) -> Iterator[tuple[str, StateKey | None, Item]]:
    """Objects first, as torch writes them."""
    for name, value in entries.objects.items():
        yield name, None, items.object(value)
    for name, key in entries.tensors.items():
        if name not in cut:
            entry = manifest.tensors[key]
            yield name, key, items.tensor(entry.shape, entry.dtype)


def _spread(found: Iterator[tuple[str, StateKey | None, Item]], sizes: Ints) -> dict[str, Whole]:
    """Each in the file that is smallest by then."""
    loads = [(size, rank) for rank, size in enumerate(sizes.tolist())]
    heapq.heapify(loads)
    ends = [0] * len(loads)
    placed = {}
    for name, key, item in found:
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + item.num_bytes, rank))
        placed[name] = Whole(item, key, rank, ends[rank])
        ends[rank] += item.num_bytes
    return placed


def file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


class RankFiles:
    """The segments of the ranks' files, made when they are asked for."""

    def __init__(self, placed: Placed, prefix: str = "") -> None:
        self._placed = placed
        self._prefix = prefix
        self._whole: list[list[Whole]] = [[] for _ in placed.sizes]
        for piece in placed.whole.values():
            self._whole[piece.rank].append(piece)

    def files(self) -> list[LazyFile]:
        cache = FileLayoutCache(self.file)
        sizes = enumerate(self._placed.sizes.tolist())
        return [LazyFile(self._prefix + file_name(rank), size, rank, cache) for rank, size in sizes if size]

    def file(self, rank: int) -> FileLayout:
        return FileLayout(self._prefix + file_name(rank), tuple(chain.from_iterable(self._items(rank))))

    def _items(self, rank: int) -> Iterator[list[Segment]]:
        for piece in self._whole[rank]:
            if piece.key is None:
                yield piece.item.at(piece.offset)
            else:
                box = Box.whole(self._placed.tensors[piece.key].shape)
                yield piece.item.holding(self._payload(piece.key, box), piece.offset)
        for cut in self._placed.cut.values():
            if rank < len(cut.offsets):
                payload = self._payload(cut.key, cut.chunks.boxes[rank])
                yield cut.chunks.items[rank].holding(payload, int(cut.offsets[rank]))
        if (idle := self._placed.idle) is not None and rank >= idle.first:
            cut = self._placed.cut[idle.name]
            yield cut.chunks.items[-1].holding(self._payload(cut.key, cut.chunks.boxes[-1]), 0)

    def _payload(self, key: StateKey, box: Box) -> Payload:
        entry = self._placed.tensors[key]
        return Payload(self._placed.owners.get(key, key), box, entry.shape, entry.dtype)


def metadata_of(entries: Entries, placed: Placed) -> Metadata:
    """The index of the checkpoint, as torch would pickle it; descriptions of items are made while they are written."""
    index = _Index(placed)
    owners = {name: entries.aliases.get(name, name) for name in entries.paths}
    described = {name: index.described(owner) for name, owner in owners.items()}
    storage: Any = StreamedDict(item for name, owner in owners.items() for item in index.items(name, owner))
    return Metadata(described, dict(entries.paths), storage, StorageMeta(), VERSION)


class _Index:
    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self._properties = _Properties()
        self._files = [file_name(rank) for rank in range(len(placed.sizes))]
        self._chunks: dict[int, list[ChunkStorageMetadata]] = {}

    def described(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        cut = self._placed.cut.get(name)
        key = cut.key if cut is not None else self._placed.whole[name].key
        if key is None:
            return BytesStorageMetadata()
        entry = self._placed.tensors[key]
        chunks = self._chunks_of(cut) if cut is not None else [_chunk(Box.whole(entry.shape))]
        return TensorStorageMetadata(self._properties.of(entry.dtype), Size(entry.shape), chunks)

    def items(self, name: str, owner: str) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
        """Place of each item of an entry; an alias has those of its owner."""
        cut = self._placed.cut.get(owner)
        if cut is None:
            piece = self._placed.whole[owner]
            info = StorageInfo(self._files[piece.rank], piece.offset, piece.item.num_bytes)
            # An object has no shape.
            shape = None if piece.key is None else self._placed.tensors[piece.key].shape
            yield MetadataIndex(name) if shape is None else MetadataIndex(name, Size((0,) * len(shape)), 0), info
            return
        lengths, offsets = cut.chunks.lengths.tolist(), cut.offsets.tolist()
        files = self._files[: len(lengths)]
        if self._placed.idle is not None and self._placed.idle.name == owner:
            files[-1], offsets[-1] = self._files[-1], 0
        for rank, (file, offset, length) in enumerate(zip(files, offsets, lengths, strict=True)):
            at = MetadataIndex(name, self._chunks_of(cut)[rank].offsets, rank)
            yield at, StorageInfo(file, offset, length)

    def _chunks_of(self, cut: Cut) -> list[ChunkStorageMetadata]:
        """One list for all tensors that are cut alike; it is pickled once."""
        known = self._chunks.get(id(cut.chunks))
        if known is None:
            known = self._chunks[id(cut.chunks)] = list(map(_chunk, cut.chunks.boxes))
        return known


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(box.start), Size(box.shape))


class _Properties:
    """``TensorProperties`` by dtype, each the same object wherever it is meant.

    Their state has the five fields of torch before 2.8, which later versions read as well.
    """

    def __init__(self) -> None:
        self._layout = Opaque(GlobalRef("torch.serialization", "_get_layout"), ("torch.strided",))
        self._format = Opaque(GlobalRef("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), (0,))
        self._known: dict[DType, Any] = {}

    def of(self, dtype: DType) -> Any:
        if dtype not in self._known:
            state = (GlobalRef("torch", dtype.value), self._layout, False, self._format, False)
            kind = GlobalRef("torch.distributed.checkpoint.metadata", "TensorProperties")
            self._known[dtype] = Opaque(kind, form="new", state=state)
        return self._known[dtype]
