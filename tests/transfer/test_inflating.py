"""Ranges that were compressed as a whole, read from anywhere in them."""

import random

import zstandard

from ckpt_tools.core.shards import ByteRange
from ckpt_tools.serialization.windowed_stream import BLOCK_BYTES, WINDOW_BYTES
from ckpt_tools.transfer.inflating import InflatedReader, inflated_name


def test_what_came_out_last_is_read_again_without_decompressing_again():
    generator = random.Random(3)
    data = generator.randbytes(WINDOW_BYTES + 8 * BLOCK_BYTES)
    packed = zstandard.compress(data)
    num_read = 0

    def read(file: str, start: int, stop: int) -> bytes:
        nonlocal num_read
        num_read += stop - start
        return packed[start:stop]

    inflating, buffer = InflatedReader(read), bytearray(1000)
    at = ByteRange("f", 0, len(packed))

    def check(start: int) -> None:
        inflating.read_into(inflated_name(at), start, memoryview(buffer))
        assert buffer == data[start : start + len(buffer)]

    assert inflating.inflated_size(at, limit_bytes=len(data)) == len(data)
    before = num_read
    for _ in range(100):
        check(len(data) - WINDOW_BYTES + generator.randrange(WINDOW_BYTES - len(buffer)))
    check(0)  # the head is kept too
    assert num_read == before
    check(2 * BLOCK_BYTES)
    assert num_read > before
