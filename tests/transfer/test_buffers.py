"""Memory for bytes on their way: where it begins, and that all of it is there."""

from __future__ import annotations

import pytest

from ckpt_tools.transfer.buffers import page_aligned


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 4 << 20])
def test_a_buffer_begins_with_a_page_and_has_every_byte(num_bytes: int) -> None:
    buffers = [page_aligned(num_bytes) for _ in range(4)]
    for value, buffer in enumerate(buffers):
        buffer[...] = value
    assert [buffer.nbytes for buffer in buffers] == [num_bytes] * 4
    assert not any(buffer.ctypes.data % 4096 for buffer in buffers if num_bytes)
    assert [bytes(buffer) for buffer in buffers] == [bytes([value]) * num_bytes for value in range(4)]
