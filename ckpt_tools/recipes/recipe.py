"""Recipes: pairs of names and shapes of one model in two namings. Pure.

A recipe is read from left to right. Its inverse is the same with the sides exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import product
from typing import NamedTuple

from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.recipes.axes import (
    PAD_FIELD,
    AxisNode,
    build_extent_expression,
    expand_rest,
    fill_bare_sizes,
    find_field_sizes,
    is_rest_axis,
    list_indices,
    list_leaf_fields,
)
from ckpt_tools.recipes.copying import CopyRule
from ckpt_tools.recipes.names import NamePattern
from ckpt_tools.recipes.sizes import SizeBinding


@dataclass(frozen=True)
class TensorPattern:
    """The tensors of one pattern on one side: their names, and their axes if the line gives shapes."""

    name: NamePattern
    axes: tuple[AxisNode, ...] | None = None


class Cell(NamedTuple):
    """The elements of a pattern's tensors that lie in one leaf of each axis."""

    pattern: int
    leaves: tuple[int, ...]


class CellPair(NamedTuple):
    """The same elements on both sides; one is None for padding, which that side does not have."""

    source: Cell | None
    target: Cell | None


class LineDirection(Enum):
    """The ways on which a line takes names: both, from left to right alone, or from right to left alone."""

    BOTH = "both"
    FORWARD = "there"
    BACKWARD = "back"

    @property
    def inverse(self) -> LineDirection:
        opposites = {LineDirection.FORWARD: LineDirection.BACKWARD, LineDirection.BACKWARD: LineDirection.FORWARD}
        return opposites.get(self, self)


