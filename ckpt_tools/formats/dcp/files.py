"""A manifest as a DCP of N ranks, which ``torch.distributed.checkpoint.load`` resumes at any number of them.

A tied name has an entry of its own which points at the items of its owner: its bytes are written once. A file's
segments are made when they are needed, and only those of the files being written are kept. ``.metadata`` is the last
file.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, FileLayoutCache, FileSpec, LazyFile, Literal, Payload, Segment
from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.values import GlobalRef, Opaque, Size
from ckpt_tools.formats.dcp.names import METADATA
from ckpt_tools.formats.dcp.placement import CutTensor, ItemPlacement, UncutItem, place_items
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
from ckpt_tools.state_tree.build import Entries

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
        if cut_tensor is not None:
            chunks = self._get_chunk_metadata(cut_tensor)
        else:
            chunks = [_make_chunk_metadata(Box.whole(entry.shape))]
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
        """The descriptions of a tensor's chunks: one list for all tensors that are cut alike, so that it is pickled
        once."""
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
