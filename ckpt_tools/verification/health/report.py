"""The result of ``check``: what is not as it is in a healthy checkpoint, by rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ckpt_tools.core.manifest import WEIGHT, StateKey
from ckpt_tools.core.notes import Note
from ckpt_tools.messages.showing import DisplayableResult


class HealthRule(Enum):
    """A fault that a healthy checkpoint does not have."""

    NON_FINITE = "non-finite"
    """A tensor with NaN or infinities."""
    ZERO = "zero"
    """A weight of two or more dimensions whose elements are all zero."""
    CONSTANT = "constant"
    """A weight of two or more dimensions whose elements are all the same, and not zero."""
    MISSING_LAYER = "missing-layer"
    """A number of a layer that no tensor has."""
    MISSING_EXPERT = "missing-expert"
    """A number of an expert that no tensor has, or an expert without a tensor that the others have."""
    MISSING_TENSOR = "missing-tensor"
    """A tensor that nearly all other layers have, or that the previous checkpoint has."""
    LORA_PAIR = "lora-pair"
    """One of the two matrices of an adapter without the other."""
    STEP = "step"
    """Another step of the optimizer than most parameters have."""
    NEGATIVE_MOMENT = "negative-moment"
    """A second moment below zero."""
    ZERO_MOMENT = "zero-moment"
    """A moment whose elements are all zero after two steps or more."""
    MISSING_MOMENT = "missing-moment"
    """A parameter of the optimizer without the state that others have."""
    JUMP = "jump"
    """A weight of far another size than in the previous checkpoint."""
    FROZEN = "frozen"
    """A weight with the bits of the previous checkpoint, while others changed."""
    DEAD_EXPERT = "dead-expert"
    """An expert that is not trained, while others are."""


@dataclass(frozen=True, slots=True, repr=False)
class HealthFinding(DisplayableResult):
    """One finding: ``name`` is that of a tensor, with ``[N]`` for expert N of a fused one, or of a group of layers or
    experts. ``value`` is the figure that ``what`` explains, None where there is none."""

    rule: HealthRule
    name: str
    what: str
    slot: str = WEIGHT
    value: float | None = None

    @property
    def full_name(self) -> str:
        """The name, with the slot of optimizer state."""
        return str(StateKey(self.name, self.slot))


@dataclass(frozen=True, slots=True, repr=False)
class HealthReport(DisplayableResult):
    """Findings in ``source``. ``against`` is the previous checkpoint, if there is one. ``tensors_by_role``
    counts the tensors that were read by ``core.manifest.ROLES``, and ``num_bytes`` the bytes that were read of them.
    ``notes`` say what no rule could be applied to."""

    SHOWN: ClassVar[tuple[str, ...]] = ("source", "healthy", "num_tensors", "num_bytes", "findings", "notes")
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("num_tensors", "healthy")

    source: str
    against: str | None
    tensors_by_role: Mapping[str, int]
    num_bytes: int
    findings: tuple[HealthFinding, ...]
    notes: tuple[Note, ...]

    @property
    def num_tensors(self) -> int:
        return sum(self.tensors_by_role.values())

    @property
    def healthy(self) -> bool:
        return not self.findings
