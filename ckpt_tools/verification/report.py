"""The result of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ckpt_tools.core.json_fields import json_of
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.notes import Note
from ckpt_tools.core.showing import Shown
from ckpt_tools.verification.deviation import Deviation
from ckpt_tools.verification.report_summary import DifferenceSummary, summarize


class Aspect(Enum):
    """The way in which a tensor differs."""

    MISSING = "missing"
    """Only the first side has it."""
    UNEXPECTED = "unexpected"
    """Only the second side has it."""
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUES = "values"
    DIGEST = "digest"
    """Its elements do not have their recorded digest."""
    CHECKSUM = "checksum"
    """A stored record does not match the checksum stored with it."""


@dataclass(frozen=True, slots=True, repr=False)
class Difference(Shown):
    """One tensor that is not the same. ``deviation`` says how far its elements are apart, if they were compared."""

    key: StateKey
    aspect: Aspect
    what: str
    deviation: Deviation | None = None

    def shown(self) -> dict[str, object]:
        return {
            "key": str(self.key),
            "aspect": self.aspect.value,
            "what": self.what,
        }

    def to_json(self) -> dict[str, Any]:
        return json_of(self)


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Shown):
    """What was compared. ``num_bytes`` are logical bytes of the tensors on one side.

    ``num_digests`` counts the tensors whose elements were compared with a recorded digest; it is None if there were no
    digests. ``notes`` list the tensors that were left out of the comparison, and the reason.
    """

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
        return len({difference.key for difference in self.differences})

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

    def shown(self) -> dict[str, object]:
        return {
            "equal": self.equal,
            "num_tensors": self.num_tensors,
            "num_differing": self.num_differing,
            "num_bytes": self.num_bytes,
            "differences": len(self.differences),
            "num_digests": self.num_digests,
            "notes": len(self.notes),
        }

    def to_json(self) -> dict[str, Any]:
        return json_of(self, "equal", "num_differing", "num_equal")
