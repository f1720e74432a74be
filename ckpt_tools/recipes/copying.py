"""Tensors copied to several names: a dense layer to each of its experts, layers that are there twice. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.quantized import map_companions
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.recipes.names import NamePattern

MAX_COPIES = 1 << 14
"""The most copies that one rule makes of a tensor."""

_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", re.ASCII)


@dataclass(frozen=True)
class CopyRule:
    """One ``[[copy]]``: tensors whose names match ``left`` become those of ``right``, whose one further variable counts
    the copies. ``numbers`` are the values that a variable of ``left`` alone has in the tensor that each copy is of; if
    there is no such variable, each tensor has ``len(numbers)`` copies.

    Raises:
        UsageError: the variables of the two names are others.
    """

    left: NamePattern
    right: NamePattern
    numbers: tuple[int, ...]
    is_numbered: bool

    def __post_init__(self) -> None:
        own = [{*each.variables} for each in (self.left, self.right)]
        if len(own[1] - own[0]) != 1 or len(own[0] - own[1]) != self.is_numbered:
            key, wanted = ("numbers", "one variable that the other has not") if self.is_numbered else ("count", "none")
            raise UsageError(
                f"the [[copy]] of {self.left.text}: with {key}, right has one variable more, and left has {wanted}"
            )

    @property
    def counted_variable(self) -> str:
        return next(each for each in self.right.variables if each not in self.left.variables)

    def list_targets(self, name: str) -> Sequence[str] | None:
        """The names that ``name`` becomes, perhaps none; None if it does not match."""
        values = self.left.match_name(name)
        if values is None:
            return None
        number = next((values[each] for each in self.left.variables if each not in self.right.variables), None)
        return [
            self.right.fill_variables({**values, self.counted_variable: str(copy)})
            for copy, wanted in enumerate(self.numbers)
            if number in (None, str(wanted))
        ]


def parse_numbers(text: str) -> tuple[int, ...]:
    """The numbers of ``0-23, 8-31``. Raises UsageError."""
    numbers: list[int] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found is not None else (1, 0)
        if last < first or len(numbers) + last - first >= MAX_COPIES:
            raise UsageError(f"numbers = {text!r} is not a list of at most {MAX_COPIES:,} such as '0-23, 8-31'")
        numbers += range(first, last + 1)
    return tuple(numbers)


def copy_tensors(manifest: Manifest, rules: Sequence[CopyRule]) -> TransformResult:
    """The manifest with the copies that ``rules`` make, each with its optimizer state; the first rule that a name
    matches counts. A tensor that is copied has its old name only if a copy has it.

    Raises:
        UsageError: a rule or one of its numbers has no tensor, or two tensors would have one name.
        UnsupportedError: a tensor that is copied is tied, or it is quantized and its scale is not copied too.
    """
    names = dict.fromkeys(key.fqn for key, entry in manifest.tensors.items() if entry.kind is not Kind.EXTRA)
    targets_by_name = {name: targets for name in names if (targets := _find_targets(name, rules)) is not None}
    _check_rules_match(rules, [*names])
    for alias, owner in manifest.aliases.items():
        if owner in targets_by_name or _find_targets(alias, rules) is not None:
            raise UnsupportedError(f"{alias} is tied to {owner}, and a tensor that is tied is not copied", key=alias)
    for companion, weight in map_companions(manifest).items():
        if (companion in targets_by_name) != (weight in targets_by_name):
            way = f"dequantize the model with {format_option('dequantize', True)}"
            raise UnsupportedError(f"{weight} is quantized, and copying would part it from {companion}; {way}")
    sources: dict[str, str] = {}
    for name in names:
        for target in targets_by_name.get(name, [name]):
            if target in sources or target in manifest.aliases:
                raise UsageError(
                    f"the recipe makes {target} of {sources.get(target, 'another')} and of {name}; names must stay "
                    "distinct"
                )
            sources[target] = name
    tensors: dict[StateKey, TensorEntry] = {}
    for key, entry in manifest.tensors.items():
        is_copied = entry.kind is not Kind.EXTRA and key.fqn in targets_by_name
        tensors |= {StateKey(name, key.slot): entry for name in (targets_by_name[key.fqn] if is_copied else [key.fqn])}
    groups = tuple(
        replace(group, params=tuple(new for name in group.params for new in targets_by_name.get(name, [name])))
        for group in manifest.groups
    )
    return replace(manifest, tensors=tensors, groups=groups), tuple(_iter_notes(targets_by_name))


def _find_targets(name: str, rules: Sequence[CopyRule]) -> Sequence[str] | None:
    return next((targets for rule in rules if (targets := rule.list_targets(name)) is not None), None)


def _check_rules_match(rules: Sequence[CopyRule], names: Sequence[str]) -> None:
    """Raises UsageError for a rule that no name matches, or a number that no tensor has."""
    for rule in rules:
        matches = [values for name in names if (values := rule.left.match_name(name)) is not None]
        if not matches:
            raise UsageError(f"the [[copy]] of {rule.left.text} matches no tensor")
        if rule.is_numbered:
            variable = next(each for each in rule.left.variables if each not in rule.right.variables)
            unknown = sorted({*map(str, rule.numbers)} - {values[variable] for values in matches}, key=int)
            if unknown:
                raise UsageError(
                    f"the [[copy]] of {rule.left.text}: no tensor has the {variable} {join_names(unknown)}"
                )


def _iter_notes(targets_by_name: Mapping[str, Sequence[str]]) -> Iterator[Note]:
    copied = [name for name, targets in targets_by_name.items() if targets]
    count = sum(map(len, targets_by_name.values()))
    why = f"written as {format_count(count, 'tensor')}; config.json is not changed for them"
    yield Note(Outcome.KEPT, f"{format_count(len(copied), 'copied tensor')}", why, count, asked=True)
    dropped = [name for name, targets in targets_by_name.items() if not targets]
    if dropped:
        what = f"{format_count(len(dropped), 'tensor')} of {join_names(dropped)}"
        yield Note(Outcome.DROPPED, what, "numbers of a [[copy]] leave them out", len(dropped), asked=True)
