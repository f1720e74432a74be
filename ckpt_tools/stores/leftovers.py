"""Removes leftovers of runs that were killed, or failed with ``--resume``, at a destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ckpt_tools.core.showing import Shown
from ckpt_tools.stores.destination import Leftover, Place


@dataclass(frozen=True, slots=True, repr=False)
class CleanReport(Shown):
    """Leftovers at ``destination``, and whether they were removed."""

    SHOWN: ClassVar[tuple[str, ...]] = ("destination", "is_removed", "leftovers", "num_bytes")
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("num_bytes",)

    destination: str
    leftovers: Sequence[Leftover]
    is_removed: bool

    @property
    def num_bytes(self) -> int:
        return sum(left.num_bytes for left in self.leftovers)


def clean(place: Place, *, dry_run: bool) -> CleanReport:
    """Find leftovers, and remove them unless ``dry_run``.

    Raises:
        DestinationExistsError: a process is writing there. StoreError: the place failed.
    """
    found = place.leftovers() if dry_run else place.remove_leftovers()
    return CleanReport(place.url, tuple(found), is_removed=not dry_run)
