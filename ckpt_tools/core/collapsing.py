"""Lists of tensors as people read them: tensors that differ only in the numbers in their names are one line. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from ckpt_tools.messages.showing import Jsonable

if TYPE_CHECKING:
    from ckpt_tools.core.boxes import Shape


@dataclass(frozen=True, slots=True)
class TensorSummary(Jsonable):
    """One logical tensor."""

    name: str
    slot: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    num_shards: int


_NUMBER = re.compile(r"(?<![^._/\[])(0|[1-9][0-9]{0,17})(?![^._/\]])", re.ASCII)
"""A whole number between separators, or at an end of the name: of ``h.0``, ``encoder_layer_6`` and ``layers[3]``."""


@dataclass(frozen=True, slots=True)
class NumberedNames:
    """Names with every combination of the numbers in ``ranges`` between the ``texts``; ``texts`` has one item more."""

    texts: tuple[str, ...]
    ranges: tuple[range, ...]

    @classmethod
    def of(cls, name: str) -> NumberedNames:
        """``name``, split at its numbers."""
        parts = _NUMBER.split(name)
        return cls(tuple(parts[::2]), tuple(range(int(part), int(part) + 1) for part in parts[1::2]))

    def __len__(self) -> int:
        return prod(map(len, self.ranges))

    def __iter__(self) -> Iterator[str]:
        return (self._format_name(map(str, numbers)) for numbers in product(*self.ranges))

    def __str__(self) -> str:
        """``layers.0-31.mlp.weight``."""
        return self._format_name(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in self.ranges)

    def _format_name(self, numbers: Iterable[str]) -> str:
        return "".join(part for pair in zip(self.texts, [*numbers, ""], strict=True) for part in pair)


NumberRanges = tuple[range, ...]


def merge_number_ranges(ranges: Iterable[NumberRanges]) -> list[NumberRanges]:
    """The same combinations of numbers in as few items as joining neighbours gives: the last number of a name first, so
    that the experts of a layer are one item before the layers are."""
    # layers.0.experts.0, layers.0.experts.1, layers.1.experts.0, layers.1.experts.1
    #   -> layers.0.experts.0-1, layers.1.experts.0-1
    #   -> layers.0-1.experts.0-1
    items = list(ranges)
    for dim in reversed(range(len(items[0]) if items else 0)):
        rows: defaultdict[NumberRanges, list[range]] = defaultdict(list)
        for item in items:
            rows[item[:dim] + item[dim + 1 :]].append(item[dim])
        items = [
            (*rest[:dim], run, *rest[dim:])
            for rest, adjacent_ranges in rows.items()
            for run in _merge_adjacent(adjacent_ranges)
        ]
    return items


def _merge_adjacent(ranges: list[range]) -> Iterator[range]:
    current_range, *others = sorted(ranges, key=lambda each: each.start)
    for each in others:
        if each.start == current_range.stop:
            current_range = range(current_range.start, each.stop)
        else:
            yield current_range
            current_range = each
    yield current_range


@dataclass(frozen=True, slots=True)
class TensorLine:
    """The tensors of ``names`` in all ``slots``, which are pairs of a slot and a kind. Each tensor has ``shape`` and
    ``dtype``; ``num_bytes`` and ``num_shards`` are sums."""

    names: NumberedNames
    slots: tuple[tuple[str, str], ...]
    shape: Shape
    dtype: str
    num_bytes: int
    num_shards: int


def collapse_tensors(tensors: Iterable[TensorSummary]) -> list[TensorLine]:
    """``tensors`` in lines. A line has tensors of the same shape, dtype, slots and kinds, whose names have all numbers
    of its ranges. The slots of a parameter share a line where they have its shape and dtype. Lines of optimizer state
    alone come last, and steps after moments."""
    slots_by_tensor: defaultdict[tuple[str, Shape, str], list[TensorSummary]] = defaultdict(list)
    for tensor in tensors:
        slots_by_tensor[tensor.name, tensor.shape, tensor.dtype].append(tensor)
    groups: defaultdict[object, _LineMembers] = defaultdict(dict)
    for position, ((name, shape, dtype), slots) in enumerate(slots_by_tensor.items()):
        names = NumberedNames.of(name)
        kinds = tuple((tensor.slot, tensor.kind) for tensor in slots)
        groups[names.texts, shape, dtype, kinds][names.ranges] = position, slots
    lines = [_build_line(ranges, members) for members in groups.values() for ranges in merge_number_ranges(members)]

    def sort_key(positioned_line: tuple[int, TensorLine]) -> tuple[bool, bool, int]:
        position, line = positioned_line
        is_state = all(kind == "state" for _, kind in line.slots)
        return is_state, is_state and not line.shape, position

    return [line for _, line in sorted(lines, key=sort_key)]


_LineMembers: TypeAlias = dict[NumberRanges, tuple[int, list[TensorSummary]]]
"""By the numbers in a name: the position of the tensor in the list, and its slots. Only the numbers differ."""


def _build_line(ranges: NumberRanges, members_by_ranges: _LineMembers) -> tuple[int, TensorLine]:
    """The line of the tensors with the numbers of ``ranges``, and the position of the first of them."""
    members = [members_by_ranges[tuple(range(n, n + 1) for n in numbers)] for numbers in product(*ranges)]
    tensors = [tensor for _, slots in members for tensor in slots]
    first_slots = members[0][1]
    line = TensorLine(
        NumberedNames(NumberedNames.of(first_slots[0].name).texts, ranges),
        tuple((tensor.slot, tensor.kind) for tensor in first_slots),
        first_slots[0].shape,
        first_slots[0].dtype,
        sum(tensor.num_bytes for tensor in tensors),
        sum(tensor.num_shards for tensor in tensors),
    )
    return min(position for position, _ in members), line
