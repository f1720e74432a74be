"""Direct I/O: bytes between a disk and the caller's memory, past the page cache.

A conversion reads each byte once and writes each byte once, so that the page cache only costs: 4.5 GB copied through it
take 4 to 8 seconds of a processor in the kernel, and 1 second past it. What lies in the page cache already is read from
there.

    file      |----|----|----|----|----|      blocks of 4 KiB
    bytes        [=================]
    direct         |----|----|----|           whole blocks, if they lie in memory as aligned as in the file
    buffered     [=]              [=]         the rest; no block is written in both ways at once
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tools.messages.progress import log_info
from ckpt_tools.stores.source import Store

BLOCK_BYTES = 4 << 10
"""Alignment of direct reads and writes, in the file and in memory: no file system asks for more but by EINVAL."""

MIN_READ_BYTES = 128 << 10
"""Less is read through the page cache, whose read-ahead serves headers."""

MIN_WRITE_BYTES = 32 << 10
"""Less is written through the page cache, which gathers it."""

REQUEST_BYTES = 1 << 20
"""Most bytes of one direct read or write. 3 GB read and written by 4 threads take 3.7 s so, and 4.6 s by 4 MiB. A
thread has so much memory for what is not aligned in the file as in its destination."""

MAX_MEMORY_SHARE = 0.5
"""Share of the free memory from which a checkpoint is moved past the page cache: a larger one evicts itself, and all
that other programs keep there."""

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_CACHESTAT = 451
"""Number of Linux's ``cachestat``, from 6.5 on, on every architecture but alpha."""


def exceeds_free_memory(num_bytes: int) -> bool:
    """True if files of so many bytes are too large to be kept in the page cache, and the system says so."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return num_bytes > MAX_MEMORY_SHARE * 1024 * int(line.split()[1])
    return False  # no such file: another system than Linux


def bypass_cache_if_large(store: Store, num_bytes: int) -> None:
    """Read ``store`` past the page cache if ``num_bytes``, which are about to be read once, are too many for it."""
    if exceeds_free_memory(num_bytes):
        store.bypass_page_cache()


def open_direct(path: Path, flags: int) -> int | None:
    """A descriptor for direct I/O; None, and a line of the log, where the file system refuses. Raises OSError."""
    try:
        if sys.platform == "linux":
            return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
    log_info("stores", f"{path.parent}: direct I/O is refused there, and the page cache is used")
    return None


def find_whole_blocks(data: memoryview, position: int) -> tuple[int, int]:
    """The part of ``data``, from and to which byte, that is whole blocks of the file if written at ``position``; empty
    if it is short, or not aligned in memory as in the file."""
    first = -position % BLOCK_BYTES
    stop = len(data) - (position + len(data)) % BLOCK_BYTES
    if stop - first < MIN_WRITE_BYTES:
        return 0, 0
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return (0, 0) if (address + first) % BLOCK_BYTES else (first, stop)


def write_direct(descriptor: int, blocks: memoryview, position: int) -> int:
    """Write whole blocks; the number of bytes that were written, which is less where the file system refuses. Raises
    OSError."""
    bytes_written = 0
    with _allow_refusal():
        while bytes_written < len(blocks) and bytes_written % BLOCK_BYTES == 0:
            bytes_written += os.pwrite(descriptor, blocks[bytes_written:][:REQUEST_BYTES], position + bytes_written)
    return bytes_written


def read_direct(descriptor: int, position: int, buffer: memoryview) -> int:
    """Fill ``buffer`` with the bytes from ``position`` on; the number of bytes that were read, which is less at the end
    of the file and where the file system refuses. Raises OSError."""
    bytes_read = 0
    with _allow_refusal():
        while bytes_read < len(buffer):
            start = position + bytes_read
            first = start - start % BLOCK_BYTES
            hull = _get_bounce_memory()[: -(-(position + len(buffer) - first) // BLOCK_BYTES) * BLOCK_BYTES]
            count = min(os.preadv(descriptor, [hull], first) - (start - first), len(buffer) - bytes_read)
            if count <= 0:
                break
            buffer[bytes_read : bytes_read + count] = hull[start - first : start - first + count]
            bytes_read += count
    return bytes_read


def is_in_page_cache(descriptor: int, position: int, num_bytes: int) -> bool:
    """True if the page cache has all of these bytes; False too where the system does not say."""
    stretch = (ctypes.c_uint64 * 2)(position, num_bytes)
    counts = (ctypes.c_uint64 * 5)()
    pages = -(-(position + num_bytes) // mmap.PAGESIZE) - position // mmap.PAGESIZE
    answer = _load_libc().syscall(_CACHESTAT, descriptor, ctypes.byref(stretch), ctypes.byref(counts), 0)
    return answer == 0 and counts[0] >= pages


@contextmanager
def _allow_refusal() -> Iterator[None]:
    """End the block where a file system refuses direct I/O."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise


_bounce = threading.local()


def _get_bounce_memory() -> memoryview:
    """This thread's memory for direct reads; it begins where a page does."""
    if not hasattr(_bounce, "memory"):
        _bounce.memory = memoryview(mmap.mmap(-1, REQUEST_BYTES))
    memory: memoryview = _bounce.memory
    return memory


@cache
def _load_libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
