"""Limits of a scan for data that a small file expands to."""

from __future__ import annotations

from ckpt_tools.verification.scan.findings import NotLookedIntoError

MAX_INFLATED_BYTES = 1 << 25
"""Most bytes of one decompressed item, which is held in memory."""

_BASE_INFLATED_BYTES, _INFLATED_PER_BYTE = 1 << 28, 64
"""Elements of tensors are inflated and not read: about a second a gigabyte."""

_BASE_PICKLED_BYTES, _PICKLED_PER_BYTE = 1 << 20, 1
"""The worst opcodes take a second and 100 MB for each megabyte of them. An item of a tensor has 300 bytes of pickle, so
that a checkpoint of many compressed tensors is far from this; a compressed object of several megabytes is not."""


class InflationBudget:
    """Bytes that compressed items may have outside of their compression: some for each compressed byte that was met,
    and a base that is there once. So small files do not expand to gigabytes, and large ones do not run out."""

    def __init__(self) -> None:
        self._remaining_bytes = _BASE_INFLATED_BYTES

    def grant_bytes(self, packed_bytes: int, *, max_bytes: int = MAX_INFLATED_BYTES) -> int:
        """Bytes that an item of ``packed_bytes`` may have, up to ``max_bytes``. Raises NotLookedIntoError if nothing is
        left."""
        self._remaining_bytes += packed_bytes * _INFLATED_PER_BYTE
        if self._remaining_bytes <= 0:
            raise NotLookedIntoError("it is compressed, and the items before it were too large outside of their files")
        return min(self._remaining_bytes, max_bytes)

    def spend_bytes(self, num_bytes: int) -> None:
        self._remaining_bytes -= num_bytes


class PickleBudget:
    """Bytes that pickles in compressed items may have outside of their compression."""

    def __init__(self) -> None:
        self._remaining_bytes = _BASE_PICKLED_BYTES

    def try_spend(self, num_bytes: int, packed_bytes: int) -> bool:
        """True if a pickle of ``num_bytes`` in an item of ``packed_bytes`` is within the budget, which is then
        spent."""
        self._remaining_bytes += packed_bytes * _PICKLED_PER_BYTE
        if num_bytes > self._remaining_bytes:
            return False
        self._remaining_bytes -= num_bytes
        return True