@dataclass(frozen=True)
class RecipeLine:
    """One ``[[map]]``: the same elements on the left and on the right.

    ``plus`` is added from left to right, ``dtypes`` are those of the weights on the left and on the right. A line that
    ``is_fallback`` takes only names that no other line has. With a pattern in ``beside``, a name of that side is taken
    only if the checkpoint has the name of this pattern too, with the same variables. A line of
    ``LineDirection.FORWARD`` takes names of its left side alone: another spelling, which the way back does not write;
    its inverse is ``LineDirection.BACKWARD``.
    A line ``is_state_only`` takes optimizer state alone, before other lines do; weights of these names are theirs.

    Raises:
        UsageError: the two sides do not name the same elements.
    """

    left: tuple[TensorPattern, ...]
    right: tuple[TensorPattern, ...]
    is_optional: bool = False
    plus: int = 0
    dtypes: tuple[DType | None, DType | None] = (None, None)
    is_fallback: bool = False
    required_siblings: tuple[NamePattern | None, NamePattern | None] = (None, None)
    direction: LineDirection = LineDirection.BOTH
    is_state_only: bool = False

    def __post_init__(self) -> None:
        if not self.left or not self.right:
            raise UsageError("a line of [[map]] has no name on one side; use drop for names that one side lacks")
        if self.is_renaming:
            self._check_renaming()
        elif self.is_fallback:
            raise UsageError(f"the line {self.description} gives shapes; only a line of names can be otherwise")
        else:
            self._check_shaped()
        self._check_required_siblings()

    def inverse(self) -> RecipeLine:
        return replace(
            self,
            left=self.right,
            right=self.left,
            plus=-self.plus,
            dtypes=self.dtypes[::-1],
            required_siblings=self.required_siblings[::-1],
            direction=self.direction.inverse,
        )

    def with_rest(self, number: int) -> RecipeLine:
        """The line with ``number`` axes for the rest."""
        return self._replace_patterns(
            lambda each: each if each.axes is None else replace(each, axes=expand_rest(each.axes, number))
        )

    def with_sizes(self, env: Mapping[str, int]) -> RecipeLine:
        """The line whose names count from the sizes of ``env``."""
        if not any(pattern.name.offset_sizes for pattern in (*self.left, *self.right)):
            return self
        left, right = (None if each is None else each.with_sizes(env) for each in self.required_siblings)
        line = self._replace_patterns(lambda each: replace(each, name=each.name.with_sizes(env)))
        return replace(line, required_siblings=(left, right))

    def _replace_patterns(self, change: Callable[[TensorPattern], TensorPattern]) -> RecipeLine:
        return replace(self, left=tuple(map(change, self.left)), right=tuple(map(change, self.right)))

    @cached_property
    def unknown_sizes(self) -> frozenset[str]:
        """Sizes from which its names count, and whose values are not known."""
        return frozenset().union(*(each.name.unknown_sizes for each in (*self.left, *self.right)))

    @property
    def has_rest(self) -> bool:
        """True if its shapes stand for tensors of any number of axes."""
        return any(is_rest_axis(axis) for each in self.left for axis in each.axes or ())

    @property
    def is_renaming(self) -> bool:
        """True if no shape is given: one name becomes one other."""
        return all(pattern.axes is None for pattern in (*self.left, *self.right))

    @property
    def has_name_of_both_sides(self) -> bool:
        """True if a name is the same on both sides, so that shapes alone tell the sides apart."""
        return not {each.name.text for each in self.left}.isdisjoint(each.name.text for each in self.right)

    @cached_property
    def size_variables(self) -> frozenset[str]:
        """The sizes in its shapes."""
        axes = [axis for each in (*self.left, *self.right) for axis in each.axes or ()]
        return frozenset().union(*(build_extent_expression(axis).variables for axis in axes))

    @cached_property
    def shared_variables(self) -> frozenset[str]:
        """Variables of the names of both sides: each set of values is a group of tensors for itself."""
        return frozenset.intersection(*(frozenset(each.name.variables) for each in (*self.left, *self.right)))

    @cached_property
    def cell_pairs(self) -> tuple[CellPair, ...]:
        """Cells of the left with those of the right."""
        source, target = (dict(_iter_cells(side)) for side in (self.left, self.right))
        matched_cells = [CellPair(cell, target.get(key)) for key, cell in source.items()]
        return (*matched_cells, *(CellPair(None, cell) for key, cell in target.items() if key not in source))

    @property
    def description(self) -> str:
        """The line in words, for messages."""
        return f"{_format_names(self.left)} = {_format_names(self.right)}"

    def _check_renaming(self) -> None:
        if len(self.left) > 1 or len(self.right) > 1:
            raise UsageError(f"the line {self.description} has several names without shapes")
        left, right = self.left[0].name.variables, self.right[0].name.variables
        if set(left) != set(right):
            name = sorted({*left} ^ {*right})[0]
            raise UsageError(
                f"the line {self.description} has {{{name}}} on one side alone; make it an axis there: give both shapes"
            )

    def _check_shaped(self) -> None:
        for one, other in ((self.left, self.right), (self.right, self.left)):
            for pattern in one:
                if pattern.axes is None:
                    raise UsageError(f"the line {self.description} gives {pattern.name.text} no shape")
                self._check_indices(pattern, other)
            self._check_cells(one, other)

    def _check_indices(self, pattern: TensorPattern, other: tuple[TensorPattern, ...]) -> None:
        axis_indices = {index for axis in pattern.axes or () for index in list_indices(axis)}
        repeated_indices = sorted(axis_indices & {*pattern.name.variables})
        if repeated_indices:
            raise UsageError(f"{pattern.name.text} has {{{repeated_indices[0]}}} in its name and in its shape")
        other_indices = frozenset.intersection(*(_list_all_indices(each) for each in other))
        unmatched_indices = sorted(_list_all_indices(pattern) - other_indices)
        if unmatched_indices:
            raise UsageError(
                f"the line {self.description} has {{{unmatched_indices[0]}}} in {pattern.name.text}, and not in each "
                "tensor of the other side; make it an axis of that side, or a variable of its names"
            )

    def _check_required_siblings(self) -> None:
        for side, sibling in zip((self.left, self.right), self.required_siblings, strict=True):
            for pattern in side if sibling is not None else ():
                unknown = sorted({*sibling.variables} - {*pattern.name.variables} if sibling is not None else ())
                if unknown:
                    raise UsageError(f"beside has {{{unknown[0]}}}, which {pattern.name.text} does not have")

    def _check_cells(self, one: tuple[TensorPattern, ...], other: tuple[TensorPattern, ...]) -> None:
        other_cells, seen_fields = dict(_iter_cells(other)), set[frozenset[str]]()
        for key, cell in _iter_cells(one):
            name = one[cell.pattern].name.text
            fields = ", ".join(sorted(key)) or "its one element"
            if key in seen_fields:
                raise UsageError(
                    f"the line {self.description} has the elements ({fields}) twice, the second time in {name}"
                )
            if key not in other_cells and PAD_FIELD not in key:
                raise UsageError(f"the line {self.description} has no place for the elements ({fields}) of {name}")
            seen_fields.add(key)


