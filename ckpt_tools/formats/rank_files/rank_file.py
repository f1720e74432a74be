"""One rank's file: its leaves, and for each tensor the places of its elements of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.core.boxes import Box, Shape, is_row_major
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import StateKey, TreePath, join_path
from ckpt_tools.core.shards import ByteRange, Shard
from ckpt_tools.core.values import PARAMETER, StorageRef, StoredTensor
from ckpt_tools.errors import CkptError, MalformedError, UnsupportedError
from ckpt_tools.formats.rank_files.geometry import compute_region
from ckpt_tools.serialization.pickle.sharded_tensors import (
    DTensorPart,
    PartReader,
    SavedMesh,
    ShardedTensorPart,
    TensorPart,
)
from ckpt_tools.serialization.torch_archive import TorchArchive
from ckpt_tools.serialization.torch_zip import open_torch_file
from ckpt_tools.state_tree.incomplete_state import find_sharded_class, refuse_single_deepspeed_file
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.state_tree.leaves import ArchiveLocation, extract_tensors, iter_tree_leaves
from ckpt_tools.stores.source import Source


@dataclass(frozen=True, slots=True)
class RankShard:
    """A rank's part of a tensor of ``shape``: shards of it, none where it has no element.

    ``checksums`` are those of the storages of the shards, as the zip's directory has them; None where a shard is a part
    of its storage, or the checksum was not taken. ``is_cut`` says that it is a part by its class, even if it is all:
    ``members`` are then the ranks whose parts make the tensor.
    """

    shape: Shape
    dtype: DType
    shards: tuple[Shard, ...]
    checksums: tuple[int | None, ...]
    is_cut: bool = False
    members: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RankFile:
    """The leaves of a file by their paths. ``rank`` and ``ranks`` are None and empty where it holds no part of a
    tensor; ``kind`` is the class of its parts."""

    path: str
    kind: str | None
    rank: int | None
    ranks: frozenset[int]
    mesh: SavedMesh | None
    tensors: Mapping[TreePath, RankShard]
    objects: Mapping[TreePath, Any]
    inner: Mapping[StateKey, TensorLeaf]
    """Tensors that objects refer to."""

    @property
    def is_optimizer(self) -> bool:
        """Whether it is a bare state dict of a torch optimizer, nested or flattened."""
        tops = ((str(path[0]), len(path)) for path in self.objects)
        return any(top == "param_groups" or (num == 1 and top.startswith("param_groups.")) for top, num in tops)


def read_rank_file(source: Source, path: str) -> RankFile:
    """The file of a rank, from its headers. Raises FormatError if it cannot be read, or holds a part whose place is not
    understood."""
    archive = open_torch_file(source, path)
    archive.check_rank()
    refuse_single_deepspeed_file(archive.value, path)
    collector = _PartCollector(archive)
    tensors: dict[TreePath, RankShard] = {}
    objects: dict[TreePath, Any] = {}
    inner: dict[StateKey, TensorLeaf] = {}
    for leaf_path, value in iter_tree_leaves(archive.value, (), path):
        if not leaf_path:
            raise UnsupportedError("it does not contain a dict, so it is not a state dict", path=path)
        try:
            if (rank_shard := collector.find_shard(value)) is not None:
                tensors[leaf_path] = rank_shard
            else:
                objects[leaf_path] = extract_tensors(
                    value, ArchiveLocation(archive, path), f"{path}: {join_path(leaf_path)}", inner
                )
        except CkptError as error:
            error.path, error.key = error.path or path, error.key or join_path(leaf_path)
            raise
    kind = next(iter(collector.kinds), None)
    return RankFile(path, kind, collector.rank, frozenset(collector.ranks), collector.mesh, tensors, objects, inner)


class _PartCollector:
    """The parts of tensors in a file, and the rank and mesh that they state."""

    def __init__(self, archive: TorchArchive) -> None:
        self._archive = archive
        self._parts = PartReader()
        self.kinds: dict[str, None] = {}
        self.rank: int | None = None
        self.ranks: set[int] = set()
        self.mesh: SavedMesh | None = None

    def find_shard(self, value: Any) -> RankShard | None:
        """The rank's part of the tensor that a leaf is; None for an object."""
        if isinstance(value, StoredTensor):
            if value.storage is None:
                raise UnsupportedError("this tensor is on the meta device and has no elements")
            if value.wrapper not in (None, PARAMETER):
                raise UnsupportedError(f"a {value.wrapper} cannot be read; save plain tensors")
            whole_tensor = (Box.whole(value.shape), (0,) * len(value.shape), value)
            return self._make_rank_shard(value.shape, value.dtype, [whole_tensor])
        part = self._parts.read_part(value)
        if part is not None:
            self._note_rank(part)
            return replace(
                self._make_rank_shard(part.shape, part.dtype, _iter_local_boxes(part)),
                is_cut=True,
                members=part.members,
            )
        inner_class = None if isinstance(value, str | int | float | bool | bytes | None) else find_sharded_class(value)
        if inner_class is not None:
            raise UnsupportedError(f"it holds {inner_class} inside an object, which is not supported")
        return None

    def _note_rank(self, part: TensorPart) -> None:
        """The rank whose file it is; one file is of one rank."""
        self.kinds.setdefault("DTensor" if isinstance(part, DTensorPart) else "ShardedTensor")
        if self.rank is not None and self.rank != part.rank:
            raise MalformedError(f"it holds parts of rank {self.rank} and of rank {part.rank}")
        self.rank = part.rank
        if isinstance(part, DTensorPart):
            if part.mesh is self.mesh:
                return
            self.mesh = self.mesh or part.mesh
        self.ranks.update(part.ranks)

    def _make_rank_shard(self, shape: Shape, dtype: DType, local_boxes: Iterable[_LocalBox]) -> RankShard:
        shards, checksums = [], []
        for box, local_start, local in local_boxes:
            assert local.storage is not None, "tensors without elements were refused"
            shards.append(self._make_shard(box, local_start, local, local.storage))
            checksums.append(self._get_checksum(local, local.storage) if box.shape == local.shape else None)
        return RankShard(tuple(shape), dtype, tuple(shards), tuple(checksums))

    def _make_shard(self, box: Box, local_start: Shape, local: StoredTensor, storage: StorageRef) -> Shard:
        """``box`` of the whole tensor, which begins ``local_start`` an index of the local one."""
        # The byte of the box: start of the storage + (storage_offset + sum(index * stride)) * bytes of an element. The
        # shard reaches from the first to the last element in memory, gaps included, and has strides unless it is
        # row-major.
        item, extents = local.dtype.item_bytes, box.shape
        first_element = local.storage_offset + sum(
            n * stride for n, stride in zip(local_start, local.strides, strict=True)
        )
        last_element = sum((n - 1) * stride for n, stride in zip(extents, local.strides, strict=True))
        num_spanned = last_element + 1 if box.numel else 0
        start = self._archive.locate_storage(storage.key)[0] + first_element * item
        strides = None if is_row_major(extents, local.strides) else local.strides
        return Shard(box, ByteRange(self._archive.path, start, start + num_spanned * item), strides)

    def _get_checksum(self, local: StoredTensor, storage: StorageRef) -> int | None:
        record = self._archive.records[f"data/{storage.key}"]
        is_all = local.is_contiguous and local.numel * local.dtype.item_bytes == storage.num_bytes
        return record.crc32 if is_all and record.states_checksum else None


_LocalBox = tuple[Box, Shape, StoredTensor]
"""A box of the whole tensor, where it begins in the local tensor, and the local tensor."""


def _iter_local_boxes(part: TensorPart) -> Iterator[_LocalBox]:
    """The boxes that have elements."""
    if isinstance(part, ShardedTensorPart):
        for offsets, local in part.locals:
            if local.numel:
                stop = tuple(a + n for a, n in zip(offsets, local.shape, strict=True))
                yield Box(offsets, stop), (0,) * len(offsets), local
        return
    region = compute_region(part.shape, part.mesh.shape, part.mesh.coordinate, part.placements)
    if part.local.shape != region.shape:
        held = f"rank {part.rank} holds a part of shape {list(part.local.shape)}"
        raise MalformedError(f"{held}, but by its placement on the mesh it should be {list(region.shape)}")
    for box, at in region.boxes:
        yield box, at, part.local
