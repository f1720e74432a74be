"""Turns a line of a recipe with its sizes into moves of boxes from tensor to tensor. Pure.

Both tensors of a move are seen with their axes split into dims, so that one move can be all records at once: of
``F*(gate:1 up:1)`` the field ``gate`` is the box ``[0:F, 0:1]`` of ``[F, 2]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

from ckpt_tools.core.boxes import Shape
from ckpt_tools.errors import UsageError
from ckpt_tools.recipes.axes import Leaf, Step, extent, leaves, record_extent
from ckpt_tools.recipes.recipe import Cell, CellPair, Line, Pattern
from ckpt_tools.recipes.sizes import MAX_SIZE, Env

Indices = tuple[int, ...]
"""Values of the numbered variables of a name, in the order of ``numbered``."""


class Move(NamedTuple):
    """The box from ``source_start`` of one tensor becomes the box from ``target_start`` of another, of ``extents``.

    ``dims`` has the dim of the source for each dim of the target, or -1 where the box has one position. Starts and
    extents count in split dims; extents are those of the target.
    """

    pattern: int
    indices: Indices
    source_start: Shape
    target_start: Shape
    extents: Shape
    dims: Shape


class Fill(NamedTuple):
    """A box of a target that no source has: padding."""

    start: Shape
    extents: Shape

    @property
    def numel(self) -> int:
        return prod(self.extents)


@dataclass(frozen=True)
class Side:
    """One side with sizes: the shape of each pattern's tensors, and the dims that its axes are split into."""

    shapes: tuple[Shape, ...]
    dims: tuple[Shape, ...]


@dataclass(frozen=True)
class Moves:
    """All moves of a line: by pattern and indices of the source, what becomes of its tensor, and what fills targets.
    ``cropped`` are elements of each source pattern that have no place."""

    source: Side
    target: Side
    by_source: dict[tuple[int, Indices], tuple[Move, ...]]
    fills: dict[int, tuple[Fill, ...]]
    cropped: dict[int, int]


def numbered(pattern: Pattern) -> tuple[str, ...]:
    """The variables of a name that are an axis of the other side."""
    return tuple(name for name in pattern.name.variables if name in pattern.name.numbers)


class _Place(NamedTuple):
    axis: int
    stride: int


@dataclass(frozen=True, slots=True)
class _Digit:
    """``count`` elements of a cell along one direction, with their place on each side; None if they are in tensors of
    different names, by ``index``."""

    index: str | None
    count: int
    places: tuple[_Place | None, _Place | None]

    def stride(self, which: int) -> int:
        place = self.places[which]
        assert place is not None, "it lies along an axis"
        return place.stride

    def axis(self, which: int) -> int | None:
        place = self.places[which]
        return None if place is None else place.axis


@dataclass(frozen=True)
class _Block:
    """A cell with sizes: its first position along each axis of both sides, and its directions."""

    cells: CellPair
    source_base: Shape
    target_base: Shape
    digits: tuple[_Digit, ...]


def make_moves(line: Line, env: Env) -> Moves:
    """All moves of a line.

    Raises:
        UsageError: a size is not known, does not divide, or differs between the sides.
    """
    source_leaves, target_leaves = [
        [[leaves(axis, env, pattern.name.text) for axis in pattern.axes or ()] for pattern in side]
        for side in (line.left, line.right)
    ]
    shapes = [tuple(_shape(pattern, env) for pattern in side) for side in (line.left, line.right)]
    blocks = [_block(line, cells, source_leaves, target_leaves) for cells in line.pairs]
    inner = [
        [[record_extent(axis, env, pattern.name.text) for axis in pattern.axes or ()] for pattern in side]
        for side in (line.left, line.right)
    ]
    bounds = [
        [
            [_bounds(blocks, which, number, axis, size, inner[which][number][axis]) for axis, size in enumerate(shape)]
            for number, shape in enumerate(shapes[which])
        ]
        for which in (0, 1)
    ]
    source, target = (
        Side(side, tuple(_dims(shape, each) for shape, each in zip(side, cut, strict=True)))
        for side, cut in zip(shapes, bounds, strict=True)
    )
    return _Maker(line, bounds, source, target).moves(blocks)


def _shape(pattern: Pattern, env: Env) -> Shape:
    """The shape of a pattern's tensors. Raises UsageError."""
    shape = tuple(extent(axis, env, pattern.name.text) for axis in pattern.axes or ())
    if prod(shape) > MAX_SIZE:
        raise UsageError(f"by the recipe {pattern.name.text} would have more than 2^62 elements")
    return shape