def _format_names(side: tuple[TensorPattern, ...]) -> str:
    return join_names([pattern.name.text for pattern in side], 2)


def _list_all_indices(pattern: TensorPattern) -> frozenset[str]:
    in_axes = {index for axis in pattern.axes or () for index in list_indices(axis)}
    return frozenset(pattern.name.variables) | in_axes


def _iter_cells(side: tuple[TensorPattern, ...]) -> Iterator[tuple[frozenset[str], Cell]]:
    """Each cell of a side with the names of its fields."""
    for number, pattern in enumerate(side):
        numbered = [list(enumerate(list_leaf_fields(axis))) for axis in pattern.axes or ()]
        for leaves in product(*numbered):
            fields = frozenset(name for _, name in leaves if name is not None)
            yield fields, Cell(number, tuple(index for index, _ in leaves))


PatternTexts = Mapping[str, tuple[AxisNode, ...] | None]
"""The names of one side of a line in words, with their axes if it gives shapes."""


def pair_sides(left: PatternTexts, right: PatternTexts) -> tuple[tuple[TensorPattern, ...], tuple[TensorPattern, ...]]:
    """Both sides of a line. Sizes that are not written are those of the other side's fields, and variables of names
    that are not those of both sides are indices."""
    names = {text: NamePattern(text) for text in (*left, *right)}
    shared = frozenset.intersection(*(frozenset(each.variables) for each in names.values()))

    def build_side(own: PatternTexts, other: PatternTexts) -> tuple[TensorPattern, ...]:
        sizes = find_field_sizes(axis for axes in other.values() for axis in axes or ())
        return tuple(
            TensorPattern(names[text])
            if axes is None
            else TensorPattern(
                names[text].with_numbers({*names[text].variables} - shared),
                tuple(fill_bare_sizes(axis, sizes) for axis in axes),
            )
            for text, axes in own.items()
        )

    return build_side(left, right), build_side(right, left)


ZEROS, MEAN = "zeros", "mean"
"""What the new rows of a ``GrowRule`` hold, if they are not copies."""


@dataclass(frozen=True)
class GrowRule:
    """One ``[[grow]]``: tensors whose names match ``name`` get ``size`` slices along ``dim``. The new ones of a weight
    and of its master are ``ZEROS``, the ``MEAN`` of the old ones, or copies of the old one of the number ``new``; those
    of optimizer state are zeros."""

    name: NamePattern
    size: SizeBinding
    new: str | int
    dim: int


