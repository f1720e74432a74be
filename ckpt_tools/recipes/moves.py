"""Turns a line of a recipe with its sizes into moves of boxes from tensor to tensor. Pure.

Both tensors of a move are seen with their axes split into dims, so that one move can be all records at once: of
``F*(gate:1 up:1)`` the field ``gate`` is the box ``[0:F, 0:1]`` of ``[F, 2]``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
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
    """``count`` elements of a cell along one direction, with their place on the left and on the right; None if they are
    in tensors of different names there, by ``index``, or if that side does not have the cell."""

    index: str | None
    count: int
    places: tuple[_AxisPlace | None, _AxisPlace | None]


class _CellBlock(NamedTuple):
    """A cell with sizes: its first position along each axis on the left and on the right, and its directions."""

    cells: CellPair
    bases: tuple[Shape, Shape]
    steps: Sequence[_RadixStep]


class _Dim(NamedTuple):
    """A dim that an axis is split into: ``extent`` positions ``stride`` apart."""

    stride: int
    extent: int


AxesDims = Sequence[Sequence[_Dim]]
"""The dims of each axis of a tensor."""


class _Side:
    """A side of a line with sizes: by pattern, the shape of its tensors, and the leaves and dims of their axes."""

    def __init__(self, patterns: Sequence[TensorPattern], env: SizeValues) -> None:
        self.patterns = patterns
        self.leaves = [[list_leaves(axis, env, each.name.text) for axis in each.axes or ()] for each in patterns]
        self.shapes = tuple(_compute_shape(pattern, env) for pattern in patterns)
        self.dims: list[AxesDims] = []

    def select_leaves(self, cell: Cell | None) -> list[AxisLeaf]:
        """The leaf of each axis that a cell is in."""
        if cell is None:
            return []
        return [axis[leaf] for axis, leaf in zip(self.leaves[cell.pattern], cell.leaves, strict=True)]

    def split_axes(self, places: Collection[tuple[int, _AxisPlace]], env: SizeValues) -> None:
        """Splits the axes at strides of ``places``, which are those of steps, each with the number of a pattern."""
        for number, pattern in enumerate(self.patterns):
            own_places = [place for pattern_number, place in places if pattern_number == number]
            self.dims.append(
                [
                    _split_axis(
                        extent,
                        {place.stride for place in own_places if place.axis == axis},
                        compute_record_extent(node, env, pattern.name.text),
                    )
                    for axis, (node, extent) in enumerate(zip(pattern.axes or (), self.shapes[number], strict=True))
                ]
            )

    @property
    def split_shapes(self) -> SideShapes:
        return SideShapes(self.shapes, tuple(tuple(dim.extent for dims in axes for dim in dims) for axes in self.dims))


def _compute_shape(pattern: TensorPattern, env: SizeValues) -> Shape:
    """The shape of a pattern's tensors. Raises UsageError if it is too large."""
    shape = tuple(compute_extent(axis, env, pattern.name.text) for axis in pattern.axes or ())
    if prod(shape) > MAX_SIZE:
        raise UsageError(f"by the recipe {pattern.name.text} would have more than 2^62 elements")
    return shape


