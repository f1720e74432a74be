"""Memory for bytes on their way: where it begins, and that all of it is there."""

import mmap
import resource
import sys

import numpy as np
import pytest

from ckpt_tools.transfer.buffers import allocate_page_aligned, populate_pages

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 4 << 20])
def test_a_buffer_begins_with_a_page_and_has_every_byte(num_bytes):
    buffers = [allocate_page_aligned(num_bytes) for _ in range(4)]
    for value, buffer in enumerate(buffers):
        buffer[...] = value
    assert [buffer.nbytes for buffer in buffers] == [num_bytes] * 4
    assert not any(buffer.ctypes.data % 4096 for buffer in buffers if num_bytes)
    assert [bytes(buffer) for buffer in buffers] == [bytes([value]) * num_bytes for value in range(4)]


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels are not asked")
def test_what_is_written_to_populated_memory_causes_no_page_faults():
    def faults_of(memory: mmap.mmap) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        np.frombuffer(memory, np.uint8)[...] = 1
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    plain, populated = (mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2))
    populate_pages(np.frombuffer(populated, np.uint8)[3:-5])
    assert faults_of(populated) < faults_of(plain) / 10


@pytest.mark.parametrize(("start", "stop"), [(0, None), (1, -1), (5000, 5000), (5000, 5001), (0, 4096), (7, 1 << 20)])
def test_populated_memory_keeps_what_it_holds(start, stop):
    memory = np.frombuffer(mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory[:10_000] = 7
    memory[-10_000:] = 9
    populate_pages(memory[start:stop])
    expected = bytes([7]) * 10_000 + bytes((4 << 20) - 20_000) + bytes([9]) * 10_000
    assert bytes(memory) == expected
