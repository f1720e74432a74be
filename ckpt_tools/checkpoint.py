"""A checkpoint as a mapping of arrays that are read when they are indexed, and only where.

Whatever the format, the world size and the place: ``open(url)["encoder.pos_embedding"][0, 3:7]`` reads the bytes of
those elements and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, Shape
from ckpt_tools.core.dtypes import to_numpy
from ckpt_tools.core.manifest import MASTER, WEIGHT, Manifest, StateKey, TensorEntry
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.tensor_reader import TensorReader

SCRATCH_BYTES = 4 << 20
"""Blocks read to be placed strided; the result itself is the caller's memory."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """One tensor, not read yet. Indexing it as numpy does, with integers, slices and an ellipsis, reads that part."""

    key: StateKey
    entry: TensorEntry = field(repr=False)
    _assembler: TensorReader = field(repr=False)

    @property
    def shape(self) -> Shape:
        return self.entry.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype; bfloat16 and the 8-bit floats are those of ml_dtypes."""
        return to_numpy(self.entry.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d tensor has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """The elements at ``index``, as numpy would give them of the whole array. Raises IndexError."""
        slices, kept = _regular(index, self.shape)
        spans = [_span(part) for part in slices]
        read = self._read(Box(tuple(s.start for s in spans), tuple(s.stop for s in spans)))
        steps = tuple(_inside(part) for part in slices)
        found = read[steps]
        return found.reshape([extent for extent, keep in zip(found.shape, kept, strict=True) if keep])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self[...].astype(dtype or self.dtype, copy=False)

    def _read(self, box: Box) -> NDArray[Any]:
        raw = np.empty(box.numel * self.entry.dtype.item_bytes, np.uint8)
        if box.numel:
            self._assembler.read(self.entry, box, self.shape, 0, box.numel, raw.data)
        return raw.view(self.dtype).reshape(box.shape)


def _regular(index: Any, shape: Shape) -> tuple[list[range], list[bool]]:
    """For each dim the indices wanted, and whether the dim stays; an integer takes its dim away."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if sum(part is Ellipsis for part in parts) > 1:
        raise IndexError("an index can only have a single ellipsis")
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = next(position for position, part in enumerate(parts) if part is Ellipsis)
    missing = len(shape) - (len(parts) - 1)
    if missing < 0:
        raise IndexError(f"{len(parts) - 1} indices for a tensor of {len(shape)} dims")
    parts[at : at + 1] = [slice(None)] * missing
    ranges = [_range(part, size, dim) for dim, (part, size) in enumerate(zip(parts, shape, strict=True))]
    return ranges, [isinstance(part, slice) for part in parts]


def _range(part: Any, size: int, dim: int) -> range:
    if isinstance(part, slice):
        return range(size)[part]
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        raise IndexError(f"only integers, slices and an ellipsis index a stored tensor, not {type(part).__name__}")
    position = part.__index__()
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of bounds for dim {dim} of size {size}")
    return range(position % size, position % size + 1)


def _span(wanted: range) -> slice:
    """The smallest interval that holds ``wanted``."""
    if not len(wanted):
        return slice(0, 0)
    return slice(min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1]) + 1)


def _inside(wanted: range) -> slice:
    """``wanted`` as a slice of the smallest interval that holds it; a negative step starts at its end."""
    return slice(None, None, wanted.step)


@dataclass(frozen=True, slots=True)
class Checkpoint(Mapping[str, LazyTensor]):
    """The weights of a checkpoint by name, ties under every name they have; ``state`` leads to the optimizer's.

    Where there is an fp32 master of a weight, the master stands for it; ``model_copy`` gives the model's own.
    """

    manifest: Manifest
    _assembler: TensorReader = field(repr=False)

    @classmethod
    def of(cls, store: Store, manifest: Manifest) -> Checkpoint:
        return cls(manifest, TensorReader(store, SCRATCH_BYTES))

    def __getitem__(self, name: str) -> LazyTensor:
        owner = self.manifest.aliases.get(name, name)
        if StateKey(owner) not in self.manifest.tensors:
            raise KeyError(name)
        slot = MASTER if StateKey(owner, MASTER) in self.manifest.tensors else WEIGHT
        return self.state(name, slot)

    def model_copy(self, name: str) -> LazyTensor:
        """The weight in the model's own dtype. Raises KeyError."""
        return self.state(name, WEIGHT)

    def state(self, name: str, slot: str) -> LazyTensor:
        """What the optimizer keeps of a parameter: ``exp_avg``, ``step``, ... Raises KeyError."""
        key = StateKey(self.manifest.aliases.get(name, name), slot)
        return LazyTensor(key, self.manifest.tensors[key], self._assembler)

    def __iter__(self) -> Iterator[str]:
        yield from (key.fqn for key in self.manifest.tensors if key.slot == WEIGHT)
        yield from self.manifest.aliases

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read so far."""
        return self._assembler.bytes_read
