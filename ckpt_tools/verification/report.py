"""The result of a comparison: the tensors and entries that differ, and their summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import ClassVar

from ckpt_tools.core.manifest import MASTER, WEIGHT, StateKey
from ckpt_tools.core.notes import Note
from ckpt_tools.core.showing import Shown
from ckpt_tools.verification.deviation import Deviation


class Aspect(Enum):
    """The way in which a tensor or another entry differs."""

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
    ENTRY = "entry"
    """It is not a tensor: a hyperparameter, the step, an entry of the user's. Its value differs."""


@dataclass(frozen=True, slots=True, repr=False)
class Difference(Shown):
    """One tensor that is not the same. ``deviation`` says how far its elements are apart, if they were compared."""

    SHOWN: ClassVar[tuple[str, ...]] = ("key", "aspect", "what")

    key: StateKey
    aspect: Aspect
    what: str
    deviation: Deviation | None = None


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
        return summarize(self.differences)


MODULE_LEVELS = 2
"""Names of many models begin with ``model.layers`` or ``encoder.layers``: one level would be the whole model."""

WEIGHTS, MOMENTS, EXTRAS, STEPS = "a weight", "optimizer state", "another tensor", "a step count"
"""Tensors whose differences are of the same unit, in the order in which they are listed. Every step count differs when
training went on, by more than any weight."""

_GROUPS = {WEIGHT: WEIGHTS, MASTER: WEIGHTS, "extra": EXTRAS, "step": STEPS}
ENTRY = "entry"
"""The slot of differences of values that are not tensors."""

_ORDER = (WEIGHTS, MOMENTS, EXTRAS, STEPS)


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """One line of the list. ``name`` is that of a tensor, or of a weight and its master with the same difference."""

    name: str
    what: str


@dataclass(frozen=True, slots=True)
class DifferenceSummary:
    """The totals of a report.

    ``aspects`` counts tensors by the way in which they differ, the most frequent first. ``largest`` has the largest
    difference of values of each group of tensors. ``modules`` counts tensors that differ by the first levels of
    their names, the most first. ``rows`` has all differences, those of other things than values first, then by size,
    weights before optimizer state.
    """

    aspects: dict[str, int]
    largest: dict[str, Difference]
    modules: dict[str, int]
    rows: tuple[DifferenceRow, ...]


def summarize(differences: Iterable[Difference]) -> DifferenceSummary:
    ordered = sorted(differences, key=_rank)
    keys = {(each.aspect.value, each.key) for each in ordered}
    modules = Counter(module_of(name) for name, slot in sorted({each.key for each in ordered}) if slot != ENTRY)
    return DifferenceSummary(
        aspects=dict(Counter(aspect for aspect, _ in sorted(keys)).most_common()),
        largest=_largest(ordered),
        modules=dict(modules.most_common()),
        rows=tuple(_rows(ordered)),
    )


def module_of(fqn: str) -> str:
    """The first levels of a parameter's name without its last: ``encoder.layers`` of ``encoder.layers.0.ln.weight``."""
    parts = fqn.split(".")
    return ".".join(parts[:-1][:MODULE_LEVELS]) or fqn


def magnitude(difference: Difference) -> float:
    """Size of a difference: infinite if one side alone has a NaN."""
    deviation = difference.deviation
    if deviation is None:
        return 0.0
    return inf if deviation.num_one_nan else deviation.max_abs


def _rank(difference: Difference) -> tuple[bool, int, float]:
    group = _GROUPS.get(difference.key.slot, MOMENTS)
    return difference.deviation is not None, _ORDER.index(group), -magnitude(difference)


def _largest(ordered: list[Difference]) -> dict[str, Difference]:
    """``ordered`` has the largest of each group first, and the groups in their order."""
    found: dict[str, Difference] = {}
    for each in ordered:
        if magnitude(each):
            found.setdefault(_GROUPS.get(each.key.slot, MOMENTS), each)
    return found


def _rows(ordered: list[Difference]) -> Iterable[DifferenceRow]:
    both = _equal_masters(ordered)
    for each in ordered:
        if each.key.fqn not in both:
            yield DifferenceRow(each.key.fqn if each.key.slot == ENTRY else str(each.key), each.what)
        elif each.key.slot == WEIGHT:
            yield DifferenceRow(f"{each.key.fqn} (weight and master)", each.what)
        elif each.key.slot != MASTER:
            yield DifferenceRow(str(each.key), each.what)


def _equal_masters(differences: list[Difference]) -> set[str]:
    """The parameters whose weight and master differ in the same way, by as much."""
    found: dict[StateKey, list[tuple[object, ...]]] = {}
    for each in differences:
        if each.key.slot in (WEIGHT, MASTER):
            found.setdefault(each.key, []).append((each.aspect, each.what, each.deviation))
    return {key.fqn for key in found if key.slot == WEIGHT and found.get(key._replace(slot=MASTER)) == found[key]}
