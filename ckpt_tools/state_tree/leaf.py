"""Tensors of a tree of state. Apart from ``parse``, which formats that know their names do not need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, TensorEntry
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.values import StoredTensor


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor of the tree: its whole shape, and its pieces."""

    shape: Shape
    dtype: DType
    shards: ShardTable

    def make_entry(self, kind: Kind) -> TensorEntry:
        return TensorEntry(self.shape, self.dtype, kind, self.shards)

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


def find_ties(tensors: Mapping[str, TensorLeaf]) -> dict[str, str]:
    """The names that share all their pieces with an earlier name, which they are mapped to: the very same bytes, read
    in the same order. In a DCP only ckpt-tools writes such names."""
    owners: dict[object, str] = {}
    ties = {}
    for fqn, tensor in tensors.items():
        table = tensor.shards
        if table.num_bytes:
            # The first piece is the key, which is cheap for a million pieces; the others are compared only where it is
            # equal. Strides are in it, because a transposed view begins at the same byte.
            key = (table.get_byte_range(0), table.shape, table.dtype, tuple(table.get_strides(0)))
            owner = owners.setdefault(key, fqn)
            other = tensors[owner].shards
            if owner != fqn and table.files == other.files:
                columns = ("starts", "stops", "file_ids", "byte_starts", "byte_stops", "strides")
                if all(np.array_equal(getattr(table, column), getattr(other, column)) for column in columns):
                    ties[fqn] = owner
    return ties
