"""The page cache before a run: warm (all of the source is in memory), or cold (none of it is)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 8 << 20
MAX_COLD_SHARE = 0.01
"""Of the pages that may still be in memory before the whole machine's cache is dropped instead."""


def files_of(path: Path) -> Iterator[Path]:
    """The file itself, or all files of a folder."""
    yield from [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def size_of(path: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_size for file in files_of(path))


def warm(path: Path) -> None:
    """Read every byte once."""
    block = bytearray(BLOCK_BYTES)
    for file in files_of(path):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass


def cool(path: Path) -> float:
    """Drop every page of the files from memory; the share of pages that stayed.

    The programs stay in memory: what is measured is reading a checkpoint that was not read lately, not a machine that
    was just started. Where the kernel keeps pages although asked, its whole cache is dropped, if it may be.
    """
    for file in files_of(path):
        _evict(file)
    if (share := cached_share(path)) > MAX_COLD_SHARE:
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1")
        share = cached_share(path)
    return share


def _evict(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # a page that is not yet on the disk cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_share(path: Path) -> float:
    """Share of the files' pages that are in memory."""
    counts = [_cached_pages(file) for file in files_of(path) if file.stat().st_size]
    return sum(cached for cached, _ in counts) / max(1, sum(pages for _, pages in counts))


def _cached_pages(file: Path) -> tuple[int, int]:
    """Pages in memory, and pages in all: `mincore` of a mapping of the file."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        pages = -(-len(mapping) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapping)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapping)), found
        )
        del first  # a mapping that is still referred to cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(file))
        return sum(byte & 1 for byte in found), pages
