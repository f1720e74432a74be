"""Recipes: pairs of names and shapes of one model in two namings. Pure.

A recipe is read from left to right. Its inverse is the same with the sides exchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import product
from typing import NamedTuple

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.wording import join_names
from ckpt_tools.errors import UsageError
from ckpt_tools.recipes.axes import (
    PAD,
    Node,
    extent_size,
    fields_of,
    indices_of,
    is_bare,
    is_rest,
    leaf_fields,
    total,
    with_rest,
    with_size,
)
from ckpt_tools.recipes.names import NamePattern
from ckpt_tools.recipes.sizes import Binding


@dataclass(frozen=True)
class Pattern:
    """The tensors of one pattern on one side: their names, and their axes if the line gives shapes."""

    name: NamePattern
    axes: tuple[Node, ...] | None = None


class Cell(NamedTuple):
    """The elements of a pattern's tensors that lie in one leaf of each axis."""

    pattern: int
    leaves: tuple[int, ...]


class CellPair(NamedTuple):
    """The same elements on both sides; one is None for padding, which that side does not have."""

    source: Cell | None
    target: Cell | None


class Way(Enum):
    """The ways on which a line takes names: both, from left to right alone, or from right to left alone."""

    BOTH = "both"
    THERE = "there"
    BACK = "back"

    @property
    def inverse(self) -> Way:
        return {Way.BOTH: Way.BOTH, Way.THERE: Way.BACK, Way.BACK: Way.THERE}[self]


