"""The result of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ckpt_tools.core.notes import Note
from ckpt_tools.core.showing import Shown
from ckpt_tools.verification.difference import Aspect, Difference
from ckpt_tools.verification.report_summary import DifferenceSummary, summarize


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Shown):
    """Result of a comparison. ``num_bytes`` are logical bytes of the tensors on one side.

    ``num_digests`` counts the tensors whose elements were compared with a recorded digest; it is None if there were no
    digests. ``notes`` list what was left out of the comparison, and the reason.
    """

    SHOWN: ClassVar[tuple[str, ...]] = (
        "equal",
        "num_tensors",
        "num_differing",
        "num_bytes",
        "differences",
        "num_digests",
        "notes",
    )
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("equal", "num_differing", "num_equal", "num_entries")

    num_tensors: int
    num_bytes: int
    differences: tuple[Difference, ...]
    num_digests: int | None = None
    notes: tuple[Note, ...] = ()

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def num_differing(self) -> int:
        """Tensors that differ. A tensor that differs in several ways counts once."""
        return len({difference.key for difference in self.differences if difference.aspect is not Aspect.ENTRY})

    @property
    def num_entries(self) -> int:
        """Values that are not tensors and differ: hyperparameters, the step, the user's own entries."""
        return sum(difference.aspect is Aspect.ENTRY for difference in self.differences)

    @property
    def num_equal(self) -> int:
        """Tensors of the first side that do not differ."""
        return self.num_compared - self.num_differing

    @property
    def num_compared(self) -> int:
        """Tensors that at least one side has."""
        return self.num_tensors + sum(each.aspect is Aspect.UNEXPECTED for each in self.differences)

    @property
    def summary(self) -> DifferenceSummary:
        """The totals, and the differences by size."""
        return summarize(self.differences)
