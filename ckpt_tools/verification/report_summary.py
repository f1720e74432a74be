"""Summary of many differences: how many of which kind, how large, and in which modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from ckpt_tools.core.manifest import MASTER, WEIGHT, StateKey

if TYPE_CHECKING:
    from ckpt_tools.verification.difference import Difference

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
    return DifferenceSummary(
        aspects=dict(Counter(aspect for aspect, _ in sorted(keys)).most_common()),
        largest=_largest(ordered),
        modules=dict(
            Counter(
                module_of(name) for name, slot in sorted({each.key for each in ordered}) if slot != ENTRY
            ).most_common()
        ),
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
