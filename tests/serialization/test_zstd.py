"""Items compressed with zstd: what all decompressors read alike, and what is refused."""

from __future__ import annotations

import pytest
import zstandard

from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.serialization.zstd import inflated, inflated_frame

pytestmark = pytest.mark.quick

DATA = bytes(range(256)) * 1000
FRAME = zstandard.ZstdCompressor().compress(DATA)
SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"


def one_frame(data: bytes, limit_bytes: int = len(DATA)) -> bytes:
    return inflated_frame(lambda start, stop: data[start:stop], len(data), "a", limit_bytes=limit_bytes)


def test_one_frame_is_read_to_its_last_byte():
    assert one_frame(FRAME) == DATA


@pytest.mark.parametrize("data", [b"", FRAME[:-1], FRAME + b"\0", FRAME * 2, SKIPPABLE + FRAME, FRAME + SKIPPABLE])
def test_what_is_not_one_frame_is_refused(data):
    with pytest.raises(MalformedError, match="zstd"):
        one_frame(data, limit_bytes=2 * len(DATA))


def test_several_frames_are_read_as_one():
    assert inflated(lambda start, stop: (FRAME * 2)[start:stop], 2 * len(FRAME), "a", limit_bytes=1 << 20) == DATA * 2


def test_more_than_the_limit_is_refused():
    with pytest.raises(UnsupportedError, match="more than 255,999 bytes"):
        one_frame(FRAME, len(DATA) - 1)
    with pytest.raises(MalformedError, match="more than 255,999 bytes"):
        inflated(lambda start, stop: FRAME[start:stop], len(FRAME), "a", limit_bytes=len(DATA) - 1)
