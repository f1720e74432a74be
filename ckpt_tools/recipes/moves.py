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
from ckpt_tools.recipes.axes import AxisLeaf, StrideStep, compute_extent, compute_record_extent, list_leaves
from ckpt_tools.recipes.recipe import Cell, CellPair, RecipeLine, TensorPattern
from ckpt_tools.recipes.sizes import MAX_SIZE, SizeValues

Indices = tuple[int, ...]
"""Values of the numbered variables of a name, in the order of ``list_indexed_variables``."""

GroupPlace = tuple[int, Indices]
"""A tensor's place in a group: the pattern of its name, and the values of its numbered variables."""


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


class FillBox(NamedTuple):
    """A box of a target that no source has: padding."""

    start: Shape
    extents: Shape

    @property
    def numel(self) -> int:
        return prod(self.extents)


@dataclass(frozen=True)
class SideShapes:
    """One side of a line with sizes: by pattern, the shape of its tensors, and the dims that their axes are split
    into."""

    shapes: tuple[Shape, ...]
    dims: tuple[Shape, ...]


@dataclass(frozen=True)
class LineMoves:
    """All moves of a line. ``by_source`` has those of each source tensor, by its pattern and indices;
    ``fills_by_pattern`` the padding of each target pattern. ``num_cropped`` counts the elements of each source pattern
    that no target has."""

    source: SideShapes
    target: SideShapes
    by_source: dict[tuple[int, Indices], tuple[Move, ...]]
    fills_by_pattern: dict[int, tuple[FillBox, ...]]
    num_cropped: dict[int, int]


def list_indexed_variables(pattern: TensorPattern) -> tuple[str, ...]:
    """The variables of a name that are an axis of the other side."""
    return tuple(name for name in pattern.name.variables if name in pattern.name.numeric_variables)


class _AxisPlace(NamedTuple):
    axis: int
    stride: int


@dataclass(frozen=True, slots=True)
class _RadixStep:
    """``count`` elements of a cell along one direction, with their place on each side; None if they are in tensors of
    different names, by ``index``."""

    index: str | None
    count: int
    places: tuple[_AxisPlace | None, _AxisPlace | None]

    def get_stride(self, side: int) -> int:
        place = self.places[side]
        assert place is not None, "it lies along an axis"
        return place.stride

    def get_axis(self, side: int) -> int | None:
        place = self.places[side]
        return None if place is None else place.axis


@dataclass(frozen=True)
class _CellBlock:
    """A cell with sizes: its first position along each axis of both sides, and its directions."""

    cells: CellPair
    source_base: Shape
    target_base: Shape
    steps: tuple[_RadixStep, ...]


def make_moves(line: RecipeLine, env: SizeValues) -> LineMoves:
    """All moves of a line.

    Raises:
        UsageError: a size is not known, does not divide, or differs between the sides.
    """
    # Positions of one field on both sides are numbers in a mixed radix. For q of `G*(q:R*D k:D v:D)` and of an axis
    # that is q alone, with g < G and i < R*D:
    #     source position =  g * (R+2)*D  +  i
    #     target position =  g *  R*D     +  i
    # so its radix steps are (count R*D, strides 1 and 1) and (count G, strides (R+2)*D and R*D). A step that is a whole
    # dim on both sides is one extent of a box. For each value of any other step there is a move of its own.
    sides = (line.left, line.right)
    leaves = [[[list_leaves(axis, env, each.name.text) for axis in each.axes or ()] for each in side] for side in sides]
    shapes = [tuple(_compute_shape(pattern, env) for pattern in side) for side in sides]
    blocks = [_make_block(line, cells, leaves[0], leaves[1]) for cells in line.cell_pairs]
    split_strides = [
        [
            _find_split_strides(blocks, which, number, pattern, shape, env)
            for number, (pattern, shape) in enumerate(zip(side, shapes[which], strict=True))
        ]
        for which, side in enumerate(sides)
    ]
    source, target = (
        SideShapes(side, tuple(_split_shape(shape, each) for shape, each in zip(side, cut, strict=True)))
        for side, cut in zip(shapes, split_strides, strict=True)
    )
    return _MoveBuilder(line, split_strides, source, target).build_moves(blocks)


