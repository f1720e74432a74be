"""A destination in a store that takes bytes at any position: a local folder, or memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ckpt_tools.errors import CkptError
from ckpt_tools.stores.destination import Destination
from ckpt_tools.stores.source import Buffer, FileWriter, FillableStore

VERIFY_BLOCK_BYTES = 1 << 20
"""Bytes that are read again at a time, to be checked."""


@dataclass(slots=True)
class StoreDestination(Destination):
    """Files of ``store``, each open from its first part until it is finished.

    A copy in another process has no file open, and opens one when it first writes to it.
    """

    store: FillableStore
    _writers: dict[str, FileWriter] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def check_free_space(self, num_bytes: int) -> None:
        self.store.check_free_space(num_bytes)

    def begin_file(self, path: str, size_bytes: int) -> str:
        with self._lock:
            self._writers[path] = self.store.create(path, size_bytes)
        return ""

    def write_part(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        self._writer_of(path).write_at(offset, data)
        return ""

    def _writer_of(self, path: str) -> FileWriter:
        with self._lock:
            if path not in self._writers:
                self._writers[path] = self.store.reopen(path)
            return self._writers[path]

    def has_part(
        self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str
    ) -> bool:
        from isal import isal_zlib

        crc_so_far = 0
        try:
            for start in range(offset, offset + num_bytes, VERIFY_BLOCK_BYTES) or (offset,):
                buffer = bytearray(min(VERIFY_BLOCK_BYTES, offset + num_bytes - start))
                self.store.read_into(path, start, memoryview(buffer))
                crc_so_far = isal_zlib.crc32(buffer, crc_so_far)
        except CkptError:
            return False
        return crc_so_far == crc

    def finish_file(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        writer = self._writer_of(path)
        with self._lock:
            del self._writers[path]
        writer.close()

    def close_open_files(self) -> None:
        with self._lock:
            for writer in self._writers.values():
                with suppress(CkptError):
                    writer.abandon()
            self._writers.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return StoreDestination, (self.store,)