def _block(line: Line, cells: CellPair, sources: list[list[list[Leaf]]], targets: list[list[list[Leaf]]]) -> _Block:
    source, target = _chosen(cells.source, sources), _chosen(cells.target, targets)
    digits: list[_Digit] = []
    if cells.source is None or cells.target is None:
        lone = source or target
        for axis, leaf in enumerate(lone):
            for step in leaf.steps:
                place = _Place(axis, step.stride)
                is_source = cells.source is not None
                digits.append(_Digit(step.index, step.count, (place, None) if is_source else (None, place)))
    else:
        there = {leaf.field: (axis, leaf) for axis, leaf in enumerate(target) if leaf.field is not None}
        for axis, leaf in enumerate(source):
            if leaf.field is not None:
                other_axis, other = there[leaf.field]
                digits += _common(line, leaf.field, axis, leaf.steps, other_axis, other.steps)
        digits += _index_digits(line, source, target)
    return _Block(cells, tuple(leaf.base for leaf in source), tuple(leaf.base for leaf in target), tuple(digits))


def _chosen(cell: Cell | None, tables: list[list[list[Leaf]]]) -> list[Leaf]:
    if cell is None:
        return []
    return [axis[leaf] for axis, leaf in zip(tables[cell.pattern], cell.leaves, strict=True)]


def _index_digits(line: Line, source: Sequence[Leaf], target: Sequence[Leaf]) -> Iterator[_Digit]:
    here, there = _by_index(source), _by_index(target)
    for index in {**here, **there}:
        count, place = here.get(index, (0, None))
        other_count, other = there.get(index, (count, None))
        if place is not None and count != other_count:
            raise UsageError(
                f"the line {line.shown} has {count:,} of {{{index}}} on one side and {other_count:,} on the other"
            )
        yield _Digit(index, other_count, (place, other))


def _by_index(found: Sequence[Leaf]) -> dict[str, tuple[int, _Place]]:
    return {
        step.index: (step.count, _Place(axis, step.stride))
        for axis, leaf in enumerate(found)
        for step in leaf.steps
        if step.index is not None
    }


def _common(
    line: Line, field: str, axis: int, steps: Iterable[Step], other_axis: int, others: Iterable[Step]
) -> Iterator[_Digit]:
    """The steps of a field on both sides, cut so that each is one step on both; the innermost first."""
    here = [step for step in steps if step.index is None and step.count != 1]
    there = [step for step in others if step.index is None and step.count != 1]
    totals = [prod(step.count for step in each) for each in (here, there)]
    if totals[0] != totals[1] or not totals[0]:
        raise UsageError(
            f"the line {line.shown} has {totals[0]:,} of {field} on one side and {totals[1]:,} on the other"
        )
    while here:
        one, other = here.pop(), there.pop()
        count = min(one.count, other.count)
        if one.count % count or other.count % count:
            raise UsageError(
                f"the line {line.shown}: {field} is in runs of {one.count:,} on one side and of {other.count:,} on the "
                "other, and neither divides the other"
            )
        yield _Digit(None, count, (_Place(axis, one.stride), _Place(other_axis, other.stride)))
        here += _rest(one, count)
        there += _rest(other, count)


