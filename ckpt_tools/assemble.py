"""Regions of logical tensors out of a store, into the caller's memory.

Everything that reads elements passes here: conversion, verification, lazy access. Stored pieces that are contiguous
on both sides are read straight into place. Others are read in blocks as large as the scratch allows and placed with a
strided copy, because a read for every run of an inner-axis shard would be tens of thousands of reads.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.boxes import Box, Shape, contiguous_strides, flat_index, from_flat, is_contiguous
from ckpt_tools.casts import cast_into
from ckpt_tools.containers.torch_zip import ItemLocation, locate_item
from ckpt_tools.errors import MalformedError
from ckpt_tools.manifest import ByteRange, Framing, TensorEntry
from ckpt_tools.planning import Hit, hits
from ckpt_tools.stores.base import Store

MAX_READ_AMPLIFICATION = 2
"""A block is read whole while at least half of it is wanted; sparser ones are split along their longest stride."""

CAST_BLOCK_ELEMENTS = 1 << 18
"""1 MiB of fp32 is read, cast and left in the processor's cache before the next."""


@dataclass(slots=True)
class Assembler:
    """Reads elements from ``store``; safe to share between threads, each of which has buffers of its own."""

    store: Store
    scratch_bytes: int
    bytes_read: int = 0
    _buffers: threading.local = field(default_factory=threading.local, repr=False)
    _items: dict[ByteRange, ItemLocation] = field(default_factory=dict, repr=False)

    def read(self, entry: TensorEntry, box: Box, shape: Shape, start: int, stop: int, out: memoryview) -> None:
        """Elements ``[start, stop)`` of the row-major order of ``box``, as ``entry.dtype``, into ``out``.

        ``shape`` is the geometry of ``box``: the tensor's own or its flattening.

        Raises:
            StoreError, IncompleteError, MalformedError: as the store and the items say.
        """
        if entry.shards.dtype is entry.dtype:
            self._gather(hits(entry.shards, box, shape, start, stop), out)
            return
        item = entry.dtype.item_bytes
        for first in range(start, stop, CAST_BLOCK_ELEMENTS):
            last = min(first + CAST_BLOCK_ELEMENTS, stop)
            self._cast_block(entry, box, shape, first, last, out[(first - start) * item : (last - start) * item])

    def _cast_block(self, entry: TensorEntry, box: Box, shape: Shape, start: int, stop: int, out: memoryview) -> None:
        stored = entry.shards.dtype
        elements = self._buffer("cast", (stop - start) * stored.item_bytes)
        self._gather(hits(entry.shards, box, shape, start, stop), elements.data)
        cast_into(elements, stored, out, entry.dtype)

    def _gather(self, found: list[Hit], out: memoryview) -> None:
        for hit in found:
            for piece, first_byte in self._resolved(hit):
                self._place(piece, first_byte, out)

    def _resolved(self, hit: Hit) -> list[tuple[Hit, int]]:
        """The hit with the byte at which its piece's element 0 lies; an item's own strides may split it."""
        if hit.framing is Framing.RAW:
            return [(hit, hit.at.start)]
        location = self._location(hit)
        first_byte = location.start + location.storage_offset * hit.dtype.item_bytes
        if location.strides == contiguous_strides(location.shape):
            return [(hit, first_byte)]
        return [(part, first_byte) for part in _unfolded(hit, location)]

    def _location(self, hit: Hit) -> ItemLocation:
        location = self._items.get(hit.at)
        if location is None:
            location = self._items[hit.at] = self._locate(hit)
        return location

    def _locate(self, hit: Hit) -> ItemLocation:
        location = locate_item(self._reader(hit.at.file), hit.at.start, hit.at.stop, hit.at.file)
        if location.dtype is not hit.dtype or prod(location.shape) != prod(hit.shape):
            raise MalformedError(
                f"the item at byte {hit.at.start:,} holds {list(location.shape)} of {location.dtype.value} "
                f"where its index promises {list(hit.shape)} of {hit.dtype.value}",
                path=hit.at.file,
            )
        return location

    def _reader(self, file: str) -> Any:
        def read(start: int, stop: int) -> bytes:
            buffer = bytearray(stop - start)
            self.store.read_into(file, start, memoryview(buffer))
            self.bytes_read += len(buffer)
            return bytes(buffer)

        return read

    def _place(self, hit: Hit, first_byte: int, out: memoryview) -> None:
        strides = hit.strides or contiguous_strides(hit.shape)
        start_byte = first_byte + hit.dtype.item_bytes * sum(
            i * s for i, s in zip(hit.source.start, strides, strict=True)
        )
        if hit.strides is None and is_contiguous(hit.source, hit.shape) and is_contiguous(hit.into, hit.block):
            self._read_straight(hit, start_byte, out)
            return
        elements = np.frombuffer(out, dtype=_opaque(hit.dtype.item_bytes))
        block = elements[hit.block_start : hit.block_start + prod(hit.block)].reshape(hit.block)
        wanted = block[tuple(slice(a, b) for a, b in zip(hit.into.start, hit.into.stop, strict=True))]
        self._read_strided(hit.at.file, start_byte, strides, wanted)

    def _read_straight(self, hit: Hit, start_byte: int, out: memoryview) -> None:
        item = hit.dtype.item_bytes
        lower = (hit.block_start + flat_index(hit.into.start, hit.block)) * item
        size = hit.source.numel * item
        self.store.read_into(hit.at.file, start_byte, out[lower : lower + size])
        self.bytes_read += size

    def _read_strided(self, file: str, start_byte: int, strides: Shape, wanted: NDArray[Any]) -> None:
        """Fill ``wanted`` with elements ``strides`` apart in the file, its element 0 at ``start_byte``."""
        item = wanted.dtype.itemsize
        reach = [(extent - 1) * stride for extent, stride in zip(wanted.shape, strides, strict=True)]
        span = sum(reach) + 1
        if span > 1 and (span * item > self.scratch_bytes or span > MAX_READ_AMPLIFICATION * wanted.size):
            self._read_halves(file, start_byte, strides, wanted, reach.index(max(reach)))
            return
        block = self._buffer("strided", span * item)
        self.store.read_into(file, start_byte, block.data)
        self.bytes_read += span * item
        byte_strides = tuple(stride * item for stride in strides)
        wanted[...] = np.ndarray(wanted.shape, wanted.dtype, block.data, strides=byte_strides)

    def _read_halves(self, file: str, start_byte: int, strides: Shape, wanted: NDArray[Any], dim: int) -> None:
        middle = (wanted.shape[dim] + 1) // 2
        lower = (slice(None),) * dim
        self._read_strided(file, start_byte, strides, wanted[(*lower, slice(None, middle))])
        second = start_byte + middle * strides[dim] * wanted.dtype.itemsize
        self._read_strided(file, second, strides, wanted[(*lower, slice(middle, None))])

    def _buffer(self, use: str, num_bytes: int) -> NDArray[np.uint8]:
        """``num_bytes`` of this thread's buffer for ``use``, which the next call overwrites."""
        buffer: NDArray[np.uint8] | None = getattr(self._buffers, use, None)
        if buffer is None or buffer.nbytes < num_bytes:
            buffer = np.empty(num_bytes, np.uint8)
            setattr(self._buffers, use, buffer)
        return buffer[:num_bytes]


@cache
def _opaque(item_bytes: int) -> np.dtype[Any]:
    """A numpy type of that width which copies bits and never looks at them."""
    return np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(item_bytes, f"V{item_bytes}"))


def _unfolded(hit: Hit, location: ItemLocation) -> list[Hit]:
    """A hit on an item whose bytes are not row-major, with the item's strides."""
    if hit.shape == location.shape:
        return [replace(hit, strides=location.strides)]
    (start,), (stop,) = hit.source.start, hit.source.stop
    parts, first = [], hit.block_start + hit.into.start[0]
    for box in from_flat(start, stop, location.shape):
        parts.append(
            replace(
                hit,
                shape=location.shape,
                strides=location.strides,
                source=box,
                into=Box.whole(box.shape),
                block=box.shape,
                block_start=first,
            )
        )
        first += box.numel
    return parts
