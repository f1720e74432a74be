"""Matches names of tensors with the lines of a recipe, and groups the tensors that become each other. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from math import prod

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import WEIGHT, StateKey
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.wording import MAX_LISTED_NAMES, find_nearest, format_count, join_names
from ckpt_tools.errors import IncompleteError, UsageError
from ckpt_tools.recipes.axes import PAD, extent, extent_size
from ckpt_tools.recipes.moves import Indices, numbered
from ckpt_tools.recipes.names import NamePattern
from ckpt_tools.recipes.recipe import Line, Pattern, Recipe, Way
from ckpt_tools.recipes.sizes import Env, Equation, solved

Slot = tuple[int, Indices]
"""A tensor's place in a group: the pattern of its name, and the values of its numbered variables."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Tensors of one line, the ``number``-th, whose shared variables have the same ``values``: they become each other.
    ``sources`` are names by place."""

    number: int
    line: Line
    values: Mapping[str, str]
    sources: dict[Slot, str]


@dataclass(frozen=True)
class Grouped:
    """Names of a checkpoint by what a recipe makes of them: groups, names that stay, and names that are dropped."""

    groups: tuple[Group, ...]
    kept: frozenset[str]
    dropped: tuple[str, ...]

    @cached_property
    def group_of(self) -> Mapping[str, Group]:
        return {name: group for group in self.groups if not group.line.of_state for name in group.sources.values()}

    @cached_property
    def state_group_of(self) -> Mapping[str, Group]:
        """The group of each name for its optimizer state."""
        of_state = (group for group in self.groups if group.line.of_state)
        return {**self.group_of, **{name: group for group in of_state for name in group.sources.values()}}

    def group_at(self, key: StateKey) -> Group | None:
        return (self.group_of if key.slot == WEIGHT else self.state_group_of).get(key.fqn)


def group_names(names: Sequence[str], recipe: Recipe, without_weight: Collection[str] = ()) -> Grouped:
    """Each name with the line that it belongs to. Names ``without_weight`` are those of optimizer state alone.

    Raises:
        UsageError: two lines or none have a name, or a line that is not optional has no name.
    """
    found: dict[tuple[int, tuple[tuple[str, str], ...]], Group] = {}
    kept, dropped, there = [], [], frozenset(names)
    for name in names:
        found_in, of_state = matches(name, recipe, there), matches(name, recipe, there, of_state=True)
        for found_once in (found_in, of_state):
            if len(found_once) > 1:
                both = " and ".join(recipe.lines[number].left[which].name.text for number, which, _ in found_once[:2])
                raise UsageError(f"two names of the recipe {recipe.name} match {name}: {both}")
        if any(pattern.match(name) is not None for pattern in recipe.drops[0]):
            dropped.append(name)
            continue
        if not found_in and not (of_state and name in without_weight):
            kept.append(name)
        for number, which, values in (*found_in, *of_state):
            line = recipe.lines[number]
            if line.unknown:
                raise UsageError(
                    f"{name} is numbered from {join_names(sorted(line.unknown))} on by the recipe {recipe.name}, "
                    f"which is "
                    f"not known; name the folder of config.json with {format_option('config')}"
                )
            pattern = line.left[which]
            shared = {variable: value for variable, value in values.items() if variable in line.shared}
            group = found.setdefault((number, tuple(sorted(shared.items()))), Group(number, line, shared, {}))
            indices = tuple(int(values[variable]) for variable in numbered(pattern))
            group.sources[which, indices] = name
    _check_lines({number for number, _ in found}, names, recipe)
    _check_kept(kept, recipe)
    return Grouped(tuple(found.values()), frozenset(kept), tuple(dropped))


Match = tuple[int, int, Mapping[str, str]]
"""The number of a line, that of one of its patterns, and the values of this pattern's variables."""


def matches(name: str, recipe: Recipe, names: Collection[str], *, of_state: bool = False) -> list[Match]:
    """The lines that have a name of a checkpoint with ``names``; those for optimizer state alone if ``of_state``.
    A line whose names are numbered from a size on goes before others, and one that ``is_otherwise`` after them."""
    found = [
        (number, which, values)
        for number, line in enumerate(recipe.lines)
        if line.way is not Way.BACK and line.of_state is of_state
        for which, pattern in enumerate(line.left)
        if (values := pattern.name.match(name)) is not None
        and (line.beside[0] is None or line.beside[0].filled(values) in names)
    ]
    found = [match for match in found if not recipe.lines[match[0]].unknown] or found
    counted = [match for match in found if recipe.lines[match[0]].left[match[1]].name.offsets]
    return counted or [match for match in found if not recipe.lines[match[0]].is_otherwise] or found


