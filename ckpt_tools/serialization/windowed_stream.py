"""Random access to a stream that can be read from its start alone, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ckpt_tools.errors import IncompleteError

BLOCK_BYTES = 1 << 20
"""Bytes read at a time."""

WINDOW_BYTES = 12 << 20
"""Last bytes that a stream keeps: three tasks of full size."""


class ByteStream(Protocol):
    """Bytes one after another."""

    def read(self, size: int) -> bytes:
        """The next bytes, at most ``size``; none at the end."""


@dataclass(slots=True)
class WindowedStream:
    """A stream that gives bytes from its start alone, read up to ``position``.

        bytes   0 == head ==              == window ==
                |-----------|-------------|------------|---------------|
                                                    position         length

    ``window`` holds the last ``num_kept`` bytes before ``position``. ``head`` is the first block, kept because an item
    is opened by its start and its end, after it was read once for its length. A read that begins between the two opens
    the stream again; one that ends after ``position`` reads on. ``length`` is None until the end was reached.
    """

    open_stream: Callable[[], ByteStream]
    stream: ByteStream
    window: deque[bytes] = field(default_factory=deque)
    num_kept: int = 0
    position: int = 0
    head: bytes = b""
    length: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read_block(self) -> int:
        """Read the next block; the number of its bytes, 0 at the end."""
        data = self.stream.read(BLOCK_BYTES)
        if not self.position:
            self.head = data
        if not data:
            self.length = self.position
        self.window.append(data)
        self.num_kept += len(data)
        self.position += len(data)
        while self.num_kept - len(self.window[0]) >= WINDOW_BYTES:
            self.num_kept -= len(self.window.popleft())
        return len(data)

    def read_into(self, start: int, buffer: memoryview) -> None:
        head = self.head[start : start + len(buffer)]
        bytes_copied = len(head)
        buffer[:bytes_copied] = head
        if bytes_copied < len(buffer) and start + bytes_copied < self.position - self.num_kept:
            self.stream = self.open_stream()
            self.window.clear()
            self.num_kept = self.position = 0
        while bytes_copied < len(buffer):
            if start + bytes_copied >= self.position:
                if not self.read_block():
                    raise IncompleteError(f"a compressed item ends at byte {self.position:,}")
                continue
            bytes_copied += self._copy_from_window(start + bytes_copied, buffer[bytes_copied:])

    def _copy_from_window(self, start: int, buffer: memoryview) -> int:
        window_position = self.position - self.num_kept
        for part in self.window:
            if start < window_position + len(part):
                piece = part[start - window_position : start - window_position + len(buffer)]
                buffer[: len(piece)] = piece
                return len(piece)
            window_position += len(part)
        raise AssertionError("the window holds what lies between its ends")