def _compute_shape(pattern: TensorPattern, env: SizeValues) -> Shape:
    """The shape of a pattern's tensors. Raises UsageError if it is too large."""
    shape = tuple(compute_extent(axis, env, pattern.name.text) for axis in pattern.axes or ())
    if prod(shape) > MAX_SIZE:
        raise UsageError(f"by the recipe {pattern.name.text} would have more than 2^62 elements")
    return shape


def _make_block(
    line: RecipeLine, cells: CellPair, sources: list[list[list[AxisLeaf]]], targets: list[list[list[AxisLeaf]]]
) -> _CellBlock:
    source, target = _select_leaves(cells.source, sources), _select_leaves(cells.target, targets)
    steps: list[_RadixStep] = []
    if cells.source is None or cells.target is None:
        only_side = source or target
        for axis, leaf in enumerate(only_side):
            for step in leaf.steps:
                place = _AxisPlace(axis, step.stride)
                is_source = cells.source is not None
                steps.append(_RadixStep(step.index, step.count, (place, None) if is_source else (None, place)))
    else:
        target_by_field = {leaf.field: (axis, leaf) for axis, leaf in enumerate(target) if leaf.field is not None}
        for axis, leaf in enumerate(source):
            if leaf.field is not None:
                other_axis, other = target_by_field[leaf.field]
                steps += _align_field_steps(line, leaf.field, axis, leaf.steps, other_axis, other.steps)
        steps += _make_index_steps(line, source, target)
    return _CellBlock(cells, tuple(leaf.base for leaf in source), tuple(leaf.base for leaf in target), tuple(steps))


def _select_leaves(cell: Cell | None, leaves_by_pattern: list[list[list[AxisLeaf]]]) -> list[AxisLeaf]:
    if cell is None:
        return []
    return [axis[leaf] for axis, leaf in zip(leaves_by_pattern[cell.pattern], cell.leaves, strict=True)]


def _make_index_steps(line: RecipeLine, source: Sequence[AxisLeaf], target: Sequence[AxisLeaf]) -> Iterator[_RadixStep]:
    source_places, target_places = _find_index_places(source), _find_index_places(target)
    for index in {**source_places, **target_places}:
        count, place = source_places.get(index, (0, None))
        other_count, other = target_places.get(index, (count, None))
        if place is not None and count != other_count:
            raise UsageError(
                f"the line {line.description} has {count:,} of {{{index}}} on one side and {other_count:,} on the other"
            )
        yield _RadixStep(index, other_count, (place, other))


def _find_index_places(leaves: Sequence[AxisLeaf]) -> dict[str, tuple[int, _AxisPlace]]:
    return {
        step.index: (step.count, _AxisPlace(axis, step.stride))
        for axis, leaf in enumerate(leaves)
        for step in leaf.steps
        if step.index is not None
    }


def _align_field_steps(
    line: RecipeLine,
    field: str,
    axis: int,
    steps: Iterable[StrideStep],
    other_axis: int,
    other_steps: Iterable[StrideStep],
) -> Iterator[_RadixStep]:
    """The steps of a field on both sides, cut so that each is one step on both; the innermost first."""
    own_steps_left = [step for step in steps if step.index is None and step.count != 1]
    other_steps_left = [step for step in other_steps if step.index is None and step.count != 1]
    totals = [prod(step.count for step in each) for each in (own_steps_left, other_steps_left)]
    if totals[0] != totals[1] or not totals[0]:
        raise UsageError(
            f"the line {line.description} has {totals[0]:,} of {field} on one side and {totals[1]:,} on the other"
        )
    # Both lists enumerate the same elements. Take the innermost step of each. The smaller count divides the larger:
    #     own [.., 6] [4]      other [.., 2] [12]      gives a step of 4, and leaves one of 12/4 = 3 on the other
    # Put back what is left with its stride multiplied. Both totals shrink alike, so that both lists end together.
    while own_steps_left:
        own_step, other_step = own_steps_left.pop(), other_steps_left.pop()
        count = min(own_step.count, other_step.count)
        if own_step.count % count or other_step.count % count:
            raise UsageError(
                f"the line {line.description}: {field} is in runs of {own_step.count:,} on one side and of "
                f"{other_step.count:,} on the other, and neither divides the other"
            )
        yield _RadixStep(None, count, (_AxisPlace(axis, own_step.stride), _AxisPlace(other_axis, other_step.stride)))
        own_steps_left += _list_outer_steps(own_step, count)
        other_steps_left += _list_outer_steps(other_step, count)