def is_known(name: str, recipe: Recipe, names: Collection[str]) -> bool:
    """Whether the recipe has a line for a name of a checkpoint with ``names``, drops it, or lets it stay."""
    if recipe.keeps_others or any(pattern.match(name) is not None for pattern in recipe.drops[0]):
        return True
    return bool(matches(name, recipe, names) or matches(name, recipe, names, of_state=True))


def check_way_back(group: Group, made: Mapping[Slot, str], back: Recipe, names: Collection[str]) -> None:
    """Raises UsageError if a name that a group becomes is read as another by ``back``, the inverse. ``names`` are all
    names that there are then."""
    for (which, indices), name in made.items():
        values = {**group.values, **dict(zip(numbered(group.line.right[which]), map(str, indices), strict=True))}
        found = matches(name, back, names, of_state=group.line.of_state)
        is_same = [(number, pattern) for number, pattern, _ in found] == [(group.number, which)]
        # Another spelling is written as the usual one on the way back.
        is_one = len(found) == 1 if group.line.way is Way.THERE else is_same
        if not is_one or found[0][2] != values:
            source = next(iter(group.sources.values()))
            others = [back.lines[number].left[pattern].name.text for number, pattern, _ in found]
            raise UsageError(
                f"{source} becomes {name}, which the recipe {back.name} would not read in the same way on the way "
                f"back (by {join_names(others)}); give {source} a line of its own"
            )
        if any(pattern.match(name) is not None for pattern in back.drops[0]):
            raise UsageError(f"the recipe {back.name} makes {name}, and drops it on the way back")


def _check_lines(used: Collection[int], names: Sequence[str], recipe: Recipe) -> None:
    number = next(recipe.lacking(used), None)
    if number is None:
        return
    if _fits(names, recipe.inverse()):
        raise UsageError(
            f"the checkpoint has the names of {recipe.right} already, which the recipe {recipe.name} leads to; "
            f"read it the other way with {format_option('inverse', True)}, or without it"
        )
    text = recipe.lines[number].left[0].name
    raise UsageError(f"{text.text} of the recipe {recipe.name} matches no tensor; {_nearest(text, names)}")


def _fits(names: Sequence[str], recipe: Recipe) -> bool:
    """True if each pattern of a line that needs names has one."""
    there = {
        (number, which)
        for number, line in enumerate(recipe.lines)
        for which, pattern in enumerate(line.left)
        if any(pattern.name.match(name) is not None for name in names)
    }
    return next(recipe.lacking(whole_lines(recipe, there)), None) is None


def whole_lines(recipe: Recipe, there: Collection[tuple[int, int]]) -> frozenset[int]:
    """The numbers of the lines that are whole: ``there`` has each of their patterns, as line and pattern."""
    return frozenset(
        number
        for number, line in enumerate(recipe.lines)
        if all((number, which) in there for which in range(len(line.left)))
    )


def _nearest(pattern: NamePattern, names: Sequence[str]) -> str:
    found = find_nearest(pattern.letters, names)
    return f"the nearest name is {found[0]}" if found else "the checkpoint has no weight"


def _check_kept(kept: Sequence[str], recipe: Recipe) -> None:
    """Raises UsageError if a name has no line and may not stay, or if it is one that lines lead to."""
    if kept and not recipe.keeps_others:
        patterns = [pattern.name for line in recipe.lines for pattern in line.left]
        near = find_nearest(kept[0], [pattern.text for pattern in patterns])
        raise UsageError(
            f"the recipe {recipe.name} has no line for {join_names(kept)}; the nearest is {near[0]}; add one, or leave "
            f"the tensors out with {format_option('exclude')}"
        )
    for name in kept:
        for line in recipe.lines:
            if (
                line.way is not Way.THERE
                and not line.of_state
                and any(pattern.name.match(name) is not None for pattern in line.right)
            ):
                raise UsageError(
                    f"{name} has a name of {recipe.right} already, and the recipe {recipe.name} leads there from "
                    f"{line.left[0].name.text}; read it the other way with {format_option('inverse', True)}, or take "
                    "one of the two out of the checkpoint"
                )


