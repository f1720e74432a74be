"""The result of a comparison: the tensors and entries that differ, and their summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import Any, ClassVar

from ckpt_tools.core.manifest import EXTRA_SLOT, MASTER, WEIGHT, StateKey
from ckpt_tools.core.notes import Note
from ckpt_tools.messages.showing import DisplayableResult
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.process.credentials import mask_secrets
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
    FILE = "file"
    """It is a file that a list of files names: missing, or of another digest."""


@dataclass(frozen=True, slots=True, repr=False)
class Difference(DisplayableResult):
    """One tensor that is not the same. ``deviation`` says how far its elements are apart, if they were compared.

    ``reason`` is ``what`` without the figures of this tensor: the same words for all that differ in the same way. It is
    empty for values and entries: each differs in its own way.
    """

    SHOWN: ClassVar[tuple[str, ...]] = ("key", "aspect", "what")

    key: StateKey
    aspect: Aspect
    what: str
    deviation: Deviation | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.reason and self.aspect not in (Aspect.VALUES, Aspect.ENTRY):
            object.__setattr__(self, "reason", self.what)


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(DisplayableResult):
    """Result of a comparison. ``num_bytes`` are logical bytes of the tensors on one side, which ``tensors_by_role``
    counts by ``core.manifest.ROLES``. ``tied`` are names, by owner, that are compared too: they are tied on that side,
    and tensors of their own on the other.

    ``num_digests`` counts the tensors whose elements were compared with a recorded digest; it is None if there were no
    digests. ``num_files`` counts the files that were compared with ``lists`` of other tools. ``notes`` list what was
    left out of the comparison, and the reason. ``signature`` is the file of a signature that was checked first.
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
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = (
        "num_tensors",
        "equal",
        "num_differing",
        "num_equal",
        "num_entries",
        "num_wrong_files",
    )

    tensors_by_role: Mapping[str, int]
    num_bytes: int
    differences: tuple[Difference, ...]
    num_digests: int | None = None
    notes: tuple[Note, ...] = ()
    num_files: int = 0
    lists: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    signature: str | None = None

    @property
    def num_tensors(self) -> int:
        return sum(self.tensors_by_role.values())

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def num_differing(self) -> int:
        """Tensors that differ. A tensor that differs in several ways counts once."""
        return len({difference.key for difference in self.differences if difference.aspect not in _NON_TENSOR_ASPECTS})

    @property
    def num_entries(self) -> int:
        """Values that are not tensors and differ: hyperparameters, the step, the user's own entries."""
        return sum(difference.aspect is Aspect.ENTRY for difference in self.differences)

    @property
    def num_wrong_files(self) -> int:
        """Files that are missing, or are not as a list of files or a conversion would have them."""
        return sum(difference.aspect is Aspect.FILE for difference in self.differences)

    @property
    def num_equal(self) -> int:
        """Tensors of the first side, and its tied names that are compared, that do not differ."""
        return self.num_compared - self.num_differing

    @property
    def num_compared(self) -> int:
        """Tensors that at least one side has, and the names in ``tied``."""
        return self.num_tensors + len(self.tied) + sum(each.aspect is Aspect.UNEXPECTED for each in self.differences)

    @property
    def summary(self) -> DifferenceSummary:
        return summarize_differences(self.differences)

    def to_sarif(self, source: str, folder: str = "") -> dict[str, Any]:
        """The differences of ``source`` in the form in which code hosts take results of scanners. The names of files
        begin with ``folder``."""
        from ckpt_tools.verification.sarif import build_file_location, build_log, build_logical_location, build_result

        rules = {aspect.value: about for aspect, about in _SARIF_DESCRIPTIONS.items()}
        results = []
        for difference in self.differences:
            is_file = difference.aspect is Aspect.FILE
            location = (
                build_file_location(difference.key.fqn, folder)
                if is_file
                else build_logical_location(str(difference.key))
            )
            text = difference.what if is_file else f"{difference.key}: {difference.what}"
            results.append(build_result(difference.aspect.value, "error", mask_secrets(text), location))
        properties = {"source": mask_secrets(source), **self.shown()}
        return build_log("ckpt-tools verify", rules, results, properties)


_SARIF_DESCRIPTIONS = {
    Aspect.MISSING: "A tensor is missing.",
    Aspect.UNEXPECTED: "A tensor is there that should not be.",
    Aspect.SHAPE: "A tensor has another shape.",
    Aspect.DTYPE: "A tensor has another dtype.",
    Aspect.VALUES: "A tensor has other values.",
    Aspect.DIGEST: "A tensor does not have its recorded digest.",
    Aspect.CHECKSUM: "A record does not have the checksum stored with it.",
    Aspect.ENTRY: "A value that is not a tensor differs.",
    Aspect.FILE: "A file is missing, or does not have its listed digest.",
}
"""Descriptions of SARIF's rules."""


MODULE_LEVELS = 2
"""Names of many models begin with ``model.layers`` or ``encoder.layers``: one level would be the whole model."""

WEIGHTS, MOMENTS, EXTRAS, STEPS = "a weight", "optimizer state", "another tensor", "a step count"
"""Tensors whose differences are of the same unit, in the order in which they are listed. Every step count differs when
training went on, by more than any weight."""

_GROUP_BY_SLOT = {WEIGHT: WEIGHTS, MASTER: WEIGHTS, EXTRA_SLOT: EXTRAS, "step": STEPS}
ENTRY_SLOT = "entry"
"""The slot of differences of values that are not tensors."""
FILE_SLOT = "file"
"""The slot of differences of files."""

_NON_TENSOR_ASPECTS = (Aspect.ENTRY, Aspect.FILE)

