"""Tensors of a tree of state. Apart from ``parse``, which formats that know their names do not need."""

from __future__ import annotations

from dataclasses import dataclass

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
