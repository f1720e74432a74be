"""Limits of a scan for data that a small file expands to."""

from __future__ import annotations

from ckpt_tools.verification.scan.findings import NotLookedIntoError

MAX_INFLATED_BYTES = 1 << 25
"""Most bytes of one decompressed item, which is held in memory."""

_SPARE_INFLATED_BYTES, _INFLATED_PER_BYTE = 1 << 28, 64
"""Elements of tensors are inflated and not read: about a second a gigabyte."""

_SPARE_PICKLED_BYTES, _PICKLED_PER_BYTE = 1 << 20, 1
"""The worst opcodes take a second and 100 MB for each megabyte of them. An item of a tensor has 300 bytes of pickle, so
that a checkpoint of many compressed tensors is far from this; a compressed object of several megabytes is not."""


class InflationBudget:
    """Bytes that compressed items may have outside of their compression."""

    def __init__(self) -> None:
        self._left = _SPARE_INFLATED_BYTES

    def limit(self, packed_bytes: int, *, most: int = MAX_INFLATED_BYTES) -> int:
        """Bytes that an item of ``packed_bytes`` may have, up to ``most``. Raises NotLookedIntoError if nothing is
        left."""
        self._left += packed_bytes * _INFLATED_PER_BYTE
        if self._left <= 0:
            raise NotLookedIntoError("it is compressed, and the items before it were too large outside of their files")
        return min(self._left, most)

    def spend(self, num_bytes: int) -> None:
        self._left -= num_bytes


class PickleBudget:
    """Bytes that pickles in compressed items may have outside of their compression."""

    def __init__(self) -> None:
        self._left = _SPARE_PICKLED_BYTES

    def spend(self, num_bytes: int, packed_bytes: int) -> bool:
        """True if a pickle of ``num_bytes`` in an item of ``packed_bytes`` is within the budget, which is then
        spent."""
        self._left += packed_bytes * _PICKLED_PER_BYTE
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True
