"""Ranges of items that are stored compressed, in bounded memory.

A compressed item can be read from its start alone. Each of the few items in use has a stream, which keeps the last part
of its output, because workers do not read in order. Bytes before that part are decompressed again. Before its elements
are read, an item is decompressed once to learn its length: its zip directory is at its end.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_tools.core.shards import ByteRange
from ckpt_tools.errors import IncompleteError, MalformedError

if TYPE_CHECKING:
    from ckpt_tools.serialization.zstd import ZstdStream

BLOCK_BYTES = 1 << 20
"""Bytes decompressed at a time."""

WINDOW_BYTES = 12 << 20
"""Last decompressed bytes that a stream keeps: three tasks of full size."""

MAX_STREAMS = 4
"""Streams that are kept. Together they take what ``planning.plan.INFLATING_BYTES`` states."""

MAX_OVERHEAD_BYTES = 1 << 20
"""Bytes of an item in addition to its elements: a zip directory and a small pickle."""

_NAME_PREFIX = "\0inflated:"


def inflated_name(compressed_range: ByteRange) -> str:
    """The name of what a compressed range holds, as if it were a file. No store has a file of such a name."""
    return f"{_NAME_PREFIX}{compressed_range.start}:{compressed_range.stop}:{compressed_range.file}"


def is_inflated_name(file: str) -> bool:
    return file.startswith(_NAME_PREFIX)


@dataclass(slots=True)
class _InflateStream:
    """One item, decompressed up to ``position``.

        bytes   0 == head ==              == window ==
                |-----------|-------------|------------|---------------|
                                                    position         length

    ``window`` holds the last ``num_kept`` bytes before ``position``. ``head`` is the first block, kept because an item
    is opened by its start and its end, after it was decompressed once for its length. A read that begins between the
    two starts again from byte 0; one that ends after ``position`` decompresses further. ``length`` is None until the
    end was reached.
    """

    open_decompressor: Callable[[], ZstdStream]
    decompressor: ZstdStream
    window: deque[bytes] = field(default_factory=deque)
    num_kept: int = 0
    position: int = 0
    head: bytes = b""
    length: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def decompress_block(self) -> int:
        """Decompress the next block; the number of its bytes, 0 at the end."""
        data = self.decompressor.read(BLOCK_BYTES)
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
            self.decompressor = self.open_decompressor()
            self.window.clear()
            self.num_kept = self.position = 0
        while bytes_copied < len(buffer):
            if start + bytes_copied >= self.position:
                if not self.decompress_block():
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


@dataclass(slots=True, weakref_slot=True)
class InflatedReader:
    """Decompresses ranges; ``read`` gives bytes ``[start, stop)`` of a file. Safe to share between threads."""

    read: Callable[[str, int, int], bytes]
    _streams: OrderedDict[str, _InflateStream] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def inflated_size(self, compressed_range: ByteRange, *, limit_bytes: int) -> int:
        """The bytes that a range holds.

        Raises:
            MalformedError: it is damaged, or holds more than ``limit_bytes``.
        """
        stream = self._get_stream(inflated_name(compressed_range))
        with stream.lock:
            while stream.length is None and stream.decompress_block():
                if stream.position > limit_bytes:
                    raise MalformedError(
                        f"the item at byte {compressed_range.start:,} decompresses to more than the {limit_bytes:,} "
                        "bytes that its index allows",
                        path=compressed_range.file,
                    )
            assert stream.length is not None, "the end was reached"
            return stream.length

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``start`` of what the range of that name holds. Raises as ``inflated_size``."""
        stream = self._get_stream(name)
        with stream.lock:
            stream.read_into(start, buffer)

    def _get_stream(self, name: str) -> _InflateStream:
        with self._lock:
            stream = self._streams.pop(name, None) or self._open_stream(name)
            self._streams[name] = stream
            while len(self._streams) > MAX_STREAMS:
                self._streams.popitem(last=False)
            return stream

    def _open_stream(self, name: str) -> _InflateStream:
        from ckpt_tools.serialization.zstd import open_zstd_stream

        first, last, file = name.removeprefix(_NAME_PREFIX).split(":", 2)
        compressed_range = ByteRange(file, int(first), int(last))
        # zstandard's streams are invisible to the garbage collector: a cycle would stay forever.
        owner_ref = weakref.ref(self)

        def read_compressed(start: int, stop: int) -> bytes:
            owner = owner_ref()
            assert owner is not None, "a stream is read through its owner"
            return owner.read(compressed_range.file, compressed_range.start + start, compressed_range.start + stop)

        def open_decompressor() -> ZstdStream:
            return open_zstd_stream(
                read_compressed, compressed_range.stop - compressed_range.start, compressed_range.file
            )

        return _InflateStream(open_decompressor, open_decompressor())