def _rest(step: Step, count: int) -> list[Step]:
    """The steps around ``count`` of them that are taken."""
    return [Step(None, step.count // count, step.stride * count)] if step.count > count else []


def _bounds(blocks: Iterable[_Block], which: int, pattern: int, axis: int, extent: int, inner: int) -> Shape:
    """Strides at which an axis is split into dims, the largest first: those of the loops around its innermost record,
    of ``inner`` positions. Each divides the one before."""
    strides = {
        place.stride
        for block in blocks
        if (cell := block.cells[which]) is not None and cell.pattern == pattern
        for digit in block.digits
        if (place := digit.places[which]) is not None and place.axis == axis
    }
    found: list[int] = []
    for stride in sorted(strides, reverse=True):
        if inner <= stride < extent and stride > 1 and (found[-1] if found else extent) % stride == 0:
            found.append(stride)
    return tuple(found)


def _dims(shape: Shape, bounds: Sequence[Shape]) -> Shape:
    """The extents of all dims that axes are split into."""
    return tuple(
        whole // part
        for extent, cuts in zip(shape, bounds, strict=True)
        for whole, part in zip((extent, *cuts), (*cuts, 1), strict=True)
    )


@dataclass(frozen=True)
class _Maker:
    """Turns blocks into moves, in the dims of both sides."""

    line: Line
    bounds: Sequence[Sequence[Sequence[Shape]]]
    source: Side
    target: Side

    def moves(self, blocks: Iterable[_Block]) -> Moves:
        found: dict[tuple[int, Indices], list[Move]] = {}
        fills: dict[int, list[Fill]] = {}
        cropped: dict[int, int] = {}
        for block in blocks:
            source, target = block.cells
            if None in block.cells and not all(digit.count for digit in block.digits):
                continue
            if target is None:
                assert source is not None, "a cell is on one side at least"
                cropped[source.pattern] = cropped.get(source.pattern, 0) + prod(digit.count for digit in block.digits)
                continue
            for fixed, free in self._choices(block):
                start, extents, from_digit = self._box(block.target_base, 1, target, fixed, free)
                if source is None:
                    fills.setdefault(target.pattern, []).append(Fill(start, extents))
                    continue
                source_start, _, places = self._box(block.source_base, 0, source, fixed, free)
                dim_of = {digit: dim for dim, digit in enumerate(places) if digit >= 0}
                dims = tuple(dim_of[digit] if digit >= 0 else -1 for digit in from_digit)
                key = source.pattern, self._indices(0, source.pattern, fixed)
                indices = self._indices(1, target.pattern, fixed)
                found.setdefault(key, []).append(Move(target.pattern, indices, source_start, start, extents, dims))
        return Moves(
            self.source,
            self.target,
            {key: tuple(moves) for key, moves in found.items()},
            {pattern: tuple(each) for pattern, each in fills.items()},
            cropped,
        )

    def _choices(self, block: _Block) -> Iterator[tuple[tuple[tuple[_Digit, int], ...], tuple[_Digit, ...]]]:
        """Digits that a box cannot span, with each of their values, and the others."""
        digits = [part for digit in block.digits for part in self._split(block, digit)]
        free = tuple(digit for digit in digits if self._is_free(block, digit))
        fixed = [digit for digit in digits if not self._is_free(block, digit)]
        for values in product(*(range(digit.count) for digit in fixed)):
            yield tuple(zip(fixed, values, strict=True)), free

    def _split(self, block: _Block, digit: _Digit) -> Iterator[_Digit]:
        """A digit cut where a dim of either side ends, the outermost first."""
        for which in (0, 1):
            for bound in self._bounds_of(block, digit, which):
                stride = digit.stride(which)
                steps = bound // stride
                if stride < bound < stride * digit.count and bound % stride == 0 and digit.count % steps == 0:
                    yield from self._split(block, _outer(digit, steps))
                    yield from self._split(block, replace(digit, count=steps))
                    return
        yield digit

    def _bounds_of(self, block: _Block, digit: _Digit, which: int) -> Shape:
        cell, axis = block.cells[which], digit.axis(which)
        return () if cell is None or axis is None else self.bounds[which][cell.pattern][axis]

    def _is_free(self, block: _Block, digit: _Digit) -> bool:
        """True if a box can span the digit on both sides."""
        if None in digit.places and None not in block.cells:
            return False
        return all(self._is_dim(block, digit, which) for which in (0, 1))

    def _is_dim(self, block: _Block, digit: _Digit, which: int) -> bool:
        cell, axis = block.cells[which], digit.axis(which)
        if cell is None or axis is None:
            return True
        bounds, stride = self._bounds_of(block, digit, which), digit.stride(which)
        if stride not in bounds:
            return stride == 1
        extent = (self.source, self.target)[which].shapes[cell.pattern][axis]
        return digit.count == (extent, *bounds)[bounds.index(stride)] // stride

    def _box(
        self, base: Shape, which: int, cell: Cell, fixed: Sequence[tuple[_Digit, int]], free: Sequence[_Digit]
    ) -> tuple[Shape, Shape, Shape]:
        """First position, extents, and the number of the digit along each dim, or -1."""
        bounds = self.bounds[which][cell.pattern]
        start, extents, digits = [], [], []
        for axis, cuts in enumerate(bounds):
            along = {digit.stride(which): n for n, digit in enumerate(free) if digit.axis(which) == axis}
            at = base[axis] + sum(n * digit.stride(which) for digit, n in fixed if digit.axis(which) == axis)
            for stride in (*cuts, 1):
                number = along.get(stride, -1)
                index, at = divmod(at, stride)
                start.append(index)
                extents.append(free[number].count if number >= 0 else 1)
                digits.append(number)
        return tuple(start), tuple(extents), tuple(digits)

    def _indices(self, which: int, pattern: int, fixed: Iterable[tuple[_Digit, int]]) -> Indices:
        values = {digit.index: value for digit, value in fixed if digit.index is not None}
        side = self.line.left if which == 0 else self.line.right
        return tuple(values[name] for name in numbered(side[pattern]))


def _outer(digit: _Digit, steps: int) -> _Digit:
    """The digit of every ``steps``-th element."""
    source, target = (None if place is None else _Place(place.axis, place.stride * steps) for place in digit.places)
    return _Digit(digit.index, digit.count // steps, (source, target))