@dataclass(frozen=True)
class Line:
    """One ``[[map]]``: the same elements on the left and on the right.

    ``plus`` is added from left to right, ``dtypes`` are those of the weights on the left and on the right. A line that
    ``is_otherwise`` takes only names that no other line has. With a pattern in ``beside``, a name of that side is taken
    only if the checkpoint has the name of this pattern too, with the same variables. A line of ``Way.THERE`` takes
    names of its left side alone: another spelling, which the way back does not write; its inverse is ``Way.BACK``. A
    line ``of_state`` takes optimizer state alone, before other lines do; weights of these names are theirs.

    Raises:
        UsageError: the two sides do not name the same elements.
    """

    left: tuple[Pattern, ...]
    right: tuple[Pattern, ...]
    optional: bool = False
    plus: int = 0
    dtypes: tuple[DType | None, DType | None] = (None, None)
    is_otherwise: bool = False
    beside: tuple[NamePattern | None, NamePattern | None] = (None, None)
    way: Way = Way.BOTH
    of_state: bool = False

    def __post_init__(self) -> None:
        if not self.left or not self.right:
            raise UsageError("a line of [[map]] has no name on one side; use drop for names that one side lacks")
        if self.is_renaming:
            self._check_renaming()
        elif self.is_otherwise:
            raise UsageError(f"the line {self.shown} gives shapes; only a line of names can be otherwise")
        else:
            self._check_shaped()
        self._check_beside()

    @classmethod
    def build(
        cls,
        left: Mapping[str, tuple[Node, ...] | None],
        right: Mapping[str, tuple[Node, ...] | None],
        *,
        optional: bool = False,
        plus: int = 0,
        dtypes: tuple[DType | None, DType | None] = (None, None),
        is_otherwise: bool = False,
        beside: tuple[NamePattern | None, NamePattern | None] = (None, None),
        way: Way = Way.BOTH,
        of_state: bool = False,
    ) -> Line:
        """A line of patterns in words; sizes that are not written are those of the other side's fields."""
        names = {text: NamePattern(text) for text in (*left, *right)}
        shared = _variables(names[text] for text in left) & _variables(names[text] for text in right)
        sides = [_side(names, one, other, shared) for one, other in ((left, right), (right, left))]
        return cls(sides[0], sides[1], optional, plus, dtypes, is_otherwise, beside, way, of_state)

    def inverse(self) -> Line:
        return replace(
            self,
            left=self.right,
            right=self.left,
            plus=-self.plus,
            dtypes=self.dtypes[::-1],
            beside=self.beside[::-1],
            way=self.way.inverse,
        )

    def with_rest(self, number: int) -> Line:
        """The line with ``number`` axes for the rest."""
        sides = (
            tuple(replace(each, axes=None if each.axes is None else with_rest(each.axes, number)) for each in side)
            for side in (self.left, self.right)
        )
        return replace(self, left=next(sides), right=next(sides))

    def with_sizes(self, env: Mapping[str, int]) -> Line:
        """The line whose names count from the sizes of ``env``."""
        if not any(pattern.name.offsets for pattern in (*self.left, *self.right)):
            return self
        sides = (
            tuple(replace(each, name=each.name.with_sizes(env)) for each in side) for side in (self.left, self.right)
        )
        beside = (None if each is None else each.with_sizes(env) for each in self.beside)
        return replace(self, left=next(sides), right=next(sides), beside=(next(beside), next(beside)))

    @cached_property
    def unknown(self) -> frozenset[str]:
        """Sizes from which its names count, and whose values are not known."""
        return frozenset().union(*(each.name.unknown for each in (*self.left, *self.right)))

    @property
    def has_rest(self) -> bool:
        """True if its shapes stand for tensors of any number of axes."""
        return any(is_rest(axis) for each in self.left for axis in each.axes or ())

    @property
    def is_renaming(self) -> bool:
        """True if no shape is given: one name becomes one other."""
        return all(pattern.axes is None for pattern in (*self.left, *self.right))

    @property
    def keeps_names(self) -> bool:
        """True if a name is the same on both sides, so that shapes alone tell the sides apart."""
        return not {each.name.text for each in self.left}.isdisjoint(each.name.text for each in self.right)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The sizes in its shapes."""
        axes = [axis for each in (*self.left, *self.right) for axis in each.axes or ()]
        return frozenset().union(*(extent_size(axis).variables for axis in axes))

    @cached_property
    def shared(self) -> frozenset[str]:
        """Variables of the names of both sides: each set of values is a group of tensors for itself."""
        return frozenset.intersection(*(frozenset(each.name.variables) for each in (*self.left, *self.right)))

    @cached_property
    def pairs(self) -> tuple[CellPair, ...]:
        """Cells of the left with those of the right."""
        source, target = (dict(_cells(side)) for side in (self.left, self.right))
        found = [CellPair(cell, target.get(key)) for key, cell in source.items()]
        return (*found, *(CellPair(None, cell) for key, cell in target.items() if key not in source))

    @property
    def shown(self) -> str:
        """The line in words, for messages."""
        return f"{_names(self.left)} = {_names(self.right)}"

    def _check_renaming(self) -> None:
        if len(self.left) > 1 or len(self.right) > 1:
            raise UsageError(f"the line {self.shown} has several names without shapes")
        left, right = self.left[0].name.variables, self.right[0].name.variables
        if set(left) != set(right):
            name = sorted({*left} ^ {*right})[0]
            raise UsageError(
                f"the line {self.shown} has {{{name}}} on one side alone; make it an axis there: give both shapes"
            )

    def _check_shaped(self) -> None:
        for one, other in ((self.left, self.right), (self.right, self.left)):
            for pattern in one:
                if pattern.axes is None:
                    raise UsageError(f"the line {self.shown} gives {pattern.name.text} no shape")
                self._check_indices(pattern, other)
            self._check_cells(one, other)

    def _check_indices(self, pattern: Pattern, other: tuple[Pattern, ...]) -> None:
        own = {index for axis in pattern.axes or () for index in indices_of(axis)}
        both = sorted(own & {*pattern.name.variables})
        if both:
            raise UsageError(f"{pattern.name.text} has {{{both[0]}}} in its name and in its shape")
        there = frozenset.intersection(*(_indices(each) for each in other))
        alone = sorted(_indices(pattern) - there)
        if alone:
            raise UsageError(
                f"the line {self.shown} has {{{alone[0]}}} in {pattern.name.text}, and not in each tensor of the other "
                "side; make it an axis of that side, or a variable of its names"
            )

    def _check_beside(self) -> None:
        for side, beside in zip((self.left, self.right), self.beside, strict=True):
            for pattern in side if beside is not None else ():
                alone = sorted({*beside.variables} - {*pattern.name.variables} if beside is not None else ())
                if alone:
                    raise UsageError(f"beside has {{{alone[0]}}}, which {pattern.name.text} does not have")

    def _check_cells(self, one: tuple[Pattern, ...], other: tuple[Pattern, ...]) -> None:
        there, seen = dict(_cells(other)), set[frozenset[str]]()
        for key, cell in _cells(one):
            name = one[cell.pattern].name.text
            fields = ", ".join(sorted(key)) or "its one element"
            if key in seen:
                raise UsageError(f"the line {self.shown} has the elements ({fields}) twice, the second time in {name}")
            if key not in there and PAD not in key:
                raise UsageError(f"the line {self.shown} has no place for the elements ({fields}) of {name}")
            seen.add(key)


def _names(side: tuple[Pattern, ...]) -> str:
    return join_names([pattern.name.text for pattern in side], 2)


def _variables(patterns: Iterable[NamePattern]) -> frozenset[str]:
    sets = [frozenset(each.variables) for each in patterns]
    return frozenset.intersection(*sets) if sets else frozenset()


def _indices(pattern: Pattern) -> frozenset[str]:
    in_axes = {index for axis in pattern.axes or () for index in indices_of(axis)}
    return frozenset(pattern.name.variables) | in_axes


def _cells(side: tuple[Pattern, ...]) -> Iterator[tuple[frozenset[str], Cell]]:
    """Each cell of a side with the names of its fields."""
    for number, pattern in enumerate(side):
        numbered = [list(enumerate(leaf_fields(axis))) for axis in pattern.axes or ()]
        for leaves in product(*numbered):
            fields = frozenset(name for _, name in leaves if name is not None)
            yield fields, Cell(number, tuple(index for index, _ in leaves))


def _side(
    names: Mapping[str, NamePattern],
    one: Mapping[str, tuple[Node, ...] | None],
    other: Mapping[str, tuple[Node, ...] | None],
    shared: frozenset[str],
) -> tuple[Pattern, ...]:
    return tuple(
        Pattern(
            names[text].with_numbers({*names[text].variables} - shared if axes is not None else ()),
            None if axes is None else tuple(_with_totals(axis, other) for axis in axes),
        )
        for text, axes in one.items()
    )


def _with_totals(axis: Node, other: Mapping[str, tuple[Node, ...] | None]) -> Node:
    """An axis whose bare fields have the sizes that the other side writes for them."""
    for name in fields_of(axis):
        if not is_bare(axis, name):
            continue
        there = (each for axes in other.values() for each in axes or () if name in fields_of(each))
        written = next((each for each in there if not is_bare(each, name)), None)
        whole = None if written is None else total(written, name)
        if whole is not None:
            axis = with_size(axis, name, whole)
    return axis


@dataclass(frozen=True)
class Recipe:
    """The tensors of a model in the naming ``left`` and in the naming ``right``.

    ``models`` are the ``model_type`` for which it is made, for ``trainer``; transformers if that is empty. With
    ``keeps_others``, a tensor that no line names keeps its name. ``drops`` are patterns of names that the other side
    does not have; ``tied`` maps names of the right side to those that own the bytes, if ``config.json`` ties them.
    Models of ``tied_by_default`` are tied unless it says that they are not. Without ``left_ties`` the left side has no
    names for what is tied. ``copies`` are patterns of names of the right side that repeat another of it, and that the
    left side does not have. ``text`` is the file's. ``stacked`` are the lines for a side that holds all layers as one
    tensor, each where the line for single layers is; empty if neither side does.
    """

    name: str
    lines: tuple[Line, ...]
    stacked: tuple[Line, ...] = ()
    about: str = ""
    left: str = "left"
    right: str = "right"
    models: tuple[str, ...] = ()
    trainer: str = ""
    source: str = ""
    keeps_others: bool = False
    bindings: tuple[Binding, ...] = ()
    drops: tuple[tuple[NamePattern, ...], tuple[NamePattern, ...]] = ((), ())
    tied: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[NamePattern, str] = field(default_factory=dict)
    tied_by_default: tuple[str, ...] = ()
    left_ties: bool = True
    text: str = ""
    is_inverse: bool = False

    def inverse(self) -> Recipe:
        """The way back."""
        return replace(
            self,
            lines=tuple(line.inverse() for line in self.lines),
            stacked=tuple(line.inverse() for line in self.stacked),
            left=self.right,
            right=self.left,
            drops=self.drops[::-1],
            is_inverse=not self.is_inverse,
        )

    @property
    def known_as(self) -> frozenset[str]:
        """Names of its models, after that of the trainer: ``megatron_qwen3``."""
        return frozenset(f"{self.trainer}_{model}" if self.trainer else model for model in self.models)

    def forms(self) -> tuple[Recipe, ...]:
        """The recipe for single layers, and the one for layers that are stacked."""
        stacked = (replace(self, lines=self.stacked, stacked=()),) if self.stacked else ()
        return (replace(self, stacked=()), *stacked)

    def lacking(self, used: Collection[int]) -> Iterator[int]:
        """The lines that need a name and have none, if those of the numbers ``used`` have theirs. Another spelling of a
        name counts."""
        spelled = {
            each.name.text
            for number in used
            if self.lines[number].way is Way.THERE
            for each in self.lines[number].right
        }
        for number, line in enumerate(self.lines):
            is_needed = not line.optional and line.way is Way.BOTH and not line.of_state and number not in used
            if is_needed and not spelled.issuperset(each.name.text for each in line.right):
                yield number

    def with_sizes(self, env: Mapping[str, int]) -> Recipe:
        """The recipe whose names count from the sizes of ``env``."""
        return replace(
            self,
            lines=tuple(line.with_sizes(env) for line in self.lines),
            stacked=tuple(line.with_sizes(env) for line in self.stacked),
        )
