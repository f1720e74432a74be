"""Ranges of items that are stored compressed, in bounded memory.

A compressed item can be read from its start alone. Each of the few items in use has a stream, which keeps the last part
of its output, because workers do not read in order. Bytes before that part are decompressed again. Before its elements
are read, an item is decompressed once to learn its length: its zip directory is at its end.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_tools.core.shards import ByteRange
from ckpt_tools.errors import MalformedError

if TYPE_CHECKING:
    from ckpt_tools.serialization.windowed_stream import WindowedStream
    from ckpt_tools.serialization.zstd import ZstdStream

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


@dataclass(slots=True, weakref_slot=True)
class InflatedReader:
    """Decompresses ranges; ``read`` gives bytes ``[start, stop)`` of a file. Safe to share between threads."""

    read: Callable[[str, int, int], bytes]
    _streams: OrderedDict[str, WindowedStream] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def inflated_size(self, compressed_range: ByteRange, *, limit_bytes: int) -> int:
        """The bytes that a range holds.

        Raises:
            MalformedError: it is damaged, or holds more than ``limit_bytes``.
        """
        stream = self._get_stream(inflated_name(compressed_range))
        with stream.lock:
            while stream.length is None and stream.read_block():
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

    def _get_stream(self, name: str) -> WindowedStream:
        with self._lock:
            stream = self._streams.pop(name, None) or self._open_stream(name)
            self._streams[name] = stream
            while len(self._streams) > MAX_STREAMS:
                self._streams.popitem(last=False)
            return stream

    def _open_stream(self, name: str) -> WindowedStream:
        from ckpt_tools.serialization.windowed_stream import WindowedStream
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

        return WindowedStream(open_decompressor, open_decompressor())
