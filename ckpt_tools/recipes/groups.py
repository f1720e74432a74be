"""Matches names of tensors with the lines of a recipe, and groups the tensors that become each other. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product
from math import prod
from typing import NamedTuple

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import WEIGHT, StateKey
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import IncompleteError, UsageError
from ckpt_tools.messages.wording import MAX_LISTED_NAMES, find_nearest, format_count, join_names
from ckpt_tools.recipes.axes import PAD_FIELD, build_extent_expression, compute_extent
from ckpt_tools.recipes.moves import GroupPlace, Indices, LineMoves, list_indexed_variables
from ckpt_tools.recipes.recipe import LineDirection, Recipe, RecipeLine, TensorPattern
from ckpt_tools.recipes.sizes import SizeEquation, SizeValues, solve_equations
from ckpt_tools.recipes.tables import MoveTable


@dataclass(frozen=True, slots=True, eq=False)
class TensorGroup:
    """Tensors of one line whose shared variables have the same values: they become each other. ``source_names`` are the
    names before, by place; ``target_names`` those after. ``moves`` is how elements move, None for a renaming, with
    ``move_tables`` of each source."""

    line_number: int
    line: RecipeLine
    variable_values: dict[str, str]
    source_names: dict[GroupPlace, str]
    target_names: Mapping[GroupPlace, str] = field(default_factory=dict)
    moves: LineMoves | None = None
    move_tables: Mapping[GroupPlace, MoveTable] = field(default_factory=dict)

    @property
    def first_source_name(self) -> str:
        return next(iter(self.source_names.values()))


@dataclass(frozen=True)
class NameGroups:
    """Names of a checkpoint as a recipe divides them: groups that are mapped, names that stay, and names that are
    dropped."""

    groups: tuple[TensorGroup, ...]
    kept_names: frozenset[str]
    dropped_names: tuple[str, ...]

    @cached_property
    def group_by_name(self) -> Mapping[str, TensorGroup]:
        return {
            name: group for group in self.groups if not group.line.is_state_only for name in group.source_names.values()
        }

    @cached_property
    def state_group_by_name(self) -> Mapping[str, TensorGroup]:
        """The group of each name for its optimizer state."""
        of_state = (group for group in self.groups if group.line.is_state_only)
        return {**self.group_by_name, **{name: group for group in of_state for name in group.source_names.values()}}

    def find_group(self, key: StateKey) -> TensorGroup | None:
        return (self.group_by_name if key.slot == WEIGHT else self.state_group_by_name).get(key.fqn)


class LineMatch(NamedTuple):
    """A name that a pattern of the left side of a line has, with the values of its variables."""

    line_number: int
    pattern_number: int
    line: RecipeLine
    pattern: TensorPattern
    values: Mapping[str, str]

    @property
    def precedence(self) -> tuple[bool, int]:
        """Names whose sizes are known before those whose sizes are not; names that count from a size (``{mtp+L}``)
        before plain ones, and these before those of fallback lines."""
        return bool(self.line.unknown_sizes), 0 if self.pattern.name.offset_sizes else 1 + self.line.is_fallback


def group_names(names: Sequence[str], recipe: Recipe, without_weight: Collection[str] = ()) -> NameGroups:
    """Each name with the line that it belongs to. Names ``without_weight`` are those of optimizer state alone.

    Raises:
        UsageError: two lines or none have a name, or a line that is not optional has no name.
    """
    groups: dict[tuple[int, tuple[tuple[str, str], ...]], TensorGroup] = {}
    kept_names, dropped_names, all_names = [], [], frozenset(names)
    for name in names:
        weight_matches = match_lines(name, recipe, all_names)
        state_matches = match_lines(name, recipe, all_names, is_state_only=True)
        for found_once in (weight_matches, state_matches):
            if len(found_once) > 1:
                both = " and ".join(each.pattern.name.text for each in found_once[:2])
                raise UsageError(f"two names of the recipe {recipe.name} match {name}: {both}")
        if recipe.does_drop(name):
            dropped_names.append(name)
            continue
        if not weight_matches and not (state_matches and name in without_weight):
            kept_names.append(name)
        for number, which, line, pattern, values in (*weight_matches, *state_matches):
            if line.unknown_sizes:
                raise UsageError(
                    f"{name} is numbered from {join_names(sorted(line.unknown_sizes))} on by the recipe {recipe.name}, "
                    f"which is not known; name the folder of config.json with {format_option('config')}"
                )
            shared = {variable: value for variable, value in values.items() if variable in line.shared_variables}
            group = groups.setdefault((number, tuple(sorted(shared.items()))), TensorGroup(number, line, shared, {}))
            indices = tuple(int(values[variable]) for variable in list_indexed_variables(pattern))
            group.source_names[which, indices] = name
    _check_required_lines({number for number, _ in groups}, names, recipe)
    _check_kept_names(kept_names, recipe)
    return NameGroups(tuple(groups.values()), frozenset(kept_names), tuple(dropped_names))


def match_lines(name: str, recipe: Recipe, names: Collection[str], *, is_state_only: bool = False) -> list[LineMatch]:
    """The lines that have a name of a checkpoint with ``names``; with ``is_state_only``, those for optimizer state
    alone. Of several those of the highest precedence: ``group_names`` refuses two."""
    line_matches = [
        LineMatch(number, which, line, pattern, values)
        for number, line in enumerate(recipe.lines)
        if line.direction is not LineDirection.BACKWARD and line.is_state_only is is_state_only
        for which, pattern in enumerate(line.left)
        if (values := pattern.name.match_name(name)) is not None
        and (line.required_siblings[0] is None or line.required_siblings[0].fill_variables(values) in names)
    ]
    highest = min((each.precedence for each in line_matches), default=None)
    return [each for each in line_matches if each.precedence == highest]


def is_known_name(name: str, recipe: Recipe, names: Collection[str]) -> bool:
    """Whether the recipe has a line for a name of a checkpoint with ``names``, drops it, or lets it stay."""
    if recipe.does_keep_unmatched or recipe.does_drop(name):
        return True
    return bool(match_lines(name, recipe, names) or match_lines(name, recipe, names, is_state_only=True))


def check_round_trip(group: TensorGroup, inverse_recipe: Recipe, names: Collection[str]) -> None:
    """Raises UsageError if a name that a group becomes is read as another by ``inverse_recipe``, the inverse.
    ``names`` are all names that there are then."""
    for (which, indices), name in group.target_names.items():
        values = group.variable_values | _name_indices(group.line.right[which], indices)
        line_matches = match_lines(name, inverse_recipe, names, is_state_only=group.line.is_state_only)
        is_same = [each[:2] for each in line_matches] == [(group.line_number, which)]
        # Another spelling is written as the usual one on the way back.
        is_read_back = len(line_matches) == 1 if group.line.direction is LineDirection.FORWARD else is_same
        if not is_read_back or line_matches[0].values != values:
            source, others = group.first_source_name, [each.pattern.name.text for each in line_matches]
            raise UsageError(
                f"{source} becomes {name}, which the recipe {inverse_recipe.name} would not read in the same way on "
                f"the way back (by {join_names(others)}); give {source} a line of its own"
            )
        if inverse_recipe.does_drop(name):
            raise UsageError(f"the recipe {inverse_recipe.name} makes {name}, and drops it on the way back")


def _check_required_lines(matched_lines: Collection[int], names: Sequence[str], recipe: Recipe) -> None:
    number = next(recipe.find_unmatched_lines(matched_lines), None)
    if number is None:
        return
    if _has_required_names(names, recipe.inverse()):
        raise UsageError(
            f"the checkpoint has the names of {recipe.right} already, which the recipe {recipe.name} leads to; "
            f"read it the other way with {format_option('inverse', True)}, or without it"
        )
    pattern = recipe.lines[number].left[0].name
    nearest = find_nearest(pattern.text_without_variables, names)
    advice = f"the nearest name is {nearest[0]}" if nearest else "the checkpoint has no weight"
    raise UsageError(f"{pattern.text} of the recipe {recipe.name} matches no tensor; {advice}")


def _has_required_names(names: Sequence[str], recipe: Recipe) -> bool:
    """True if each pattern of a line that needs names has one."""
    matched_patterns = {
        (number, which)
        for number, line in enumerate(recipe.lines)
        for which, pattern in enumerate(line.left)
        if any(pattern.name.match_name(name) is not None for name in names)
    }
    return recipe.has_required_lines(matched_patterns)


def _check_kept_names(kept_names: Sequence[str], recipe: Recipe) -> None:
    """Raises UsageError if a name has no line and may not stay, or if it is one that lines lead to."""
    if kept_names and not recipe.does_keep_unmatched:
        patterns = [pattern.name for line in recipe.lines for pattern in line.left]
        near = find_nearest(kept_names[0], [pattern.text for pattern in patterns])
        raise UsageError(
            f"the recipe {recipe.name} has no line for {join_names(kept_names)}; the nearest is {near[0]}; add one, or "
            f"leave the tensors out with {format_option('exclude')}"
        )
    for name in kept_names:
        for line in recipe.lines:
            if (
                line.direction is not LineDirection.FORWARD
                and not line.is_state_only
                and any(pattern.name.match_name(name) is not None for pattern in line.right)
            ):
                raise UsageError(
                    f"{name} has a name of {recipe.right} already, and the recipe {recipe.name} leads there from "
                    f"{line.left[0].name.text}; read it the other way with {format_option('inverse', True)}, or take "
                    "one of the two out of the checkpoint"
                )


def bind_sizes(group: TensorGroup, shapes: Mapping[str, Shape], env: SizeValues) -> SizeValues:
    """``env`` with the variables that names and shapes of a group's tensors give.

    Raises:
        IncompleteError: a tensor is missing. UsageError: a shape does not fit.
    """
    bound_before, env = env, {**env, **_count_indices(group, env)}
    line = group.line
    patterns_and_names = [(line.left[slot[0]], name) for slot, name in group.source_names.items()]
    for pattern, name in patterns_and_names:
        if len(pattern.axes or ()) != len(shapes[name]):
            axes = format_count(len(pattern.axes or ()), "axis", "axes")
            raise UsageError(f"{name} has the shape {list(shapes[name])}, and the recipe gives it {axes}")
    equations = [
        SizeEquation(build_extent_expression(axis), size, name)
        for pattern, name in dict(patterns_and_names).items()
        for axis, size in zip(pattern.axes or (), shapes[name], strict=True)
    ]
    env = solve_equations(equations, env)
    if PAD_FIELD in line.size_variables - env.keys():
        # The target's padding is not known, or the source's vocabulary is not: then there is none.
        env = solve_equations(equations, {**env, PAD_FIELD: 0})
    for pattern, name in patterns_and_names:
        expected_shape = tuple(compute_extent(axis, env, name) for axis in pattern.axes or ())
        if expected_shape != shapes[name]:
            used_variables = sorted({v for axis in pattern.axes or () for v in build_extent_expression(axis).variables})
            sizes = ", ".join(f"{each} = {env[each]}" for each in used_variables)
            by_recipe = ", ".join(each for each in used_variables if each in bound_before)
            raise UsageError(
                f"{name} has the shape {list(shapes[name])}, and by the recipe it would be {list(expected_shape)}"
                f"{f' with {sizes}' if sizes else ''}{f'; [sizes] binds {by_recipe}' if by_recipe else ''}"
            )
    return env


def _count_indices(group: TensorGroup, env: SizeValues) -> dict[str, int]:
    """The number of each index, counted from the names of the group. Raises IncompleteError if a name is missing."""
    line, counts = group.line, dict[str, int]()
    for (which, indices), _ in group.source_names.items():
        for variable, value in zip(list_indexed_variables(line.left[which]), indices, strict=True):
            counts[variable] = max(counts.get(variable, env.get(variable, 0)), value + 1)
    extents = [[counts[variable] for variable in list_indexed_variables(pattern)] for pattern in line.left]
    num_missing = sum(map(prod, extents)) - len(group.source_names)
    if num_missing:
        missing_names = (
            _fill_pattern(pattern, group.variable_values, indices)
            for which, pattern in enumerate(line.left)
            for indices in _iter_indices(extents[which])
            if (which, indices) not in group.source_names
        )
        first = list(islice(missing_names, MAX_LISTED_NAMES))
        more = f" and {num_missing - len(first):,} more" if num_missing > len(first) else ""
        known = [f"{name} = {number:,}" for name, number in counts.items()]
        why = f" ({', '.join(known)})" if known else ""
        raise IncompleteError(
            f"the checkpoint has {join_names(list(group.source_names.values()), 2)}, and lacks "
            f"{', '.join(first)}{more}{why}; a part of a model cannot be mapped"
        )
    return counts


def _iter_indices(extents: Sequence[int]) -> Iterator[Indices]:
    """Index tuples in the order of ``product``, made one by one: a name or ``config.json`` may ask for a trillion."""
    if not extents:
        yield ()
        return
    yield from ((first, *rest) for first in range(extents[0]) for rest in _iter_indices(extents[1:]))


def _fill_pattern(pattern: TensorPattern, values: dict[str, str], indices: Indices) -> str:
    return pattern.name.fill_variables(values | _name_indices(pattern, indices))


def _name_indices(pattern: TensorPattern, indices: Indices) -> dict[str, str]:
    """The values of a pattern's numbered variables."""
    return dict(zip(list_indexed_variables(pattern), map(str, indices), strict=True))


