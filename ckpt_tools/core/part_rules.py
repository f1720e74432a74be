"""Sizes of the parts that a file is cut into: what a destination requires, and what copying by its service requires."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

SPARE_BYTES = 64
"""More than any element has: what a cut moves back, so as to split none, is less."""


def min_part_limit(min_bytes: int) -> int:
    """Largest part size needed, so that every run of at least ``min_bytes`` bytes can be cut into parts of at least
    that size."""
    return 2 * (min_bytes + SPARE_BYTES)


@dataclass(frozen=True, slots=True)
class PartRules:
    """Parts in which a destination takes a file: of about ``part_bytes`` if given, and at most ``max_parts``.

    ``service`` is what copies between its own files; None if nothing does. A part that it copies, and every other part
    of the same file except the last, has at least ``min_copy_bytes``.
    """

    part_bytes: int = 0
    max_parts: int | None = None
    min_copy_bytes: int = 0
    service: Hashable = None

    def required_task_bytes(self, largest_file: int) -> int:
        """The size to cut at, with room for parts that end a little earlier so as to split no element."""
        bytes_for_max_parts = 0 if self.max_parts is None else -(-largest_file // self.max_parts) + SPARE_BYTES
        return max(self.part_bytes + SPARE_BYTES if self.part_bytes else 0, bytes_for_max_parts)

    @property
    def min_copy_task_bytes(self) -> int:
        """The smallest limit of tasks with which they can be cut where stored ranges begin and end."""
        return min_part_limit(self.min_copy_bytes)

    def allows_copy(self, source_service: Hashable, num_bytes: int) -> bool:
        """True if so many bytes of a file of ``source_service`` may be copied as a part."""
        return self.service is not None and source_service == self.service and num_bytes >= self.min_copy_bytes
