"""A weight with a product of two small matrices added to it: LoRA's ``W + s B A``, computed as it is read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, Shape, interval_to_boxes, ravel_index
from ckpt_tools.core.casts import cast_into
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MAX_PIECE, RegionwiseTensor, TensorEntry


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A tensor as a stack of matrices: its elements, row-major, in ``shape``, whose three axes are then ``axes``."""

    entry: TensorEntry = field(repr=False)
    shape: Shape
    axes: tuple[int, int, int]

    @property
    def stack_shape(self) -> Shape:
        """The shape of the stack."""
        return tuple(self.shape[axis] for axis in self.axes)

    def reshape_to_stack(self, elements: NDArray[Any]) -> NDArray[Any]:
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
        (stack, _, rank), (others, ranks, _) = self.left.stack_shape, self.right.stack_shape
        assert (stack, rank) == (others, ranks), "the stacks fit each other"

    @property
    def stack_shape(self) -> Shape:
        return (*self.left.stack_shape[:2], self.right.stack_shape[2])


class _ThreadBuffer(threading.local):
    """Memory of a thread. To allocate it for each product would take as long as the product: its pages are new."""

    memory = np.empty(0, np.float32)

    def get_buffer(self, numel: int) -> NDArray[np.float32]:
        if len(self.memory) < numel:
            self.memory = np.empty(numel, np.float32)
        return self.memory[:numel]


_THREAD_BUFFER = _ThreadBuffer()


@dataclass(frozen=True, slots=True, eq=False)
class WithProduct(RegionwiseTensor):
    """The first operand and the elements of ``product``, added in fp32, or in float64 to float64.

    BLAS adds up in an order that depends on the sizes of its operands. Pieces are always the same ones, so elements do
    not depend on how a conversion is cut into tasks.
    """

    product: Product

    @classmethod
    def of(cls, weight: TensorEntry, product: Product, *, is_rounded: bool = False) -> WithProduct:
        """``weight`` with ``product`` added: to its stored elements, or if ``is_rounded`` to those of its dtype."""
        dtype = DType.FLOAT64 if weight.dtype is DType.FLOAT64 else DType.FLOAT32
        # bfloat16 is widened to float32 while the product is added, and not before.
        is_widened_late = dtype is DType.FLOAT32 and weight.shards.dtype is DType.BFLOAT16
        operand = weight if is_rounded else weight.cast_to(DType.BFLOAT16 if is_widened_late else dtype)
        factors = (product.left.entry.cast_to(DType.FLOAT32), product.right.entry.cast_to(DType.FLOAT32))
        return cls(weight.shape, dtype, (operand, *factors), product)

    def get_operand_regions(self, box: Box) -> Sequence[Box]:
        return (box, *(Box.whole(each.shape) for each in self.operands[1:]))

    @property
    def can_cast(self) -> bool:
        return True

    def compute_box(self, box: Box, parts: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        # A piece is a run of consecutive elements: at most five boxes of the product's [stack, rows, columns]. Each box
        # is one matmul into the buffer of the thread, and then one cast adds the buffer to the weight.
        left, right = self.product.left.reshape_to_stack(parts[1]), self.product.right.reshape_to_stack(parts[2])
        products, num_done = _THREAD_BUFFER.get_buffer(box.numel), 0
        with np.errstate(over="ignore", invalid="ignore"):
            for matrices, rows, columns in self._iter_product_boxes(box):
                left_block, right_block = left[matrices, rows], right[matrices, :, columns]
                dims = (*left_block.shape[:2], right_block.shape[2])
                np.matmul(left_block, right_block, out=products[num_done : num_done + prod(dims)].reshape(dims))
                num_done += prod(dims)
            if self.product.scale != 1:
                products *= np.float32(self.product.scale)
        weight_bytes, output_bytes = (each.reshape(-1).view(np.uint8) for each in (parts[0], out))
        cast_into(weight_bytes, self.operands[0].dtype, output_bytes.data, DType(out.dtype.name), addend=products)

    def _iter_product_boxes(self, box: Box) -> Iterator[tuple[slice, slice, slice]]:
        """The consecutive elements of ``box`` as boxes of the product."""
        start = ravel_index(box.start, self.shape)
        for part in interval_to_boxes(start, start + box.numel, self.product.stack_shape):
            matrices, rows, columns = map(slice, part.start, part.stop)
            yield matrices, rows, columns

    @property
    def working_bytes(self) -> int:
        factor_numel = sum(each.numel for each in self.operands[1:])
        return 2 * factor_numel * 4 + 4 * MAX_PIECE * self.dtype.item_bytes