_GROUP_ORDER = (WEIGHTS, MOMENTS, EXTRAS, STEPS)


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """One line of the list. ``name`` is that of a tensor, or of a weight and its master with the same difference.

    ``reason`` and ``deviation`` are those of its ``count`` differences.
    """

    name: str
    what: str
    reason: str = ""
    deviation: Deviation | None = None
    count: int = 1
    noun: str = "tensor"


@dataclass(frozen=True, slots=True)
class DifferenceSummary:
    """The totals of a report.

    ``aspects`` counts tensors by the way in which they differ, the most frequent first. ``largest`` has the largest
    difference of values of each group of tensors. ``modules`` counts tensors that differ by the first levels of
    their names, the most first. ``rows`` has all differences, those of other things than values first, then by size,
    weights before optimizer state; ``folded`` has one row for those of the same reason.
    """

    aspects: dict[str, int]
    largest: dict[str, Difference]
    modules: dict[str, int]
    rows: tuple[DifferenceRow, ...]

    @property
    def folded(self) -> tuple[DifferenceRow, ...]:
        return fold_rows(self.rows)


def fold_rows(rows: Iterable[DifferenceRow]) -> tuple[DifferenceRow, ...]:
    """The rows with one row for all of the same reason, in the place of the first: ``30 tensors``, ``float32 ->
    bfloat16 (a, b and 28 more)``."""
    rows_by_reason: dict[object, list[DifferenceRow]] = {}
    for position, row in enumerate(rows):
        rows_by_reason.setdefault(row.reason or position, []).append(row)
    return tuple(group[0] if len(group) == 1 else _merge_rows(group) for group in rows_by_reason.values())


def _merge_rows(rows: list[DifferenceRow]) -> DifferenceRow:
    num_differences = sum(row.count for row in rows)
    deviations = [row.deviation for row in rows if row.deviation is not None]
    total_deviation = sum(deviations, Deviation()) if deviations else None
    reason = f"{rows[0].reason}, {total_deviation.as_numbers()}" if total_deviation is not None else rows[0].reason
    description = f"{reason} ({join_names([row.name for row in rows])})"
    return DifferenceRow(
        format_count(num_differences, rows[0].noun),
        description,
        rows[0].reason,
        total_deviation,
        num_differences,
        rows[0].noun,
    )


def summarize_differences(differences: Iterable[Difference]) -> DifferenceSummary:
    sorted_differences = sorted(differences, key=_get_sort_key)
    aspects_and_keys = {(each.aspect.value, each.key) for each in sorted_differences}
    modules = Counter(
        get_module_prefix(name)
        for name, slot in sorted({each.key for each in sorted_differences})
        if slot not in (ENTRY_SLOT, FILE_SLOT)
    )
    return DifferenceSummary(
        aspects=dict(Counter(aspect for aspect, _ in sorted(aspects_and_keys)).most_common()),
        largest=_find_largest_by_group(sorted_differences),
        modules=dict(modules.most_common()),
        rows=tuple(_build_rows(sorted_differences)),
    )


def get_module_prefix(fqn: str) -> str:
    """The first levels of a parameter's name without its last: ``encoder.layers`` of ``encoder.layers.0.ln.weight``."""
    parts = fqn.split(".")
    return ".".join(parts[:-1][:MODULE_LEVELS]) or fqn


def get_magnitude(difference: Difference) -> float:
    """Size of a difference: infinite if one side alone has a NaN."""
    deviation = difference.deviation
    if deviation is None:
        return 0.0
    return inf if deviation.num_one_nan else deviation.max_abs


def _get_sort_key(difference: Difference) -> tuple[bool, int, float]:
    group = _GROUP_BY_SLOT.get(difference.key.slot, MOMENTS)
    return difference.deviation is not None, _GROUP_ORDER.index(group), -get_magnitude(difference)


def _find_largest_by_group(sorted_differences: list[Difference]) -> dict[str, Difference]:
    """``sorted_differences`` has the largest of each group first, and the groups in their order."""
    largest_by_group: dict[str, Difference] = {}
    for difference in sorted_differences:
        if get_magnitude(difference):
            largest_by_group.setdefault(_GROUP_BY_SLOT.get(difference.key.slot, MOMENTS), difference)
    return largest_by_group


def _build_rows(sorted_differences: list[Difference]) -> Iterable[DifferenceRow]:
    equal_masters = _find_equal_masters(sorted_differences)
    for difference in sorted_differences:
        if difference.key.fqn not in equal_masters:
            yield _build_row(
                difference.key.fqn if difference.key.slot in (ENTRY_SLOT, FILE_SLOT) else str(difference.key),
                difference,
            )
        elif difference.key.slot == WEIGHT:
            yield replace(_build_row(f"{difference.key.fqn} (weight and master)", difference), count=2)
        elif difference.key.slot != MASTER:
            yield _build_row(str(difference.key), difference)


def _build_row(name: str, difference: Difference) -> DifferenceRow:
    noun = "file" if difference.aspect is Aspect.FILE else "tensor"
    return DifferenceRow(name, difference.what, difference.reason, difference.deviation, noun=noun)


def _find_equal_masters(differences: list[Difference]) -> set[str]:
    """The parameters whose weight and master differ in the same way, by as much."""
    outcomes: dict[StateKey, list[tuple[object, ...]]] = {}
    for difference in differences:
        if difference.key.slot in (WEIGHT, MASTER):
            outcomes.setdefault(difference.key, []).append((difference.aspect, difference.what, difference.deviation))
    return {
        key.fqn for key in outcomes if key.slot == WEIGHT and outcomes.get(key._replace(slot=MASTER)) == outcomes[key]
    }
