"""The result of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.notes import Note
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


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that is not the same. ``deviation`` says how far its elements are apart, if they were compared."""

    key: StateKey
    aspect: Aspect
    what: str
    deviation: Deviation | None = None

    def to_json(self) -> dict[str, Any]:
        found = {
            "name": self.key.fqn,
            "slot": self.key.slot,
            "aspect": self.aspect.value,
            "difference": self.what,
        }
        return found if self.deviation is None else {**found, **self.deviation.to_json()}


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of ``verify`` or ``diff``. ``num_tensors`` and ``num_bytes`` are of the first side.

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

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "digests": self.num_digests,
            "differences": [difference.to_json() for difference in self.differences],
            "ledger": [note.to_json() for note in self.notes],
        }