def bound(group: Group, shapes: Mapping[str, Shape], env: Env) -> Env:
    """``env`` with the variables that names and shapes of a group's tensors give.

    Raises:
        IncompleteError: a tensor is missing. UsageError: a shape does not fit.
    """
    bindings, env = env, {**env, **_counted(group, env)}
    line = group.line
    sized = [(line.left[slot[0]], name) for slot, name in group.sources.items()]
    for pattern, name in sized:
        if len(pattern.axes or ()) != len(shapes[name]):
            axes = format_count(len(pattern.axes or ()), "axis", "axes")
            raise UsageError(f"{name} has the shape {list(shapes[name])}, and the recipe gives it {axes}")
    equations = [
        Equation(extent_size(axis), size, name)
        for pattern, name in dict(sized).items()
        for axis, size in zip(pattern.axes or (), shapes[name], strict=True)
    ]
    env = solved(equations, env)
    if PAD in line.variables - env.keys():
        # The target's padding is not known, or the source's vocabulary is not: then there is none.
        env = solved(equations, {**env, PAD: 0})
    for pattern, name in sized:
        wanted = tuple(extent(axis, env, name) for axis in pattern.axes or ())
        if wanted != shapes[name]:
            used = sorted({v for axis in pattern.axes or () for v in extent_size(axis).variables})
            sizes = ", ".join(f"{each} = {env[each]}" for each in used)
            by_recipe = ", ".join(each for each in used if each in bindings)
            raise UsageError(
                f"{name} has the shape {list(shapes[name])}, and by the recipe it would be {list(wanted)}"
                f"{f' with {sizes}' if sizes else ''}{f'; [sizes] binds {by_recipe}' if by_recipe else ''}"
            )
    return env


def _counted(group: Group, env: Env) -> dict[str, int]:
    """The number of each index, by the names that are there. No name may be missing."""
    line, counts = group.line, dict[str, int]()
    for (which, indices), _ in group.sources.items():
        for variable, value in zip(numbered(line.left[which]), indices, strict=True):
            counts[variable] = max(counts.get(variable, 0), value + 1)
    for variable in counts:
        counts[variable] = max(counts[variable], env.get(variable, 0))
    extents = [[counts[variable] for variable in numbered(pattern)] for pattern in line.left]
    num_missing = sum(map(prod, extents)) - len(group.sources)
    if num_missing:
        first = list(islice(_missing(group, extents), MAX_LISTED_NAMES))
        more = f" and {num_missing - len(first):,} more" if num_missing > len(first) else ""
        known = [f"{name} = {number:,}" for name, number in counts.items()]
        why = f" ({', '.join(known)})" if known else ""
        raise IncompleteError(
            f"the checkpoint has {join_names(list(group.sources.values()), 2)}, and lacks "
            f"{', '.join(first)}{more}{why}; "
            "a part of a model cannot be mapped"
        )
    return counts


def _missing(group: Group, extents: Sequence[Sequence[int]]) -> Iterator[str]:
    for which, pattern in enumerate(group.line.left):
        for indices in _all_indices(extents[which]):
            if (which, indices) not in group.sources:
                yield _filled(pattern, group.values, indices)


def _all_indices(extents: Sequence[int]) -> Iterator[Indices]:
    """Index tuples in the order of ``product``, made one by one: a name or ``config.json`` may ask for a trillion."""
    if not extents:
        yield ()
        return
    for first in range(extents[0]):
        for rest in _all_indices(extents[1:]):
            yield (first, *rest)


def _filled(pattern: Pattern, values: Mapping[str, str], indices: Indices) -> str:
    return pattern.name.filled({**values, **dict(zip(numbered(pattern), map(str, indices), strict=True))})


def targets(group: Group, env: Env) -> dict[Slot, str]:
    """The names that a group's tensors become, by place: all of index 0, then of 1, as in a stacked tensor.
    Patterns of shapes need the counts of ``env``."""
    found = {
        (which, indices): _filled(pattern, group.values, indices)
        for which, pattern in enumerate(group.line.right)
        for indices in product(*(range(env[variable]) for variable in numbered(pattern)))
    }
    return dict(sorted(found.items(), key=lambda each: each[0][1]))
