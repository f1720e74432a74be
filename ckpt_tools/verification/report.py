"""What a comparison found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from ckpt_tools.core.json_fields import json_of
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.notes import Note
from ckpt_tools.core.showing import Shown
from ckpt_tools.verification.deviation import Deviation


class Aspect(Enum):
    """In what a tensor differs."""

    MISSING = "missing"
    """It is on the first side alone."""
    UNEXPECTED = "unexpected"
    """It is on the second side alone."""
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUES = "values"
    DIGEST = "digest"
    """Its elements do not have the digest written down for them."""
    CHECKSUM = "checksum"
    """A stored record does not have the checksum stored with it."""


@dataclass(frozen=True, slots=True, repr=False)
class Difference(Shown):
    """One tensor that is not the same; ``deviation`` says how far apart its elements are, where they were compared."""

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

    ``num_digests`` are tensors whose elements were compared with a digest written down for them; None where there were
    no digests. ``notes`` say what was left out of the comparison.
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
        """Tensors that differ; one may do so in several ways."""
        return len({difference.key for difference in self.differences})

    @property
    def num_equal(self) -> int:
        return self.num_tensors - self.num_differing

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