def list_target_names(group: TensorGroup, env: SizeValues) -> dict[GroupPlace, str]:
    """The names that a group's tensors become, by place: all of index 0, then of 1, as in a stacked tensor.
    Patterns of shapes need the counts of ``env``."""
    name_by_place = {
        (which, indices): _fill_pattern(pattern, group.variable_values, indices)
        for which, pattern in enumerate(group.line.right)
        for indices in product(*(range(env[variable]) for variable in list_indexed_variables(pattern)))
    }
    return dict(sorted(name_by_place.items(), key=lambda each: each[0][1]))


def choose_form(recipe: Recipe, names: Sequence[str]) -> Recipe:
    """The form whose left side has the most of ``names``. If the right side is the one with stacked layers, it is the
    stacked one where all layers have the same tensors, as Megatron-Core stores them.

    Source: Megatron-Core 0.16.1, ``transformer/transformer_block.py``, ``sharded_state_dict``.
    """
    if not recipe.stacked_lines:
        return recipe
    single, stacked = recipe.list_forms()
    all_names = frozenset(names)
    if _is_stacked_on_left(recipe):
        return max((single, stacked), key=lambda form: sum(bool(match_lines(name, form, all_names)) for name in names))
    return stacked if _has_same_tensors_in_layers(single, stacked, names) else single


def _is_stacked_on_left(recipe: Recipe) -> bool:
    """True if the left side is the one whose names lack the layer when stacked."""
    return any(
        [each.name.text for each in one.left] != [each.name.text for each in other.left]
        for one, other in zip(recipe.lines, recipe.stacked_lines, strict=True)
    )


def _has_same_tensors_in_layers(single: Recipe, stacked: Recipe, names: Collection[str]) -> bool:
    """True if each line of layers has the same ones."""
    all_names, layers_by_line = frozenset(names), dict[int, set[str]]()
    for name in names:
        for each in match_lines(name, single, all_names):
            for variable in each.line.shared_variables - stacked.lines[each.line_number].shared_variables:
                layers_by_line.setdefault(each.line_number, set()).add(each.values[variable])
    layers = list(layers_by_line.values())
    return all(each == layers[0] for each in layers[1:])
