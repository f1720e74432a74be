"""Tensors of a tree of state. Apart from ``parse``, which formats that know their names do not need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.values import StoredTensor


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor of the tree: its whole shape, and its pieces."""

    shape: Shape
    dtype: DType
    shards: ShardTable

    @classmethod
    def of(cls, tensor: StoredTensor, file: str, storage_start: int) -> TensorLeaf:
        """The tensor of a pickle whose storage begins at byte ``storage_start`` of a file."""
        item = tensor.dtype.item_bytes
        start = storage_start + tensor.storage_offset * item
        at = ByteRange(file, start, storage_start + max(tensor.stop, tensor.storage_offset) * item)
        shape = tuple(tensor.shape)
        if tensor.is_contiguous:
            table = ShardTable.whole(shape, tensor.dtype, at)
            return cls(table.shape, tensor.dtype, table)
        shard = Shard(Box.whole(shape), at, tensor.strides)
        return cls(shape, tensor.dtype, ShardTable.build(shape, tensor.dtype, [shard]))


def ties_among(tensors: Mapping[str, TensorLeaf]) -> dict[str, str]:
    """Names whose every piece is the very bytes of another name's: in a DCP, as only ckpt-tools writes them."""
    owners: dict[tuple[str, int], str] = {}
    ties = {}
    for fqn, tensor in tensors.items():
        table = tensor.shards
        if table.num_bytes:
            at = table.byte_range(0)
            owner = owners.setdefault((at.file, at.start), fqn)
            if owner != fqn and _are_same(table, tensors[owner].shards):
                ties[fqn] = owner
    return ties


def _are_same(one: ShardTable, other: ShardTable) -> bool:
    columns = ("starts", "stops", "file_ids", "byte_starts", "byte_stops")
    same = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
    return same and one.shape == other.shape and one.dtype is other.dtype and one.files == other.files
