"""Small reads of a distant store, out of blocks that are read ahead and kept for a while.

Headers are read a few hundred bytes at a time: a DCP item has two, a torch file one for each storage. A request costs
10 to 30 ms wherever the bytes lie, so that a small read fetches the whole block around it, and its neighbours are there
already. Large reads pass through untouched.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from ckpt_tools.errors import IncompleteError
from ckpt_tools.stores.base import Located, Location, Store, Versioned

BLOCK_BYTES = 256 << 10
"""What a connection delivers in the time that its first byte takes: 10 ms at 25 MB/s and more."""

MAX_BLOCKS = 64
"""16 MiB in all."""

MAX_SMALL_BYTES = BLOCK_BYTES // 2
"""Larger reads are worth a request of their own."""

_Key = tuple[str, int]


@dataclass(slots=True)
class BlockCache:
    """``store``, whose files do not change while they are read. Safe to share between threads: a block that several
    want is read once."""

    store: Store
    sizes: Mapping[str, int] = field(repr=False)
    _blocks: OrderedDict[_Key, Future[bytes]] = field(default_factory=OrderedDict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def url(self) -> str:
        return self.store.url

    def list(self) -> Mapping[str, int]:
        return self.store.list()

    def version(self, path: str) -> str:
        return self.store.version(path) if isinstance(self.store, Versioned) else ""

    def locate(self, path: str) -> Location | None:
        return self.store.locate(path) if isinstance(self.store, Located) else None

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        size = self.sizes.get(path, 0)
        if path in self.sizes and start + len(buffer) > size:
            raise IncompleteError(f"it ends at byte {size:,}, before byte {start + len(buffer):,}", path=path)
        if len(buffer) > MAX_SMALL_BYTES or path not in self.sizes:
            self.store.read_into(path, start, buffer)
            return
        done = 0
        while done < len(buffer):
            number, offset = divmod(start + done, BLOCK_BYTES)
            piece = memoryview(self._block((path, number)))[offset : offset + len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def _block(self, key: _Key) -> bytes:
        with self._lock:
            found = self._blocks.get(key)
            mine = found is None
            if found is None:
                found = self._blocks[key] = Future()
                if len(self._blocks) > MAX_BLOCKS:
                    self._blocks.popitem(last=False)
            else:
                self._blocks.move_to_end(key)
        if mine:
            self._read(key, found)
        return found.result()

    def _read(self, key: _Key, into: Future[bytes]) -> None:
        """A block that cannot be read fails for all who wait, and is read anew by whoever asks later."""
        path, number = key
        start = number * BLOCK_BYTES
        buffer = bytearray(min(BLOCK_BYTES, self.sizes[path] - start))
        try:
            self.store.read_into(path, start, memoryview(buffer))
        except BaseException as error:
            with self._lock:
                self._blocks.pop(key, None)
            into.set_exception(error)
        else:
            into.set_result(bytes(buffer))

    def __reduce__(self) -> tuple[object, ...]:
        """In another process: the same store, nothing read yet."""
        return BlockCache, (self.store, self.sizes)
