"""The store in which computed tensors are files: what is read of one is computed from the stored tensors."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, from_flat
from ckpt_tools.core.dtypes import to_numpy
from ckpt_tools.core.manifest import MAX_PIECE, Computed, Manifest
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.wrappers import MakingStore, Overlay
from ckpt_tools.transfer.tensor_reader import TensorReader

SCRATCH_BYTES = 1 << 20
"""A block that is read to be cast or placed, at most."""


def with_made_files(store: Store, manifest: Manifest) -> Store:
    """``store`` with the files of ``manifest`` that are nowhere: literals, and computed tensors."""
    store = Overlay(store, manifest.literals)
    return ComputedStore(store, manifest.computed) if manifest.computed else store


@dataclass(slots=True)
class ComputedStore(MakingStore):
    """``store`` with a file for each of ``computed``. Threads may share it. Each keeps the last parts that it read,
    because neighbouring pieces often need the same."""

    store: Store
    computed: Mapping[str, Computed]
    _reader: TensorReader = field(init=False, repr=False)
    _kept: threading.local = field(default_factory=threading.local, init=False, repr=False)

    def __post_init__(self) -> None:
        self._reader = TensorReader(self.store, SCRATCH_BYTES)

    @property
    def made(self) -> Mapping[str, Computed]:
        return self.computed

    def cost(self, path: str, num_bytes: int) -> int:
        found = self.computed.get(path)
        return self.store.cost(path, num_bytes) if found is None else round(num_bytes * found.cost)

    def _make(self, path: str, first: int, last: int, buffer: memoryview) -> None:
        found = self.computed[path]
        elements = np.frombuffer(buffer, to_numpy(found.dtype))
        done = 0
        for start in range(first, last, MAX_PIECE):
            for box in from_flat(start, min(start + MAX_PIECE, last), found.shape):
                parts = [self._part(path, number, region) for number, region in enumerate(found.regions(box))]
                found.compute(box, parts, elements[done : done + box.numel].reshape(box.shape))
                done += box.numel

    def _part(self, path: str, number: int, region: Box) -> NDArray[Any]:
        """A region of an operand."""
        parts: dict[int, tuple[str, Box, NDArray[Any]]] = self._kept.__dict__.setdefault("parts", {})
        known = parts.get(number)
        if known is not None and known[:2] == (path, region):
            return known[2]
        entry = self.computed[path].operands[number]
        part = np.empty(region.shape, to_numpy(entry.dtype))
        self._reader.read(entry, region, entry.shape, 0, region.numel, part.reshape(-1).view(np.uint8).data)
        parts[number] = path, region, part
        return part

    def __reduce__(self) -> tuple[object, ...]:
        return ComputedStore, (self.store, self.computed)
