"""Memory that a virtual machine's host does not take back while something is measured.

A guest may give its free memory back to its host, in whole blocks, within seconds; whoever writes next waits for the
host, for twice the time of the copying. With one page in use in every mebibyte no block is ever whole. All contestants
then find the memory alike, as on a machine of its own: five runs of ``cp -r`` of 4.2 GB took 1.1 to 1.2 s, and 1.1 to
2.5 s without.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARE = 3
"""Of the available memory at most a third is touched, so that nobody has to make room for it."""

HOLD = """
import mmap, sys
size, kept, page = int(sys.argv[1]), 1 << 20, mmap.PAGESIZE
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
if hasattr(mmap, "MADV_NOHUGEPAGE"):
    memory.madvise(mmap.MADV_NOHUGEPAGE)
for start in range(0, size, kept):
    memory[start : start + kept : page] = bytes(kept // page)
for start in range(0, size, kept):
    memory.madvise(mmap.MADV_DONTNEED, start + page, kept - page)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(num_bytes: int) -> Iterator[None]:
    """So much memory is touched, given back in pieces, and kept in pieces until the end: a page of each mebibyte."""
    size = min(num_bytes, _available() // SHARE) >> 20 << 20
    command = [sys.executable, "-S", "-c", HOLD, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            yield
        finally:
            holder.stdin.close()


def _available() -> int:
    """Bytes that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("this system does not say how much memory it has")
