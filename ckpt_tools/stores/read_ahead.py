"""Small reads of a distant store, out of blocks that are read ahead and kept for a while.

Headers are read a few hundred bytes at a time: a DCP item has two, a torch file one for each storage. A request costs
10 to 30 ms at any position, so a small read fetches the whole blocks around it. A read that starts where an earlier
one ended also fetches the following blocks: the items of a DCP file are read one after the other. A piece whose headers
and elements a thread needs is read in one request. Large reads pass through untouched. 300 MB of DCP items of
0.2 to 4 MB by 8 threads: 850 requests for 312 MB; blocks of 256 KiB alone took 1,400 for 471 MB.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby

from ckpt_tools.stores.parallel import iter_in_parallel
from ckpt_tools.stores.source import Item, Result, Store, StoreWrapper, check_range

BLOCK_BYTES = 64 << 10
"""Between two headers that are far from each other, little else is read."""

AHEAD_BYTES = 256 << 10
"""Read at once where small reads follow one another: as much as a connection delivers in the time of its first byte.
More is thrown away before it is used where 8 threads read 4 files each."""

MAX_BLOCKS = 256
"""16 MiB in all."""

MAX_SMALL_BYTES = 128 << 10
"""Larger reads are worth a request of their own."""

MAX_PIECE_BYTES = 4 << 20
"""A larger piece is worth a request for its headers and one for its elements; a thread keeps one that is not."""

_BlockKey = tuple[str, int]
_Block = Future[bytes]


@dataclass(slots=True)
class BlockCache(StoreWrapper):
    """``store``, whose files do not change while they are read. Safe to share between threads: a block that several
    want is read once."""

    store: Store
    sizes: Mapping[str, int] = field(repr=False)
    _blocks: OrderedDict[_BlockKey, _Block] = field(default_factory=OrderedDict, init=False, repr=False)
    _thread_state: threading.local = field(default_factory=threading.local, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def size(self, path: str) -> int:
        return self.sizes[path] if path in self.sizes else self.store.size(path)

    def prefetch(self, path: str, start: int, stop: int) -> None:
        """Most of ``[start, stop)`` is about to be read by this thread, in an order of its own: read it at once."""
        self._thread_state.piece = None
        if MAX_SMALL_BYTES < stop - start <= MAX_PIECE_BYTES:
            buffer = memoryview(bytearray(stop - start))
            self.store.read_into(path, start, buffer)
            self._thread_state.piece = (path, start, buffer)

    def map_files(self, read: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return iter_in_parallel(read, items)

    def _find_prefetched(self, path: str, start: int, num_bytes: int) -> memoryview | None:
        """The bytes if they lie in the range that this thread prefetched last, else None."""
        piece_path, piece_start, piece = getattr(self._thread_state, "piece", None) or ("", 0, memoryview(b""))
        if piece_path != path or not piece_start <= start <= start + num_bytes <= piece_start + len(piece):
            return None
        return piece[start - piece_start :][:num_bytes]

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        if path in self.sizes:
            check_range(path, start + len(buffer), self.sizes[path])
        if (prefetched := self._find_prefetched(path, start, len(buffer))) is not None:
            buffer[:] = prefetched
            return
        if len(buffer) > MAX_SMALL_BYTES or path not in self.sizes:
            self.store.read_into(path, start, buffer)
            return
        if not len(buffer):
            return
        first, last = start // BLOCK_BYTES, (start + len(buffer) - 1) // BLOCK_BYTES
        bytes_copied = 0
        for number, block in enumerate(self._get_blocks(path, first, last), first):
            offset = start + bytes_copied - number * BLOCK_BYTES
            piece = block.result()[offset : offset + len(buffer) - bytes_copied]
            buffer[bytes_copied : bytes_copied + len(piece)] = piece
            bytes_copied += len(piece)

    def _get_blocks(self, path: str, first: int, last: int) -> Sequence[_Block]:
        """Blocks ``first`` to ``last``; those that are not being read yet are read here."""
        # A block is a future. A thread adds the futures of missing blocks with the lock held, and reads them without
        # it; other threads wait for these futures. A failed read takes its futures out, so that the next one retries.
        with self._lock:
            cached_blocks = {number: self._blocks.get((path, number)) for number in range(first, last + 1)}
            missing_numbers = [number for number, block in cached_blocks.items() if block is None]
            new_blocks = self._reserve_blocks(path, first, missing_numbers[0], last) if missing_numbers else {}
            for key in ((path, number) for number in cached_blocks):
                self._blocks.move_to_end(key)
            blocks = [self._blocks[path, number] for number in cached_blocks]
            while len(self._blocks) > MAX_BLOCKS:
                self._blocks.popitem(last=False)
        if new_blocks:
            self._read_blocks(path, new_blocks)
        return blocks

    def _reserve_blocks(self, path: str, first: int, start: int, last: int) -> dict[int, _Block]:
        """New blocks from ``start`` on for this thread to read: up to ``last``, and a few more if the file seems to be
        read in order, since ``first`` or the block before it is there. Beyond ``last`` they end at a block that is
        there."""
        stop = last + 1
        if (path, first - 1) in self._blocks or start > first:
            stop = max(stop, start + AHEAD_BYTES // BLOCK_BYTES)
        new_blocks: dict[int, _Block] = {}
        for number in range(start, min(stop, -(-self.sizes[path] // BLOCK_BYTES))):
            if (path, number) not in self._blocks:
                new_blocks[number] = self._blocks[path, number] = Future()
            elif number > last:
                break
        return new_blocks

    def _read_blocks(self, path: str, new_blocks: dict[int, _Block]) -> None:
        """Read each stretch in one request. A failed block raises in all threads that wait for it, and is read again
        at the next request."""
        for _, numbers in groupby(enumerate(new_blocks), key=lambda each: each[1] - each[0]):
            consecutive_numbers = [number for _, number in numbers]
            start = consecutive_numbers[0] * BLOCK_BYTES
            buffer = memoryview(bytearray(min(len(consecutive_numbers) * BLOCK_BYTES, self.sizes[path] - start)))
            try:
                self.store.read_into(path, start, buffer)
            except BaseException as error:
                with self._lock:
                    for number in [number for number, block in new_blocks.items() if not block.done()]:
                        self._blocks.pop((path, number), None)
                        new_blocks[number].set_exception(error)
                return
            for number in consecutive_numbers:
                block_offset = number * BLOCK_BYTES - start
                new_blocks[number].set_result(bytes(buffer[block_offset : block_offset + BLOCK_BYTES]))

    def __reduce__(self) -> tuple[object, ...]:
        return BlockCache, (self.store, self.sizes)
