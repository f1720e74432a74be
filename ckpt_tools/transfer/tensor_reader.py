"""Regions of logical tensors out of a store, into the caller's memory.

Everything that reads elements passes here: conversion, verification, lazy access. Stored pieces that are contiguous
on both sides are read straight into place. Others are read in blocks as large as the scratch allows and placed with a
strided copy, because a read for every run of an inner-axis shard would be tens of thousands of reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.boxes import Box, Shape, is_row_major
from ckpt_tools.core.casts import MAX_CAST_BYTES, cast_into
from ckpt_tools.core.manifest import TensorEntry
from ckpt_tools.core.shards import ByteRange, Framing
from ckpt_tools.errors import MalformedError
from ckpt_tools.planning.hits import BoxHit, FlatHit, Hit, find_hits
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.buffers import allocate_page_aligned
from ckpt_tools.transfer.inflating import MAX_OVERHEAD_BYTES, InflatedReader, inflated_name, is_inflated_name
from ckpt_tools.transfer.record_checks import RecordChecks, RecordProgress
from ckpt_tools.transfer.stored_order import to_stored_order_hits

if TYPE_CHECKING:
    from ckpt_tools.serialization.torch_zip import ItemLocation

MAX_READ_AMPLIFICATION = 2
"""A strided block is read whole while at least half of it is wanted,"""

MAX_GAP_BYTES = 32 << 10
"""or while the gaps in it are so short that reading them costs less than a read more: 10 microseconds."""

MAX_KNOWN_ITEMS = 4096
"""Items whose elements were found, at 500 bytes each. Tasks follow the files, and come back to few of them."""


@dataclass(slots=True)
class TensorReader:
    """Reads elements from ``store``; safe to share between threads, each of which has buffers of its own.

    ``scratch_bytes`` bounds each of the two buffers that a thread has beside the caller's. With ``compares_records``, a
    wrong CRC-32 of a record is an error.
    """

    store: Store
    scratch_bytes: int
    compares_records: bool = True
    _bytes_read: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _buffers: threading.local = field(default_factory=threading.local, repr=False)
    _item_locations: dict[ByteRange, ItemLocation] = field(default_factory=dict, repr=False)
    _inflated_reader: InflatedReader = field(init=False, repr=False)
    _record_checks: RecordChecks = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._inflated_reader = InflatedReader(lambda file, start, stop: self._range_reader_of(file)(start, stop))
        self._record_checks = RecordChecks(self._read_unchecked, lambda file: self.store.size(file))

    def replace_store(self, store: Store) -> None:
        """Free the store and everything kept of it; ``store`` is used from now on."""
        self.store = store
        self._item_locations.clear()
        self.__post_init__()

    @property
    def bytes_read(self) -> int:
        """Bytes read from the store so far, including headers of items and gaps between wanted elements."""
        return self._bytes_read

    @property
    def bytes_read_here(self) -> int:
        """The part of ``bytes_read`` that this thread has read."""
        return getattr(self._buffers, "bytes_read", 0)

    def read(self, entry: TensorEntry, box: Box, shape: Shape, start: int, stop: int, out: memoryview) -> None:
        """Elements ``[start, stop)`` of the row-major order of ``box``, as ``entry.dtype``, into ``out``.

        ``shape`` is the geometry of ``box``: the tensor's own or its flattening.

        Raises:
            StoreError, IncompleteError, MalformedError: as the store and the items say.
        """
        if entry.is_as_stored:
            self._read_hits(find_hits(entry.shards, box, shape, start, stop), out)
            return
        item_bytes = entry.dtype.item_bytes
        block_elements = min(MAX_CAST_BYTES, self.scratch_bytes) // entry.shards.dtype.item_bytes
        if not self._try_read_as(entry, box, shape, start, stop, out):
            for first in range(start, stop, block_elements):
                last = min(first + block_elements, stop)
                self._cast_block(
                    entry, box, shape, first, last, out[(first - start) * item_bytes : (last - start) * item_bytes]
                )

    def read_range(self, at: ByteRange, out: memoryview) -> None:
        """Bytes of one stored file, or of neighbours in one record of it, as they are. Raises as ``read``."""
        self._read_elements(self._record_checks.find_record_in_zip(at.file, at.start), at.start, out)

    def _try_read_as(self, entry: TensorEntry, box: Box, shape: Shape, start: int, stop: int, out: memoryview) -> bool:
        """Like ``read``, if the store itself makes the elements in the wanted dtype; else read nothing: False."""
        if entry.plus or len(entry.shards) != 1:
            return False
        match find_hits(entry.shards, box, shape, start, stop):
            case [FlatHit(at, start=first, stop=last)]:
                first_element = at.start // entry.shards.dtype.item_bytes
                if self.store.try_read_as(at.file, first_element + first, first_element + last, entry.dtype, out):
                    self._count_bytes_read(at.file, (last - first) * entry.shards.dtype.item_bytes)
                    return True
        return False

    def find_stored_range(self, entry: TensorEntry, box: Box, shape: Shape, start: int, stop: int) -> ByteRange | None:
        """The bytes that ``read`` with the same arguments would give, where they are one range of one stored file.

        Raises:
            StoreError, IncompleteError, MalformedError: as the store and the items say.
        """
        found_hits = find_hits(entry.shards, box, shape, start, stop) if entry.is_as_stored else ()
        if len(found_hits) != 1:
            return None
        hit, item_bytes = found_hits[0], entry.dtype.item_bytes
        if hit.framing is Framing.ZSTD_ITEM:
            return None
        if isinstance(hit, BoxHit) and not is_row_major(hit.extents, hit.strides):
            return None
        first_byte = hit.at.start
        if hit.framing is not Framing.RAW:
            location = self._get_item_location(hit)
            if not is_row_major(location.shape, location.strides):
                return None
            first_byte = location.start + location.storage_offset * item_bytes
        first_byte += item_bytes * hit.start
        return ByteRange(hit.at.file, first_byte, first_byte + item_bytes * (stop - start))

    def check_remaining_records(self, *, all_records: bool = False) -> None:
        """At the end of the work, compare the CRC-32 of records that were read almost completely; with
        ``all_records``, of every record of which a part was read. Raises StoreError, FormatError."""
        self._record_checks.check_remaining(all_records=all_records)

    def _cast_block(self, entry: TensorEntry, box: Box, shape: Shape, start: int, stop: int, out: memoryview) -> None:
        stored_dtype = entry.shards.dtype
        elements = self._thread_buffer("cast", (stop - start) * stored_dtype.item_bytes)
        self._read_hits(find_hits(entry.shards, box, shape, start, stop), elements.data)
        cast_into(elements, stored_dtype, out, entry.dtype, addend=entry.plus)

    def _read_hits(self, found_hits: Sequence[Hit], out: memoryview) -> None:
        for hit in found_hits:
            if hit.framing is Framing.RAW:
                self._read_hit(
                    hit, hit.at.start, self._record_checks.find_record_in_zip(hit.at.file, hit.at.start), out
                )
            else:
                location = self._get_item_location(hit)
                if hit.framing is Framing.ZSTD_ITEM:
                    hit = replace(hit, at=ByteRange(inflated_name(hit.at), 0, 0))
                self._read_hit_of_item(hit, location, out)

    def _read_hit_of_item(self, hit: Hit, location: ItemLocation, out: memoryview) -> None:
        first_byte = location.start + location.storage_offset * hit.dtype.item_bytes
        record = self._record_checks.make_item_record(hit.at.file, location.start, location.stop, location.crc_at)
        is_in_order = is_row_major(location.shape, location.strides)
        for hit_part in (hit,) if is_in_order else to_stored_order_hits(hit, location):
            self._read_hit(hit_part, first_byte, record, out)

    def _get_item_location(self, hit: Hit) -> ItemLocation:
        location = self._item_locations.get(hit.at)
        if location is None:
            location = self._locate_item(hit)
            if len(self._item_locations) >= MAX_KNOWN_ITEMS:
                self._item_locations.clear()
            self._item_locations[hit.at] = location
        return location

    def _locate_item(self, hit: Hit) -> ItemLocation:
        from ckpt_tools.serialization.torch_zip import locate_item

        if hit.framing is Framing.ZSTD_ITEM:
            limit = hit.numel * hit.dtype.item_bytes + MAX_OVERHEAD_BYTES
            size = self._inflated_reader.inflated_size(hit.at, limit_bytes=limit)
            location = locate_item(self._range_reader_of(inflated_name(hit.at)), 0, size, hit.at.file)
        else:
            self.store.prefetch(hit.at.file, hit.at.start, hit.at.stop)
            location = locate_item(self._range_reader_of(hit.at.file), hit.at.start, hit.at.stop, hit.at.file)
        if location.dtype is not hit.dtype or prod(location.shape) != hit.numel:
            raise MalformedError(
                f"the item at byte {hit.at.start:,} holds {list(location.shape)} of {location.dtype.value} "
                f"but its index states {hit.numel:,} elements of {hit.dtype.value}",
                path=hit.at.file,
            )
        return location

    def _range_reader_of(self, file: str) -> Callable[[int, int], bytes]:
        def read_range(start: int, stop: int) -> bytes:
            buffer = bytearray(stop - start)
            self._read_into(file, start, memoryview(buffer))
            return bytes(buffer)

        return read_range

    def _read_into(self, file: str, start: int, buffer: memoryview) -> None:
        if is_inflated_name(file):
            self._inflated_reader.read_into(file, start, buffer)
            return
        self.store.read_into(file, start, buffer)
        self._count_bytes_read(file, len(buffer))

    def _read_unchecked(self, file: str, start: int, stop: int) -> bytes:
        """Read a directory, or bytes for a checksum alone; neither counts as read."""
        buffer = bytearray(stop - start)
        read = self._inflated_reader.read_into if is_inflated_name(file) else self.store.read_into
        read(file, start, memoryview(buffer))
        return bytes(buffer)

    def _read_elements(self, record: RecordProgress, start: int, buffer: memoryview) -> None:
        self._read_into(record.file, start, buffer)
        if self.compares_records:
            self._record_checks.check_passed_bytes(record, start, buffer)

    def _count_bytes_read(self, file: str, num_bytes: int) -> None:
        num_bytes = self.store.count_stored_bytes(file, num_bytes)
        self._buffers.bytes_read = self.bytes_read_here + num_bytes
        with self._lock:
            self._bytes_read += num_bytes

    def _read_hit(self, hit: Hit, first_byte: int, record: RecordProgress, out: memoryview) -> None:
        """Read a hit whose stored piece has its element 0 at ``first_byte`` of the file and lies in ``record``."""
        item_bytes = hit.dtype.item_bytes
        if isinstance(hit, FlatHit):
            start, num_bytes = hit.destination_start * item_bytes, (hit.stop - hit.start) * item_bytes
            self._read_elements(record, first_byte + hit.start * item_bytes, out[start : start + num_bytes])
            return
        strides = tuple(stride * item_bytes for stride in hit.destination_strides)
        destination = np.ndarray(
            hit.extents, _opaque_dtype(item_bytes), out, hit.destination_start * item_bytes, strides
        )
        self._read_strided(record, first_byte + item_bytes * hit.start, hit.strides, destination)

    def _read_strided(self, record: RecordProgress, start_byte: int, strides: Shape, destination: NDArray[Any]) -> None:
        """Fill ``destination`` with elements ``strides`` apart in the file, its element 0 at ``start_byte``."""
        # One read and a strided copy, if the span from the first to the last element fits the scratch buffer and is
        # not mostly gaps. Otherwise the dim that reaches farthest is halved; a span of one element ends this.
        if destination.flags.c_contiguous and is_row_major(destination.shape, strides):
            self._read_elements(record, start_byte, destination.reshape(-1).view(np.uint8).data)
            return
        item_bytes = destination.dtype.itemsize
        reach_by_dim = [(extent - 1) * stride for extent, stride in zip(destination.shape, strides, strict=True)]
        span = sum(reach_by_dim) + 1
        if span > 1 and (span * item_bytes > self.scratch_bytes or _is_sparse(destination, strides, span)):
            self._read_halves(record, start_byte, strides, destination, reach_by_dim.index(max(reach_by_dim)))
            return
        block = self._thread_buffer("strided", span * item_bytes)
        self._read_elements(record, start_byte, block.data)
        byte_strides = tuple(stride * item_bytes for stride in strides)
        destination[...] = np.ndarray(destination.shape, destination.dtype, block.data, strides=byte_strides)

    def _read_halves(
        self, record: RecordProgress, start_byte: int, strides: Shape, destination: NDArray[Any], dim: int
    ) -> None:
        middle = (destination.shape[dim] + 1) // 2
        leading_slices = (slice(None),) * dim
        self._read_strided(record, start_byte, strides, destination[(*leading_slices, slice(None, middle))])
        second_start_byte = start_byte + middle * strides[dim] * destination.dtype.itemsize
        self._read_strided(record, second_start_byte, strides, destination[(*leading_slices, slice(middle, None))])

    def __reduce__(self) -> tuple[object, ...]:
        """In another process: the same store, nothing read yet."""
        return TensorReader, (self.store, self.scratch_bytes, self.compares_records)

    def _thread_buffer(self, use: str, num_bytes: int) -> NDArray[np.uint8]:
        """``num_bytes`` of this thread's buffer for ``use``, which the next call overwrites."""
        buffer: NDArray[np.uint8] | None = getattr(self._buffers, use, None)
        if buffer is None or buffer.nbytes < num_bytes:
            buffer = allocate_page_aligned(num_bytes)
            setattr(self._buffers, use, buffer)
        return buffer[:num_bytes]


def _is_sparse(destination: NDArray[Any], strides: Shape, span: int) -> bool:
    """True if less than half of a span is wanted, and its gaps are so long that they cost more than further reads."""
    if span <= MAX_READ_AMPLIFICATION * destination.size:
        return False
    run_elements = 1  # elements that follow one another without a gap
    for stride, extent in sorted(zip(strides, destination.shape, strict=True)):
        if extent > 1 and stride != run_elements:
            break
        run_elements *= extent
    num_runs = destination.size // run_elements
    return (span - destination.size) * destination.dtype.itemsize > MAX_GAP_BYTES * num_runs


@cache
def _opaque_dtype(item_bytes: int) -> np.dtype[Any]:
    """A numpy type of that width which copies bits and never looks at them."""
    return np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(item_bytes, f"V{item_bytes}"))
