"""Memory around a run: the page cache, warm (all of the source is in memory) or cold (none of it is), and ballast.

A virtual machine may give free memory back to its host, in whole blocks, within seconds; the next writer waits for the
host, for twice the time of the copying. With one page in use in every mebibyte no block is ever whole: five runs of
``cp -r`` of 4.2 GB took 1.1 to 1.2 s, and 1.1 to 2.5 s without such ballast.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCK_BYTES = 8 << 20
MAX_COLD_SHARE = 0.01
"""Largest share of pages that may stay in memory. Above it, the whole machine's cache is dropped."""


def iter_files(path: Path) -> Iterator[Path]:
    """The file itself, or all files of a folder."""
    yield from [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def count_bytes(path: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_size for file in iter_files(path))


def read_into_cache(path: Path) -> None:
    """Read every byte once."""
    block = bytearray(BLOCK_BYTES)
    for file in iter_files(path):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass


def drop_from_cache(path: Path) -> float:
    """Drop every page of the files from memory; the share of pages that stayed.

    Programs stay in memory: the machine is not one that was just started. Where the kernel keeps pages, its whole cache
    is dropped, if that is permitted.
    """
    for file in iter_files(path):
        with file.open("rb") as stream:
            os.fsync(stream)  # a page that is not yet on the disk cannot be dropped
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if (share := get_cached_share(path)) > MAX_COLD_SHARE:
        _drop_caches()
        share = get_cached_share(path)
    return share


def _drop_caches() -> None:
    """Drop the clean pages of the whole machine's cache, if that is permitted."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def get_cached_share(path: Path) -> float:
    """Share of the files' pages that are in memory, as `fincore` of util-linux says."""
    files = [file for file in iter_files(path) if file.stat().st_size]
    command = ["fincore", "--bytes", "--raw", "--noheadings", "--output", "PAGES", "--", *map(str, files)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout if files else ""
    pages = sum(-(-file.stat().st_size // mmap.PAGESIZE) for file in files)
    return sum(map(int, found.split())) / max(1, pages)


TOUCHED_SHARE = 0.75
"""Largest share of the available memory that is touched."""

MEBIBYTE = 1 << 20


@contextmanager
def hold_ballast(num_bytes: int) -> Iterator[None]:
    """Touch so much memory, and keep one page of each mebibyte until the end.

    The cache is dropped before. Memory that it has, and that is evicted later, would otherwise go back to the host.
    """
    _drop_caches()
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    size = min(num_bytes, int(available * TOUCHED_SHARE)) // MEBIBYTE * MEBIBYTE
    with mmap.mmap(-1, max(MEBIBYTE, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for start in range(0, size, MEBIBYTE):
            memory[start : start + MEBIBYTE : mmap.PAGESIZE] = bytes(MEBIBYTE // mmap.PAGESIZE)
        for start in range(0, size, MEBIBYTE):
            memory.madvise(mmap.MADV_DONTNEED, start + mmap.PAGESIZE, MEBIBYTE - mmap.PAGESIZE)
        yield
