"""The store in which computed tensors are files: what is read of one is computed from the stored tensors."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, interval_to_boxes
from ckpt_tools.core.dtypes import DType, to_numpy
from ckpt_tools.core.manifest import ComputedTensor, Manifest
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.wrappers import MakingStore, Overlay
from ckpt_tools.transfer.tensor_reader import TensorReader

SCRATCH_BYTES = 1 << 20
"""A block that is read to be cast or placed, at most."""


def with_made_files(store: Store, manifest: Manifest) -> Store:
    """``store`` with the files of ``manifest`` that are nowhere: literals, and computed tensors."""
    store = Overlay(store, manifest.literals)
    for computed in manifest.computed_in_order:
        store = ComputedStore(store, computed)
    return store


@dataclass(slots=True)
class ComputedStore(MakingStore):
    """``store`` with a file for each of ``computed``. Threads may share it. Each keeps the last parts that it read,
    because neighbouring pieces often need the same, and for all threads the last piece that it was asked for a part of:
    tasks cut pieces, and the next task is another thread's.

    Pieces are the same ones whatever part of a file is read, so the elements are the same too.
    """

    store: Store
    computed: Mapping[str, ComputedTensor]
    _reader: TensorReader = field(init=False, repr=False)
    _kept: threading.local = field(default_factory=threading.local, init=False, repr=False)
    _begun: dict[int, tuple[tuple[str, int], NDArray[Any]]] = field(default_factory=dict, init=False, repr=False)
    _costs: dict[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._reader = TensorReader(self.store, SCRATCH_BYTES)
        self._costs = {path: each.read_amplification for path, each in self.computed.items()}

    @property
    def made(self) -> Mapping[str, ComputedTensor]:
        return self.computed

    def cost(self, path: str, num_bytes: int) -> int:
        cost = self._costs.get(path)
        return self.store.cost(path, num_bytes) if cost is None else round(num_bytes * cost)

    def make(self, path: str, first: int, last: int, dtype: DType, out: memoryview) -> bool:
        found = self.computed.get(path)
        if found is None or not found.can_cast:
            return self.store.make(path, first, last, dtype, out)
        self._fill(found, path, first, np.frombuffer(out, to_numpy(dtype)))
        return True

    def _make(self, path: str, first: int, last: int, buffer: memoryview) -> None:
        found = self.computed[path]
        self._fill(found, path, first, np.frombuffer(buffer, to_numpy(found.dtype)))

    def _fill(self, found: ComputedTensor, path: str, first: int, elements: NDArray[Any]) -> None:
        """Elements of a computed file from number ``first`` on."""
        last, numel, step = first + len(elements), prod(found.shape), found.piece_numel
        for begin in range(first - first % step, last, step):
            end = min(begin + step, numel)
            start, stop = max(begin, first), min(end, last)
            wanted = elements[start - first : stop - first]
            if (start, stop) == (begin, end):
                self._compute(found, path, begin, wanted)
            else:
                wanted[:] = self._piece(found, path, begin, end, wanted.dtype)[start - begin : stop - begin]

    def _piece(self, found: ComputedTensor, path: str, begin: int, end: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A whole piece, until the thread that computed it computes another."""
        for known, piece in list(self._begun.values()):
            if known == (path, begin) and piece.dtype == dtype:
                return piece
        self._begun.pop(threading.get_ident(), None)
        piece = np.empty(end - begin, dtype)
        self._compute(found, path, begin, piece)
        self._begun[threading.get_ident()] = (path, begin), piece
        return piece

    def _compute(self, found: ComputedTensor, path: str, begin: int, out: NDArray[Any]) -> None:
        done = 0
        for box in interval_to_boxes(begin, begin + len(out), found.shape):
            parts = [self._part(path, number, region) for number, region in enumerate(found.get_operand_regions(box))]
            found.compute_box(box, parts, out[done : done + box.numel].reshape(box.shape))
            done += box.numel

    def _part(self, path: str, number: int, region: Box) -> NDArray[Any]:
        """A region of an operand."""
        parts: dict[int, tuple[str, Box, NDArray[Any]]] = self._kept.__dict__.setdefault("parts", {})
        known = parts.get(number)
        if known is not None and known[:2] == (path, region):
            return known[2]
        entry = self.computed[path].operands[number]
        dtype = to_numpy(entry.dtype)
        is_alike = known is not None and (known[2].shape, known[2].dtype) == (region.shape, dtype)
        part = known[2] if known is not None and is_alike else np.empty(region.shape, dtype)
        parts.pop(number, None)
        self._reader.read(entry, region, entry.shape, 0, region.numel, part.reshape(-1).view(np.uint8).data)
        parts[number] = path, region, part
        return part

    def __reduce__(self) -> tuple[object, ...]:
        return ComputedStore, (self.store, self.computed)