def _split_axis(extent: int, strides: Iterable[int], record_extent: int) -> tuple[_Dim, ...]:
    """The dims of an axis, the outermost first: their strides divide each other, and none is inside a record."""
    # `F*(gate:1 up:1)` of 2F positions becomes [F, 2], in which gate is one box. A stride inside a record is no dim of
    # the whole axis, because other fields of the record have other strides.
    dims = []
    for stride in sorted(strides, reverse=True):
        if max(record_extent, 2) <= stride < extent and extent % stride == 0:
            dims.append(_Dim(stride, extent // stride))
            extent = stride
    return (*dims, _Dim(1, extent))


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
    sides = _Side(line.left, env), _Side(line.right, env)
    blocks = [_make_block(line, cells, sides) for cells in line.cell_pairs]
    for number, side in enumerate(sides):
        cells_and_steps = ((block.cells[number], step.places[number]) for block in blocks for step in block.steps)
        places = {(cell.pattern, place) for cell, place in cells_and_steps if cell is not None and place is not None}
        side.split_axes(places, env)
    moves: dict[GroupPlace, list[Move]] = defaultdict(list)
    fills: dict[int, list[FillBox]] = defaultdict(list)
    num_cropped: dict[int, int] = defaultdict(int)
    for block in blocks:
        source, target = block.cells
        numel = prod(step.count for step in block.steps)
        if None in block.cells and not numel:
            continue
        if target is None:
            assert source is not None, "a cell is on one side at least"
            num_cropped[source.pattern] += numel
            continue
        dims = [[] if cell is None else side.dims[cell.pattern] for cell, side in zip(block.cells, sides, strict=True)]
        for fixed, free in _iter_choices(block, dims):
            start, extents, target_steps = _compute_box(1, block.bases[1], dims[1], fixed, free)
            if source is None:
                fills[target.pattern].append(FillBox(start, extents))
                continue
            source_start, _, source_steps = _compute_box(0, block.bases[0], dims[0], fixed, free)
            dim_of_step = {number: dim for dim, number in enumerate(source_steps) if number >= 0}
            move_dims = tuple(dim_of_step[number] if number >= 0 else -1 for number in target_steps)
            values = {step.index: value for step, value in fixed}
            place, target_place = (
                (cell.pattern, tuple(values[name] for name in list_indexed_variables(side.patterns[cell.pattern])))
                for cell, side in zip((source, target), sides, strict=True)
            )
            moves[place].append(Move(*target_place, source_start, start, extents, move_dims))
    return LineMoves(
        sides[0].split_shapes,
        sides[1].split_shapes,
        {place: tuple(each) for place, each in moves.items()},
        {pattern: tuple(each) for pattern, each in fills.items()},
        num_cropped,
    )


def _make_block(line: RecipeLine, cells: CellPair, sides: tuple[_Side, _Side]) -> _CellBlock:
    source, target = (side.select_leaves(cell) for side, cell in zip(sides, cells, strict=True))
    steps: list[_RadixStep] = []
    if cells.source is None or cells.target is None:
        for axis, leaf in enumerate(source or target):
            for step in leaf.steps:
                place = _AxisPlace(axis, step.stride)
                steps.append(
                    _RadixStep(step.index, step.count, (None, place) if cells.source is None else (place, None))
                )
    else:
        target_by_field = {leaf.field: (axis, leaf) for axis, leaf in enumerate(target) if leaf.field is not None}
        for axis, leaf in enumerate(source):
            if leaf.field is not None:
                other_axis, other = target_by_field[leaf.field]
                steps += _align_field_steps(line, leaf.field, axis, leaf.steps, other_axis, other.steps)
        steps += _make_index_steps(line, source, target)
    return _CellBlock(cells, (tuple(leaf.base for leaf in source), tuple(leaf.base for leaf in target)), steps)


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
    """The rest of a step once its innermost ``count`` positions are taken."""
    return [StrideStep(None, step.count // count, step.stride * count)] if step.count > count else []


FixedSteps = Sequence[tuple[_RadixStep, int]]
"""Steps, each with one of their values."""


def _iter_choices(block: _CellBlock, dims: Sequence[AxesDims]) -> Iterator[tuple[FixedSteps, Sequence[_RadixStep]]]:
    """The steps that a box cannot span, with each combination of their values, and the steps that it can."""
    steps = [part for step in block.steps for part in _split_step(step, dims)]
    is_on_both_sides = None not in block.cells
    free = [step for step in steps if _is_spanned_by_box(step, dims) and not (is_on_both_sides and None in step.places)]
    fixed = [step for step in steps if step not in free]
    for values in product(*(range(step.count) for step in fixed)):
        yield list(zip(fixed, values, strict=True)), free


def _split_step(step: _RadixStep, dims: Sequence[AxesDims]) -> Iterator[_RadixStep]:
    """A step cut where a dim of either side ends, the outermost part first."""
    # 12 elements along dims of 4 are cut into 3 outer and 4 inner ones. Both are tried again, since the other side may
    # cut them elsewhere. This ends because each cut makes both counts smaller.
    for side, place in enumerate(step.places):
        for dim in () if place is None else dims[side][place.axis]:
            assert place is not None
            inner_count, rest = divmod(dim.stride, place.stride)
            if not rest and 1 < inner_count < step.count and step.count % inner_count == 0:
                left, right = (
                    None if each is None else _AxisPlace(each.axis, each.stride * inner_count) for each in step.places
                )
                yield from _split_step(_RadixStep(step.index, step.count // inner_count, (left, right)), dims)
                yield from _split_step(replace(step, count=inner_count), dims)
                return
    yield step


def _is_spanned_by_box(step: _RadixStep, dims: Sequence[AxesDims]) -> bool:
    """True if on each side the step is a whole dim, or adjacent positions."""
    return all(
        place is None or place.stride == 1 or _Dim(place.stride, step.count) in axes[place.axis]
        for place, axes in zip(step.places, dims, strict=True)
    )


def _compute_box(
    side: int, base: Shape, dims: AxesDims, fixed: FixedSteps, free: Sequence[_RadixStep]
) -> tuple[Shape, Shape, Shape]:
    """First position, extents, and the number of the free step along each dim, or -1."""
    start, extents, step_numbers = [], [], []
    for axis, position in enumerate(base):
        position += sum(n * place.stride for step, n in fixed if (place := step.places[side]) and place.axis == axis)
        number_by_place = {step.places[side]: number for number, step in enumerate(free)}
        # `position` is what is left of the first position. A dim along which no free step runs has one position.
        for stride, _ in dims[axis]:
            number = number_by_place.get(_AxisPlace(axis, stride), -1)
            index, position = divmod(position, stride)
            start.append(index)
            extents.append(free[number].count if number >= 0 else 1)
            step_numbers.append(number)
    return tuple(start), tuple(extents), tuple(step_numbers)