@dataclass(frozen=True)
class Recipe:
    """The tensors of a model in the naming ``left`` and in the naming ``right``.

    ``models`` are the ``model_type`` for which it is made, for ``trainer``; transformers if that is empty. With
    ``does_keep_unmatched``, a tensor that no line names keeps its name. ``dropped_names`` are patterns of names that
    the other side does not have; ``tied_names`` maps names of the right side to those that own the bytes, if
    ``config.json`` ties them. Models of ``tied_by_default`` are tied unless it says that they are not. Without
    ``has_left_ties`` the left side has no names for what is tied. ``copies`` are patterns of names of the right side
    that repeat another of it, and that the left side does not have. ``copy_rules`` copy tensors of the right side to
    several names, and then ``grow_rules`` add rows to some; with either there is no way back. ``text`` is the file's.
    ``stacked_lines`` are the lines for a side that holds all layers as one tensor, each where the line for single
    layers is; empty if neither side does.
    """

    name: str
    lines: tuple[RecipeLine, ...]
    stacked_lines: tuple[RecipeLine, ...] = ()
    about: str = ""
    left: str = "left"
    right: str = "right"
    models: tuple[str, ...] = ()
    trainer: str = ""
    source: str = ""
    does_keep_unmatched: bool = False
    bindings: tuple[SizeBinding, ...] = ()
    dropped_names: tuple[tuple[NamePattern, ...], tuple[NamePattern, ...]] = ((), ())
    tied_names: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[NamePattern, str] = field(default_factory=dict)
    copy_rules: tuple[CopyRule, ...] = ()
    grow_rules: tuple[GrowRule, ...] = ()
    tied_by_default: tuple[str, ...] = ()
    has_left_ties: bool = True
    text: str = ""
    is_inverse: bool = False

    def inverse(self) -> Recipe:
        """The way back."""
        return replace(
            self._replace_lines(RecipeLine.inverse),
            left=self.right,
            right=self.left,
            dropped_names=self.dropped_names[::-1],
            is_inverse=not self.is_inverse,
        )

    @property
    def has_way_back(self) -> bool:
        return not (self.copy_rules or self.grow_rules)

    def with_optional_lines(self) -> Recipe:
        """The recipe whose lines may all have no tensor."""
        return self._replace_lines(lambda line: replace(line, is_optional=True))

    def with_sizes(self, env: Mapping[str, int]) -> Recipe:
        """The recipe whose names count from the sizes of ``env``."""
        return self._replace_lines(lambda line: line.with_sizes(env))

    def _replace_lines(self, change: Callable[[RecipeLine], RecipeLine]) -> Recipe:
        return replace(self, lines=tuple(map(change, self.lines)), stacked_lines=tuple(map(change, self.stacked_lines)))

    def does_drop(self, name: str) -> bool:
        """True if the right side has no such tensor."""
        return any(pattern.match_name(name) is not None for pattern in self.dropped_names[0])

    @property
    def model_aliases(self) -> frozenset[str]:
        """Names of its models, after that of the trainer: ``megatron_qwen3``."""
        return frozenset(f"{self.trainer}_{model}" if self.trainer else model for model in self.models)

    def list_forms(self) -> tuple[Recipe, ...]:
        """The recipe for single layers, and the one for layers that are stacked."""
        stacked = (replace(self, lines=self.stacked_lines, stacked_lines=()),) if self.stacked_lines else ()
        return (replace(self, stacked_lines=()), *stacked)

    def find_unmatched_lines(self, matched_lines: Collection[int]) -> Iterator[int]:
        """The lines that need a name and have none, if those of the numbers ``matched_lines`` have theirs. Another
        spelling of a name counts."""
        alternative_names = {
            each.name.text
            for number in matched_lines
            if self.lines[number].direction is LineDirection.FORWARD
            for each in self.lines[number].right
        }
        for number, line in enumerate(self.lines):
            is_needed = (
                not line.is_optional
                and line.direction is LineDirection.BOTH
                and not line.is_state_only
                and number not in matched_lines
            )
            if is_needed and not alternative_names.issuperset(each.name.text for each in line.right):
                yield number

    def has_required_lines(self, matched_patterns: Collection[tuple[int, int]]) -> bool:
        """True if no line lacks a name that it needs. ``matched_patterns`` are patterns of the left side that have one,
        as line and pattern; a line needs one for each of its patterns."""
        complete_lines = {
            number
            for number, line in enumerate(self.lines)
            if all((number, which) in matched_patterns for which in range(len(line.left)))
        }
        return next(self.find_unmatched_lines(complete_lines), None) is None