def _list_outer_steps(step: StrideStep, count: int) -> list[StrideStep]:
    """What is left of a step once its innermost ``count`` positions are taken."""
    return [StrideStep(None, step.count // count, step.stride * count)] if step.count > count else []


def _find_split_strides(
    blocks: Iterable[_CellBlock], side: int, number: int, pattern: TensorPattern, shape: Shape, env: SizeValues
) -> list[Shape]:
    """The strides at which each axis of the ``number``-th pattern of a side is split into dims, the largest first:
    those of the loops around its innermost record. Each divides the one before."""
    # `F*(gate:1 up:1)` of 2F positions becomes [F, 2], in which gate is one box. A stride inside a record is no dim of
    # the whole axis, because other fields of the record have other strides.
    strides_by_axis: list[set[int]] = [set() for _ in shape]
    for block in blocks:
        cell = block.cells[side]
        for step in block.steps if cell is not None and cell.pattern == number else ():
            if (place := step.places[side]) is not None:
                strides_by_axis[place.axis].add(place.stride)
    split_strides = []
    for axis, extent, strides in zip(pattern.axes or (), shape, strides_by_axis, strict=True):
        record_extent, chosen = compute_record_extent(axis, env, pattern.name.text), list[int]()
        for stride in sorted(strides, reverse=True):
            if max(record_extent, 2) <= stride < extent and (chosen[-1] if chosen else extent) % stride == 0:
                chosen.append(stride)
        split_strides.append(tuple(chosen))
    return split_strides


def _split_shape(shape: Shape, split_strides: Sequence[Shape]) -> Shape:
    """The extents of all dims that axes are split into."""
    return tuple(
        whole // part
        for extent, cuts in zip(shape, split_strides, strict=True)
        for whole, part in zip((extent, *cuts), (*cuts, 1), strict=True)
    )


@dataclass(frozen=True)
class _MoveBuilder:
    """Turns blocks into moves, in the dims of both sides."""

    line: RecipeLine
    split_strides: Sequence[Sequence[Sequence[Shape]]]
    source: SideShapes
    target: SideShapes

    def build_moves(self, blocks: Iterable[_CellBlock]) -> LineMoves:
        by_source: dict[tuple[int, Indices], list[Move]] = {}
        fills: dict[int, list[FillBox]] = {}
        num_cropped: dict[int, int] = {}
        for block in blocks:
            source, target = block.cells
            if None in block.cells and not all(step.count for step in block.steps):
                continue
            if target is None:
                assert source is not None, "a cell is on one side at least"
                numel = prod(step.count for step in block.steps)
                num_cropped[source.pattern] = num_cropped.get(source.pattern, 0) + numel
                continue
            for fixed, free in self._iter_choices(block):
                start, extents, target_steps = self._compute_box(block.target_base, 1, target, fixed, free)
                if source is None:
                    fills.setdefault(target.pattern, []).append(FillBox(start, extents))
                    continue
                source_start, _, source_steps = self._compute_box(block.source_base, 0, source, fixed, free)
                dim_of_step = {number: dim for dim, number in enumerate(source_steps) if number >= 0}
                dims = tuple(dim_of_step[number] if number >= 0 else -1 for number in target_steps)
                key = source.pattern, self._get_indices(0, source.pattern, fixed)
                indices = self._get_indices(1, target.pattern, fixed)
                by_source.setdefault(key, []).append(Move(target.pattern, indices, source_start, start, extents, dims))
        return LineMoves(
            self.source,
            self.target,
            {key: tuple(moves) for key, moves in by_source.items()},
            {pattern: tuple(each) for pattern, each in fills.items()},
            num_cropped,
        )

    def _iter_choices(
        self, block: _CellBlock
    ) -> Iterator[tuple[tuple[tuple[_RadixStep, int], ...], tuple[_RadixStep, ...]]]:
        """The steps that a box cannot span, with each combination of their values, and the steps that it can."""
        steps = [part for step in block.steps for part in self._split_step(block, step)]
        free = tuple(step for step in steps if self._is_spanned_by_box(block, step))
        fixed = [step for step in steps if not self._is_spanned_by_box(block, step)]
        for values in product(*(range(step.count) for step in fixed)):
            yield tuple(zip(fixed, values, strict=True)), free

    def _split_step(self, block: _CellBlock, step: _RadixStep) -> Iterator[_RadixStep]:
        """A step cut where a dim of either side ends, the outermost part first."""
        # 12 elements along dims of 4 are cut into 3 outer and 4 inner ones. Both are tried again, since the other side
        # may cut them elsewhere. This ends because each cut makes both counts smaller.
        for side in (0, 1):
            for bound in self._get_split_strides(block, step, side):
                stride = step.get_stride(side)
                inner_count = bound // stride
                if stride < bound < stride * step.count and bound % stride == 0 and step.count % inner_count == 0:
                    yield from self._split_step(block, _make_outer_step(step, inner_count))
                    yield from self._split_step(block, replace(step, count=inner_count))
                    return
        yield step

    def _get_split_strides(self, block: _CellBlock, step: _RadixStep, side: int) -> Shape:
        cell, axis = block.cells[side], step.get_axis(side)
        return () if cell is None or axis is None else self.split_strides[side][cell.pattern][axis]

    def _is_spanned_by_box(self, block: _CellBlock, step: _RadixStep) -> bool:
        """True if a box can span the step on both sides."""
        if None in step.places and None not in block.cells:
            return False
        return all(self._is_whole_dim(block, step, which) for which in (0, 1))

    def _is_whole_dim(self, block: _CellBlock, step: _RadixStep, side: int) -> bool:
        cell, axis = block.cells[side], step.get_axis(side)
        if cell is None or axis is None:
            return True
        split_strides, stride = self._get_split_strides(block, step, side), step.get_stride(side)
        if stride not in split_strides:
            return stride == 1
        extent = (self.source, self.target)[side].shapes[cell.pattern][axis]
        return step.count == (extent, *split_strides)[split_strides.index(stride)] // stride

    def _compute_box(
        self, base: Shape, side: int, cell: Cell, fixed: Sequence[tuple[_RadixStep, int]], free: Sequence[_RadixStep]
    ) -> tuple[Shape, Shape, Shape]:
        """First position, extents, and the number of the free step along each dim, or -1."""
        start, extents, step_numbers = [], [], []
        for axis, split_strides in enumerate(self.split_strides[side][cell.pattern]):
            number_by_stride = {step.get_stride(side): n for n, step in enumerate(free) if step.get_axis(side) == axis}
            position = base[axis] + sum(n * step.get_stride(side) for step, n in fixed if step.get_axis(side) == axis)
            # `position` is what is left of the first position. A dim along which no free step runs has one position.
            for stride in (*split_strides, 1):
                number = number_by_stride.get(stride, -1)
                index, position = divmod(position, stride)
                start.append(index)
                extents.append(free[number].count if number >= 0 else 1)
                step_numbers.append(number)
        return tuple(start), tuple(extents), tuple(step_numbers)

    def _get_indices(self, side_number: int, pattern: int, fixed: Iterable[tuple[_RadixStep, int]]) -> Indices:
        values = {step.index: value for step, value in fixed if step.index is not None}
        side = self.line.left if side_number == 0 else self.line.right
        return tuple(values[name] for name in list_indexed_variables(side[pattern]))


def _make_outer_step(step: _RadixStep, inner_count: int) -> _RadixStep:
    """The step over every ``inner_count``-th element of ``step``."""
    source, target = (
        None if each is None else _AxisPlace(each.axis, each.stride * inner_count) for each in step.places
    )
    return _RadixStep(step.index, step.count // inner_count, (source, target))
