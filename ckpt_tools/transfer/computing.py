"""The store in which computed tensors are files: what is read of one is computed from the stored tensors."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, interval_to_boxes
from ckpt_tools.core.dtypes import DType, to_numpy
from ckpt_tools.core.manifest import ComputedTensor, Manifest
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.wrappers import GeneratedFilesStore, overlay_literals
from ckpt_tools.transfer.tensor_reader import TensorReader

SCRATCH_BYTES = 1 << 20
"""A block that is read to be cast or placed, at most."""


def add_generated_files(store: Store, manifest: Manifest) -> Store:
    """``store`` with the files of ``manifest`` that are not stored: literals, and computed tensors."""
    store = overlay_literals(store, manifest.literals)
    for computed in manifest.computed_in_order:
        store = ComputedStore(store, computed)
    return store


@dataclass(slots=True)
class ComputedStore(GeneratedFilesStore):
    """``store`` with a file for each of ``computed``, made in pieces of ``piece_numel`` elements. Threads may share it.

        file       |--piece 0--|--piece 1--|--piece 2--|
        request            [===================]

    The pieces are the same whatever range is read, so the elements are the same too. A piece that lies in the request
    is computed straight into place, one that is cut goes through a cache for all threads: tasks cut pieces, and the
    next task, which needs the rest, is another thread's. Each thread also keeps the last regions of operands that it
    read, because neighbouring pieces often need the same.
    """

    store: Store
    computed: Mapping[str, ComputedTensor]
    _reader: TensorReader = field(init=False, repr=False)
    _thread_cache: threading.local = field(default_factory=threading.local, init=False, repr=False)
    _last_pieces: dict[int, tuple[tuple[str, int], NDArray[Any]]] = field(default_factory=dict, init=False, repr=False)
    _kept_pieces: dict[tuple[str, int], NDArray[Any]] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _cost_ratios: dict[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._reader = TensorReader(self.store, SCRATCH_BYTES)
        self._cost_ratios = {path: each.read_amplification for path, each in self.computed.items()}

    @property
    def generated_files(self) -> Mapping[str, ComputedTensor]:
        return self.computed

    def count_stored_bytes(self, path: str, num_bytes: int) -> int:
        cost = self._cost_ratios.get(path)
        return self.store.count_stored_bytes(path, num_bytes) if cost is None else round(num_bytes * cost)

    def try_read_as(self, path: str, first: int, last: int, dtype: DType, out: memoryview) -> bool:
        computed_tensor = self.computed.get(path)
        if computed_tensor is None or not computed_tensor.can_cast:
            return self.store.try_read_as(path, first, last, dtype, out)
        self._fill_elements(computed_tensor, path, first, np.frombuffer(out, to_numpy(dtype)))
        return True

    def _generate_elements(self, path: str, first: int, last: int, buffer: memoryview) -> None:
        computed_tensor = self.computed[path]
        self._fill_elements(computed_tensor, path, first, np.frombuffer(buffer, to_numpy(computed_tensor.dtype)))

    def _fill_elements(self, computed_tensor: ComputedTensor, path: str, first: int, elements: NDArray[Any]) -> None:
        """Fill ``elements`` with those of a computed file from number ``first`` on."""
        last, numel, piece_size = first + len(elements), prod(computed_tensor.shape), computed_tensor.piece_numel
        for piece_start in range(first - first % piece_size, last, piece_size):
            piece_stop = min(piece_start + piece_size, numel)
            start, stop = max(piece_start, first), min(piece_stop, last)
            destination = elements[start - first : stop - first]
            if (start, stop) == (piece_start, piece_stop) and not computed_tensor.is_kept:
                self._compute_piece(computed_tensor, path, piece_start, destination)
            else:
                piece = self._get_piece(computed_tensor, path, piece_start, piece_stop, destination.dtype)
                destination[:] = piece[start - piece_start : stop - piece_start]

    def _get_piece(
        self, computed_tensor: ComputedTensor, path: str, piece_start: int, piece_stop: int, dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        """A whole piece, until the thread that computed it computes another, or for good."""
        if computed_tensor.is_kept:
            with self._lock:
                if (path, piece_start) not in self._kept_pieces:
                    kept_piece = np.empty(piece_stop - piece_start, dtype)
                    self._compute_piece(computed_tensor, path, piece_start, kept_piece)
                    self._kept_pieces[path, piece_start] = kept_piece
                return self._kept_pieces[path, piece_start]
        for cached_key, piece in list(self._last_pieces.values()):
            if cached_key == (path, piece_start) and piece.dtype == dtype:
                return piece
        self._last_pieces.pop(threading.get_ident(), None)
        piece = np.empty(piece_stop - piece_start, dtype)
        self._compute_piece(computed_tensor, path, piece_start, piece)
        self._last_pieces[threading.get_ident()] = (path, piece_start), piece
        return piece

    def _compute_piece(self, computed_tensor: ComputedTensor, path: str, piece_start: int, out: NDArray[Any]) -> None:
        elements_done = 0
        for box in interval_to_boxes(piece_start, piece_start + len(out), computed_tensor.shape):
            destination = out[elements_done : elements_done + box.numel].reshape(box.shape)
            computed_tensor.compute_piece(box, partial(self._get_operand_region, path), destination)
            elements_done += box.numel

    def _get_operand_region(self, path: str, operand_index: int, region: Box) -> NDArray[Any]:
        """A region of an operand, read unless it is the last one that this thread read of it."""
        cached_regions: dict[int, tuple[str, Box, NDArray[Any]]] = self._thread_cache.__dict__.setdefault("parts", {})
        cached_region = cached_regions.get(operand_index)
        if cached_region is not None and cached_region[:2] == (path, region):
            return cached_region[2]
        entry = self.computed[path].operands[operand_index]
        dtype = to_numpy(entry.dtype)
        part = None if cached_region is None else cached_region[2]
        if part is None or (part.shape, part.dtype) != (region.shape, dtype):
            part = np.empty(region.shape, dtype)
        cached_regions.pop(operand_index, None)
        self._reader.read(entry, region, entry.shape, 0, region.numel, part.reshape(-1).view(np.uint8).data)
        cached_regions[operand_index] = path, region, part
        return part

    def __reduce__(self) -> tuple[object, ...]:
        return ComputedStore, (self.store, self.computed)
