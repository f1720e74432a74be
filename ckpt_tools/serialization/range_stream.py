"""A range of a file as a stream, for libraries that want one."""

from __future__ import annotations

import io
from typing import Any

from ckpt_tools.serialization.zip_archive import ReadRange


class RangeStream(io.RawIOBase):
    """The first ``size`` bytes of what ``read`` reads."""

    def __init__(self, read: ReadRange, size: int) -> None:
        self._range = read
        self._size = size
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("a negative position")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size)
        data = self._range(self._at, stop) if self._at < stop else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
