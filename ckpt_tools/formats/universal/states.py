"""One slot of one parameter: what its file says, as an entry of the parameter's shape.

From stages 1 and 2 a file holds ``{"param": tensor, "cat_dim": ...}`` with the tensor in its shape, from stage 3 a bare
flat tensor, and ``step.pt`` a 0-d tensor or a number; ds_to_universal.py ``merge_tp_slices`` and
``merge_zero3_slices``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from ckpt_tools.boxes import Box, Shape
from ckpt_tools.containers.torch_zip import TorchArchive, open_archive
from ckpt_tools.dtypes import DType
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.manifest import ByteRange, Shard, ShardTable
from ckpt_tools.stores.base import Source
from ckpt_tools.values import StoredTensor, Value

PARAM, VOCAB, IS_EXPERT = "param", "vocab_tensor", "is_expert_param"

MAX_VOCAB_PADDING_BYTES = 64 << 20
"""Zeros are kept in memory; vocabularies are padded to a multiple of some hundred rows, 1 MB to 8 MB."""


@dataclass(slots=True)
class Slots:
    """Opens the files of slots; ``literals`` gathers what they keep as plain numbers, and zeros."""

    source: Source
    literals: dict[str, bytes] = field(default_factory=dict)

    def table(self, path: str, shape: Shape, fqn: str) -> ShardTable:
        """The slot in ``path`` of a parameter of ``shape``.

        Raises:
            MalformedError: its elements are not those of the shape; UnsupportedError: it belongs to an expert.
        """
        archive = self._open(path)
        tensor, is_vocabulary = _tensor(archive.value, path)
        if tuple(tensor.shape) == shape:
            return _table(archive, tensor)
        if len(tensor.shape) == 1 and tensor.numel >= prod(shape) and tensor.is_contiguous:
            return _flat_table(archive, tensor, prod(shape))
        if is_vocabulary and _is_padded(tensor.shape, shape) and tensor.is_contiguous:
            return self._padded_table(archive, tensor, shape)
        raise MalformedError(f"its shape is {list(tensor.shape)}, and the model's {list(shape)}", path=path, key=fqn)

    def scalar(self, path: str) -> ShardTable:
        """The 0-d tensor or the number in ``path``. Raises MalformedError."""
        archive = self._open(path)
        if isinstance(archive.value, StoredTensor) and archive.value.numel == 1:
            start = _start(archive, archive.value)
            at = ByteRange(path, start, start + archive.value.dtype.item_bytes)
            return ShardTable.build((), archive.value.dtype, [Shard(Box.whole(()), at)])
        return self.number(path, archive.value)

    def number(self, name: str, value: Value) -> ShardTable:
        """A number that is no tensor, kept under ``name``. Raises MalformedError."""
        dtype, data = _as_bytes(value, name)
        literal = f"literal:{name}"
        self.literals[literal] = data
        return ShardTable.build((), dtype, [Shard(Box.whole(()), ByteRange(literal, 0, len(data)))])

    def _open(self, path: str) -> TorchArchive:
        return open_archive(lambda start, stop: self.source.read(path, start, stop), self.source.size(path), path)

    def _padded_table(self, archive: TorchArchive, tensor: StoredTensor, shape: Shape) -> ShardTable:
        """Rows of a vocabulary, and the zeros that the loader adds below them, universal_checkpoint.py."""
        rows, item = tensor.shape[0], tensor.dtype.item_bytes
        missing = (prod(shape) - tensor.numel) * item
        if missing > MAX_VOCAB_PADDING_BYTES:
            raise UnsupportedError(f"its vocabulary lacks {shape[0] - rows:,} rows, too many to add", path=archive.path)
        zeros = "literal:zeros"
        if len(self.literals.get(zeros, b"")) < missing:
            self.literals[zeros] = bytes(missing)
        start, rest = _start(archive, tensor), (0,) * (len(shape) - 1)
        stored = Shard(Box.whole(tuple(tensor.shape)), ByteRange(archive.path, start, start + tensor.numel * item))
        added = Shard(Box((rows, *rest), shape), ByteRange(zeros, 0, missing))
        return ShardTable.build(shape, tensor.dtype, [stored, added])


def _tensor(value: Value, path: str) -> tuple[StoredTensor, bool]:
    """The tensor of a slot, and whether its rows are a vocabulary's."""
    fields: Mapping[Value, Value] = value if isinstance(value, dict) else {PARAM: value}
    if fields.get(IS_EXPERT):
        raise UnsupportedError("it is of a run with experts (mixture of experts), which is not read", path=path)
    tensor = fields.get(PARAM)
    if not isinstance(tensor, StoredTensor):
        raise MalformedError("it holds no tensor, as universal checkpoints do", path=path)
    return tensor, bool(fields.get(VOCAB))


def _start(archive: TorchArchive, tensor: StoredTensor) -> int:
    """The byte of element 0; opening the archive has checked that the storage holds them all."""
    if not tensor.numel:
        return 0
    if tensor.storage is None:
        raise MalformedError("a tensor of the meta device has no elements", path=archive.path)
    start, _ = archive.storage_range(tensor.storage.key)
    return start + tensor.storage_offset * tensor.dtype.item_bytes


def _table(archive: TorchArchive, tensor: StoredTensor) -> ShardTable:
    start, shape = _start(archive, tensor), tuple(tensor.shape)
    extent = max(0, tensor.stop - tensor.storage_offset) * tensor.dtype.item_bytes
    strides = None if tensor.is_contiguous else tuple(tensor.strides)
    shard = Shard(Box.whole(shape), ByteRange(archive.path, start, start + extent), strides)
    return ShardTable.build(shape, tensor.dtype, [shard])


def _flat_table(archive: TorchArchive, tensor: StoredTensor, numel: int) -> ShardTable:
    """The first ``numel`` elements: before 0.16 DeepSpeed left the padding of stage 3 at the end."""
    start = _start(archive, tensor)
    at = ByteRange(archive.path, start, start + numel * tensor.dtype.item_bytes)
    return ShardTable.build((numel,), tensor.dtype, [Shard(Box((0,), (numel,)), at)])


def _is_padded(stored: Shape, wanted: Shape) -> bool:
    """Whether ``wanted`` has more rows, and is else the same."""
    return bool(stored) and len(stored) == len(wanted) and stored[1:] == wanted[1:] and stored[0] < wanted[0]


def _as_bytes(value: Value, name: str) -> tuple[DType, bytes]:
    """A Python number in its own width."""
    if isinstance(value, bool):
        return DType.BOOL, struct.pack("<?", value)
    if isinstance(value, float):
        return DType.FLOAT64, struct.pack("<d", value)
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return DType.INT64, struct.pack("<q", value)
    raise MalformedError(f"a step is a {type(value).__name__}, which is no count", path=name)
