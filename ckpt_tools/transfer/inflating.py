"""Ranges of items that are stored compressed, in bounded memory.

A compressed item can be read from its start alone. Each of the few items in use has a stream,
which keeps the last part of its output, because workers do not ask in order. Bytes before that part are decompressed
again. An item is read once before, to learn its length: its zip directory is at its end.
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

_MARK = "\0inflated:"


def inflated_name(at: ByteRange) -> str:
    """The name of what a compressed range holds, as if it were a file. No store has a file of such a name."""
    return f"{_MARK}{at.start}:{at.stop}:{at.file}"


def is_inflated(file: str) -> bool:
    return file.startswith(_MARK)


@dataclass(slots=True)
class _Stream:
    """One item; what came out last is in ``window``, and ends at ``position``.

    ``head`` is what came out first: where an item is opened, its start is read before its end. ``length`` is known once
    the end was reached.
    """

    open: Callable[[], ZstdStream]
    source: ZstdStream
    window: deque[bytes] = field(default_factory=deque)
    kept: int = 0
    position: int = 0
    head: bytes = b""
    length: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self) -> int:
        """Bytes that came out; none at the end."""
        data = self.source.read(BLOCK_BYTES)
        if not self.position:
            self.head = data
        if not data:
            self.length = self.position
        self.window.append(data)
        self.kept += len(data)
        self.position += len(data)
        while self.kept - len(self.window[0]) >= WINDOW_BYTES:
            self.kept -= len(self.window.popleft())
        return len(data)

    def read_into(self, start: int, buffer: memoryview) -> None:
        head = self.head[start : start + len(buffer)]
        done = len(head)
        buffer[:done] = head
        if done < len(buffer) and start + done < self.position - self.kept:
            self.source = self.open()
            self.window.clear()
            self.kept = self.position = 0
        while done < len(buffer):
            if start + done >= self.position:
                if not self.advance():
                    raise IncompleteError(f"a compressed item ends at byte {self.position:,}")
                continue
            done += self._copied(start + done, buffer[done:])

    def _copied(self, start: int, buffer: memoryview) -> int:
        at = self.position - self.kept
        for part in self.window:
            if start < at + len(part):
                found = part[start - at : start - at + len(buffer)]
                buffer[: len(found)] = found
                return len(found)
            at += len(part)
        raise AssertionError("the window holds what lies between its ends")


@dataclass(slots=True, weakref_slot=True)
class Inflating:
    """Decompresses ranges; ``read`` gives bytes ``[start, stop)`` of a file. Safe to share between threads."""

    read: Callable[[str, int, int], bytes]
    _streams: OrderedDict[str, _Stream] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def size(self, at: ByteRange, *, limit_bytes: int) -> int:
        """The bytes that a range holds.

        Raises:
            MalformedError: it is damaged, or holds more than ``limit_bytes``.
        """
        stream = self._stream(inflated_name(at))
        with stream.lock:
            while stream.length is None and stream.advance():
                if stream.position > limit_bytes:
                    raise MalformedError(
                        f"the item at byte {at.start:,} decompresses to more than the {limit_bytes:,} bytes that its "
                        "index allows",
                        path=at.file,
                    )
            assert stream.length is not None, "the end was reached"
            return stream.length

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``start`` of what the range of that name holds. Raises as ``size``."""
        stream = self._stream(name)
        with stream.lock:
            stream.read_into(start, buffer)

    def _stream(self, name: str) -> _Stream:
        with self._lock:
            found = self._streams.pop(name, None) or self._opened(name)
            self._streams[name] = found
            while len(self._streams) > MAX_STREAMS:
                self._streams.popitem(last=False)
            return found

    def _opened(self, name: str) -> _Stream:
        from ckpt_tools.serialization.zstd import open_zstd_stream

        first, last, file = name.removeprefix(_MARK).split(":", 2)
        at = ByteRange(file, int(first), int(last))
        # zstandard's streams are invisible to the garbage collector: a cycle would stay forever.
        own = weakref.ref(self)

        def read(start: int, stop: int) -> bytes:
            alive = own()
            assert alive is not None, "a stream is read through its owner"
            return alive.read(at.file, at.start + start, at.start + stop)

        def source() -> ZstdStream:
            return open_zstd_stream(read, at.stop - at.start, at.file)

        return _Stream(source, source())
