"""A part of one tensor, named by text: what ``cat`` prints."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from math import prod
from types import EllipsisType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.checkpoint import Checkpoint, LazyTensor
from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.indexing import Index, parse_index, split_index
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.showing import Jsonable
from ckpt_tools.stores.source import Store

MAX_SHOWN_ELEMENTS = 1000
"""numpy shows more elements than these by their edges,"""

NUM_EDGE_ELEMENTS = 3
"""which are so many at each end of each dim."""

LINE_WIDTH = 75


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlice(Jsonable):
    """A part of a tensor, not read yet. ``shape`` is that of the part."""

    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("values",)

    name: str
    slot: str
    shape: Shape
    dtype: str
    _tensor: LazyTensor
    _index: Index

    def __repr__(self) -> str:
        return f"TensorSlice({self.name!r}, slot={self.slot!r}, shape={self.shape}, dtype={self.dtype})"

    def __str__(self) -> str:
        return self.text()

    def numpy(self) -> NDArray[Any]:
        """The elements as a new array. Raises UnsupportedError: numpy does not have their dtype."""
        return np.asarray(self._tensor[self._index])

    def text(self, *, all: bool = False, width: int = LINE_WIDTH) -> str:
        """The elements as numpy prints them in lines of ``width``. Of more than 1,000 only those that are shown are
        read: three at each end of each dim; with ``all``, every element is shown."""
        if all or prod(self.shape) <= MAX_SHOWN_ELEMENTS:
            return np.array2string(self.numpy(), max_line_width=width, threshold=sys.maxsize)
        return np.array2string(self._read_edges(), max_line_width=width, threshold=0, edgeitems=NUM_EDGE_ELEMENTS)

    def _read_edges(self) -> NDArray[Any]:
        """The elements at the edges, with one between them, which is not shown, where a dim has more."""
        # numpy shows three at each end. A dim of seven, without its middle, is elided as a long one is.
        edge_elements = np.zeros([min(extent, 2 * NUM_EDGE_ELEMENTS + 1) for extent in self.shape], self._tensor.dtype)
        edges_by_dim = [_split_edges(extent) for extent in self.shape]
        for parts in product(*edges_by_dim):
            index = _narrow_index(self._index, parts, self._tensor.shape)
            edge_elements[tuple(into for into, _ in parts)] = self._tensor[index]
        return edge_elements

    @property
    def values(self) -> Any:
        """The elements as lists within each other, or one alone; a complex number is a list of its two parts."""
        elements = self.numpy()
        if elements.dtype.kind == "c":
            elements = np.stack([elements.real, elements.imag], axis=-1)
        # numpy makes no floats of those of ml_dtypes.
        return (elements if elements.dtype.kind in "iub" else elements.astype(np.float64)).tolist()


def find_tensor_slice(store: Store, manifest: Manifest, slice_text: str, slot: str | None) -> TensorSlice:
    """The part of a tensor that ``slice_text`` names: ``NAME`` or ``NAME[INDEX]``.

    Raises:
        UsageError: there is no such tensor, or the index does not fit its shape.
    """
    checkpoint = Checkpoint.of(store, manifest)
    names = {*manifest.fqns, *manifest.aliases}
    name, index_text = (slice_text, None) if slice_text in names else split_index(slice_text)
    tensor = _find_tensor(checkpoint, name, slot)
    index: Index = (...,) if index_text is None else parse_index(index_text)
    try:
        shape = np.broadcast_to(np.empty(()), tensor.shape)[index].shape
    except IndexError as error:
        raise UsageError(f"{name} has shape {list(tensor.shape)}: {error}") from error
    return TensorSlice(name, tensor.key.slot, shape, tensor.dtype_name, tensor, index)


def _find_tensor(checkpoint: Checkpoint, name: str, slot: str | None) -> LazyTensor:
    manifest = checkpoint.manifest
    slots = [key.slot for key in manifest.tensors if key.fqn == name]
    try:
        if slot is not None:
            return checkpoint.state(name, slot)
        # Tensors among the entries are not weights, and have one slot.
        return checkpoint.state(name, slots[0]) if name not in checkpoint and len(slots) == 1 else checkpoint[name]
    except KeyError as error:
        raise UsageError(str(error.args[0])) from error


EdgePart = tuple[slice, range]
"""Where elements go along a dim, and which they are."""


def _split_edges(extent: int) -> list[EdgePart]:
    if extent <= 2 * NUM_EDGE_ELEMENTS:
        return [(slice(0, extent), range(extent))]
    return [
        (slice(0, NUM_EDGE_ELEMENTS), range(NUM_EDGE_ELEMENTS)),
        (slice(NUM_EDGE_ELEMENTS + 1, 2 * NUM_EDGE_ELEMENTS + 1), range(extent - NUM_EDGE_ELEMENTS, extent)),
    ]


def _narrow_index(index: Index, parts: tuple[EdgePart, ...], shape: Shape) -> Index:
    """The index of those elements of what ``index`` gives that ``parts`` choose along each of its dims."""
    # x[index][parts] == x[_narrow_index(index, parts)]; an integer of `index` leaves no dim for a part.
    ellipsis_position = index.index(...) if ... in index else len(index)
    implied_slices = (slice(None),) * (len(shape) - len(index) + (... in index))
    narrowed_index: list[int | slice | EllipsisType] = []
    remaining_parts = iter(parts)
    for each, extent in zip(
        (*index[:ellipsis_position], *implied_slices, *index[ellipsis_position + 1 :]), shape, strict=True
    ):
        if isinstance(each, slice):
            _, part = next(remaining_parts)
            numbers = range(extent)[each][part.start : part.stop]
            # One that goes down to 0 has no end: -1 would be the last element.
            each = slice(numbers.start, numbers.stop if numbers.stop >= 0 else None, numbers.step)
        narrowed_index.append(each)
    return tuple(narrowed_index)
