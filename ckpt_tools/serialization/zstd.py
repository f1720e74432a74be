"""Streams compressed with zstd, read through the package zstandard, which is imported on first use."""

from __future__ import annotations

from typing import Any

from ckpt_tools.errors import MalformedError, UnsupportedError, UsageError
from ckpt_tools.serialization.zip_archive import ReadRange

MAX_WINDOW_BYTES = 1 << 23
"""The window that a frame may ask for, which the reader keeps; the one of the level that torch uses is 2 MiB."""

READ_BYTES = 256 << 10
"""Compressed bytes read at a time."""

INPUT_CHUNK_BYTES = 1 << 12
"""Decompressed at a time where the output is not bounded: zstd makes up to 20,000 times as much of it."""

_MAGIC = b"\x28\xb5\x2f\xfd"


class ZstandardMissingError(UsageError):
    """The package that decompresses is not installed."""


def open_zstd_stream(read: ReadRange, size: int, path: str, *, max_window_bytes: int = MAX_WINDOW_BYTES) -> ZstdStream:
    """The ``size`` compressed bytes that ``read`` gives, in any number of frames. Raises ZstandardMissingError."""
    decompressor, error = _make_decompressor(path, max_window_bytes)
    stream = decompressor.stream_reader(_CompressedInput(read, size), read_size=READ_BYTES, read_across_frames=True)
    return ZstdStream(stream, error, path)


def decompress_all(read: ReadRange, size: int, path: str, *, limit_bytes: int) -> bytes:
    """The whole decompressed data. Raises MalformedError if it is damaged or larger than ``limit_bytes``."""
    stream = open_zstd_stream(read, size, path)
    decompressed = bytearray()
    while part := stream.read(min(1 << 20, limit_bytes + 1 - len(decompressed))):
        decompressed += part
        if len(decompressed) > limit_bytes:
            raise MalformedError(f"an item decompresses to more than {limit_bytes:,} bytes", path=path)
    return bytes(decompressed)


def decompress_frame(read: ReadRange, size: int, path: str, *, limit_bytes: int) -> bytes:
    """The decompressed data of exactly one frame, which every decompressor reads alike: of several, some read the
    first.

    Raises:
        UnsupportedError: it holds more than ``limit_bytes``. MalformedError: it is damaged, or not one frame to the
        last byte. ZstandardMissingError.
    """
    decompressor, error = _make_decompressor(path)
    frame = decompressor.decompressobj()
    decompressed = bytearray()
    try:
        for start in range(0, size, INPUT_CHUNK_BYTES):
            decompressed += frame.decompress(read(start, min(start + INPUT_CHUNK_BYTES, size)))
            if len(decompressed) > limit_bytes:
                raise UnsupportedError(
                    f"it is compressed with zstd, and decompresses to more than {limit_bytes:,} bytes", path=path
                )
    except error as damage:
        raise _make_damage_error(damage, path) from damage
    if not frame.eof or frame.unused_data or not read(0, len(_MAGIC)).startswith(_MAGIC):
        raise MalformedError("it is not one frame of zstd", path=path)
    return bytes(decompressed)


def _make_decompressor(path: str, max_window_bytes: int = MAX_WINDOW_BYTES) -> tuple[Any, type[Exception]]:
    """A decompressor and the class of its errors. Raises ZstandardMissingError."""
    zstandard = _import_zstandard(f"{path}: its items are compressed with zstd; install what reads them")
    return zstandard.ZstdDecompressor(max_window_size=max_window_bytes), zstandard.ZstdError


def make_compressor(level: int, num_bytes: int) -> Any:
    """A compressor of ``num_bytes`` in parts to one frame, which states them: ``compress``, at last ``flush``. Raises
    ZstandardMissingError."""
    zstandard = _import_zstandard("deltas are compressed with zstd; install what writes them")
    return zstandard.ZstdCompressor(level=level).compressobj(size=num_bytes)


def _import_zstandard(what_needs_it: str) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ZstandardMissingError(f"{what_needs_it} with: pip install 'ckpt-tools[zstd]' ({error})") from error
    return zstandard


def _make_damage_error(error: Exception, path: str) -> MalformedError:
    return MalformedError(f"an item is compressed with zstd, and damaged: {error}", path=path)


class _CompressedInput:
    """The first ``size`` bytes of a range, read one after another."""

    def __init__(self, read: ReadRange, size: int) -> None:
        self._read_range = read
        self._size = size
        self._at = 0

    def read(self, num_bytes: int) -> bytes:
        start, self._at = self._at, min(self._at + num_bytes, self._size)
        return self._read_range(start, self._at)


class ZstdStream:
    """A decompressing stream."""

    def __init__(self, stream: Any, error: type[Exception], path: str) -> None:
        self._stream = stream
        self._error = error
        self._path = path

    def read(self, size: int) -> bytes:
        """The next bytes, at most ``size``; none at the end. Raises MalformedError for a damaged frame."""
        try:
            return bytes(self._stream.read(size))
        except self._error as error:
            raise _make_damage_error(error, self._path) from error
