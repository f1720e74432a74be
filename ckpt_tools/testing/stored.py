"""Tensors cut into pieces and laid down in files: what a reader would find, made without one.

``StoredTensor`` is the oracle of the core's tests. Its ``elements`` are what any route through planning and assembly
has to give back, and its pieces were put into the files by numpy indexing alone, which shares no code with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, TensorEntry
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.testing import strategies

NUM_FILES = 3


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``elements`` in shape, opaque items of the dtype's width, and the entry whose shards lie in ``files``."""

    elements: NDArray[Any]
    entry: TensorEntry
    files: dict[str, bytes]

    def __repr__(self) -> str:
        shards = ", ".join(f"{shard.box}@{shard.at}/{shard.strides}" for shard in self.entry.shards)
        return (
            f"StoredTensor({self.entry.shape}, {self.entry.dtype.value}, geometry {self.entry.shards.shape}: {shards})"
        )


def opaque(dtype: DType) -> np.dtype[Any]:
    """Elements of that width as numpy bytes, in which no two bit patterns are equal."""
    return np.dtype(f"V{dtype.item_bytes}")


def arbitrary_elements(shape: Shape, dtype: DType, seed: int) -> NDArray[Any]:
    """Random bits in shape."""
    data = np.random.default_rng(seed).bytes(prod(shape) * dtype.item_bytes)
    return np.frombuffer(data, opaque(dtype)).reshape(shape) if prod(shape) else np.empty(shape, opaque(dtype))


@st.composite
def stored_tensors(
    draw: st.DrawFn, *, prefix: str = "", shape: Shape | None = None, dtype: DType | None = None
) -> StoredTensor:
    """Any small tensor, or one of that shape and dtype, in any sharding, its pieces in any order, in several files with
    gaps between them."""
    shape = draw(strategies.shapes()) if shape is None else shape
    dtype = dtype or draw(strategies.dtypes())
    elements = arbitrary_elements(shape, dtype, draw(st.integers(0, 1 << 32)))
    is_flat = draw(st.booleans())
    geometry = (prod(shape),) if is_flat else shape
    sharding = draw(strategies.flat_shardings(shape) if is_flat else strategies.box_shardings(shape))
    strided = not is_flat and draw(st.booleans())
    files: dict[str, bytearray] = {f"{prefix}{number}.bin": bytearray() for number in range(NUM_FILES)}
    shards = []
    for box in sharding:
        file = draw(st.sampled_from(sorted(files)))
        files[file] += bytes(draw(st.integers(0, 3)))
        shards.append(_store_piece(draw, elements.reshape(geometry), box, file, files[file], strided))
    table = ShardTable.build(geometry, dtype, shards)
    entry = TensorEntry(shape, dtype, Kind.PARAMETER, table)
    return StoredTensor(elements, entry, {name: bytes(data) for name, data in files.items()})


def _store_piece(draw: st.DrawFn, elements: NDArray[Any], box: Box, file: str, data: bytearray, strided: bool) -> Shard:
    piece = elements[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
    if not strided:
        start = len(data)
        data += piece.tobytes()
        return Shard(box, ByteRange(file, start, len(data)))
    order = draw(st.sampled_from(list(permutations(range(piece.ndim)))))
    return _store_strided_piece(piece, box, order, draw(st.integers(1, 3)), file, data)


def _store_strided_piece(
    piece: NDArray[Any], box: Box, order: Sequence[int], step: int, file: str, data: bytearray
) -> Shard:
    """The piece with its dims in memory in ``order`` and its elements ``step`` apart, as views of tensors are saved."""
    item, start = piece.dtype.itemsize, len(data)
    span = (piece.size - 1) * step + 1 if piece.size else 0
    memory = np.zeros(span, piece.dtype)
    memory[::step] = piece.transpose(order).reshape(-1)
    data += memory.tobytes()
    strides, stride = [0] * piece.ndim, step
    for dim in reversed(order):
        strides[dim] = stride
        stride *= piece.shape[dim]
    return Shard(box, ByteRange(file, start, start + span * item), tuple(strides))
