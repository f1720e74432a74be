"""A weight with a product of two small matrices added to it: LoRA's ``W + s B A``, computed as it is read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, Shape, flat_index, from_flat
from ckpt_tools.core.casts import cast_into
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MAX_PIECE, Computed, TensorEntry


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A tensor as a stack of matrices: its elements, row-major, in ``shape``, whose three axes are then ``axes``."""

    entry: TensorEntry = field(repr=False)
    shape: Shape
    axes: tuple[int, int, int]

    @property
    def dims(self) -> Shape:
        """The shape of the stack."""
        return tuple(self.shape[axis] for axis in self.axes)

    def of(self, elements: NDArray[Any]) -> NDArray[Any]:
        """The stack of matrices that the tensor's elements are."""
        return elements.reshape(self.shape).transpose(self.axes)


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """``scale`` times the product of two stacks of matrices, ``[stack, rows, rank]`` and ``[stack, rank, columns]``.

    Its elements, row-major, are those that are added to a tensor of ``stack * rows * columns`` elements.
    """

    left: Factor
    right: Factor
    scale: float

    def __post_init__(self) -> None:
        (stack, _, rank), (others, ranks, _) = self.left.dims, self.right.dims
        assert (stack, rank) == (others, ranks), "the stacks fit each other"

    @property
    def dims(self) -> Shape:
        return (*self.left.dims[:2], self.right.dims[2])


class _Scratch(threading.local):
    """Memory of a thread. To allocate it for each product would take as long as the product: its pages are new."""

    memory = np.empty(0, np.float32)

    def of(self, numel: int) -> NDArray[np.float32]:
        if len(self.memory) < numel:
            self.memory = np.empty(numel, np.float32)
        return self.memory[:numel]


_SCRATCH = _Scratch()


@dataclass(frozen=True, slots=True, eq=False)
class WithProduct(Computed):
    """The first operand and the elements of ``product``, added in fp32, or in float64 to float64.

    BLAS adds up in an order that depends on the sizes of its operands. Pieces are always the same ones, so elements do
    not depend on how a conversion is cut into tasks.
    """

    product: Product

    @classmethod
    def of(cls, weight: TensorEntry, product: Product, *, is_rounded: bool = False) -> WithProduct:
        """``weight`` with ``product`` added: to its stored elements, or if ``is_rounded`` to those of its dtype."""
        dtype = DType.FLOAT64 if weight.dtype is DType.FLOAT64 else DType.FLOAT32
        is_widened = dtype is DType.FLOAT32 and weight.shards.dtype is DType.BFLOAT16  # by numpy, while it adds
        operand = weight if is_rounded else weight.cast(DType.BFLOAT16 if is_widened else dtype)
        factors = (product.left.entry.cast(DType.FLOAT32), product.right.entry.cast(DType.FLOAT32))
        return cls(weight.shape, dtype, (operand, *factors), product)

    def regions(self, box: Box) -> Sequence[Box]:
        return (box, *(Box.whole(each.shape) for each in self.operands[1:]))

    @property
    def casts(self) -> bool:
        return True

    def compute(self, box: Box, parts: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        left, right = self.product.left.of(parts[1]), self.product.right.of(parts[2])
        added, done = _SCRATCH.of(box.numel), 0
        with np.errstate(over="ignore", invalid="ignore"):
            for matrices, rows, columns in self._blocks(box):
                one, other = left[matrices, rows], right[matrices, :, columns]
                dims = (*one.shape[:2], other.shape[2])
                np.matmul(one, other, out=added[done : done + prod(dims)].reshape(dims))
                done += prod(dims)
            if self.product.scale != 1:
                added *= np.float32(self.product.scale)
        weight, room = (each.reshape(-1).view(np.uint8) for each in (parts[0], out))
        cast_into(weight, self.operands[0].dtype, room.data, DType(out.dtype.name), plus=added)

    def _blocks(self, box: Box) -> Iterator[tuple[slice, slice, slice]]:
        """The consecutive elements of ``box`` as boxes of the product."""
        start = flat_index(box.start, self.shape)
        for part in from_flat(start, start + box.numel, self.product.dims):
            matrices, rows, columns = map(slice, part.start, part.stop)
            yield matrices, rows, columns

    @property
    def working_bytes(self) -> int:
        factors = sum(each.numel for each in self.operands[1:])
        return 2 * factors * 4 + 4 * MAX_PIECE * self.dtype.item_bytes
