"""Places of a checkpoint's items in the files of a DCP. Pure.

Parameters and their state are cut by rows as FSDP2 cuts them, chunk r into the file of rank r. Whole tensors (buffers,
0-d tensors, the user's own) are written once, in the smallest file; objects are items too. A checkpoint of a thousand
ranks has millions of items. Tensors of one shape share their chunks, and the position of each item follows from the
lengths of a few templates.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.limits import check_ranks_by_rows
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.shards import Ints
from ckpt_tools.formats.dcp.items import DcpItem, ItemFactory
from ckpt_tools.state_tree.build import Entries


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
    """Whether FSDP2 cuts such a tensor: it refuses 0-d parameters and cannot train empty ones."""
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
    """Name, key (None for an object) and item of all that is not cut, objects first, as torch writes them."""
    for name, value in entries.objects.items():
        yield name, None, items.make_object_item(value)
    for name, key in entries.tensors.items():
        if name not in cut_names:
            entry = manifest.tensors[key]
            yield name, key, items.make_tensor_item(entry.shape, entry.dtype)


def _balance_items(items: Iterator[tuple[str, StateKey | None, DcpItem]], cut_bytes: Ints) -> dict[str, UncutItem]:
    """Each item in the file that is smallest by then; ``cut_bytes`` are those of the chunks in each file."""
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
