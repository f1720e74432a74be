"""From a manifest in one naming to a manifest in the other. Pure: shards are moved box by box, no byte is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from glob import escape
from typing import Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.casts import CASTABLE, check_cast
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.literals import make_literal_file_name
from ckpt_tools.core.manifest import MASTER, WEIGHT, EqualPair, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.matching import is_selected
from ckpt_tools.core.names import collect_model_names
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.quantized import is_quantized, map_companions, rename_companion
from ckpt_tools.core.ties import make_tied_pair, read_tie_flag
from ckpt_tools.core.transforms import TransformResult, note_cast, reassign_owners, select_tensors
from ckpt_tools.core.wording import format_count, join_names
from ckpt_tools.errors import IncompleteError, UnsupportedError, UsageError
from ckpt_tools.recipes.axes import One, is_rest
from ckpt_tools.recipes.forms import chosen_form
from ckpt_tools.recipes.groups import (
    Group,
    Grouped,
    Slot,
    bound,
    check_way_back,
    group_names,
    is_known,
    matches,
    targets,
)
from ckpt_tools.recipes.moves import Moves, make_moves
from ckpt_tools.recipes.recipe import Line, Recipe
from ckpt_tools.recipes.sizes import Env, from_config
from ckpt_tools.recipes.tables import Boxes, MoveTable, joined, split_table

ZEROS = make_literal_file_name("padding")
"""The file of padding. An element of any dtype is read from it over and over."""

MAX_ITEM_BYTES = 16

_OF_MUON = frozenset({"ns_steps", "ns_coefficients"})
"""Options of torch's Muon that no other optimizer has."""


def apply_recipe(manifest: Manifest, recipe: Recipe, config: Mapping[str, Any] | None) -> TransformResult:
    """The manifest in the names and shapes of ``recipe``'s right side. Sizes come from ``config``, the content of
    ``config.json``, and from shapes. ``must_equal`` of the result has what only the bytes can tell.

    Raises:
        UsageError: the recipe does not fit the checkpoint. IncompleteError: a tensor that it needs is missing.
        UnsupportedError: a tensor cannot follow, such as optimizer state of another shape than its weight.
    """
    # Ties are those of the recipe's right side.
    source = with_ties(manifest, recipe, config) if recipe.is_inverse else manifest
    env = from_config(recipe.bindings, config)
    recipe = chosen_form(recipe.with_sizes(env), _in_order(source))
    source, carried = _without_companions(source, recipe)
    names = _in_order(source)
    without_weight = {name for name in names if StateKey(name) not in source.tensors} - source.aliases.keys()
    maker = _Maker(source, recipe, group_names(names, recipe, without_weight), env, frozenset(carried.values()))
    made, notes = maker.manifest(), tuple(maker.notes())
    if carried:
        made = maker.with_companions(made, manifest, carried)
    return made if recipe.is_inverse else with_ties(made, recipe, config), notes


def _without_companions(manifest: Manifest, recipe: Recipe) -> tuple[Manifest, Mapping[str, str]]:
    """The manifest without the tensors that quantized weights need and no line has, and the names of these, each with
    that of its weight: they follow it."""
    owners = frozenset(manifest.aliases.values())
    needed = {each: weight for each, weight in map_companions(manifest).items() if each not in owners}
    there = frozenset(_in_order(manifest)) if needed else frozenset[str]()
    found = {each: weight for each, weight in needed.items() if not matches(each, recipe, there)}
    tensors = {key: entry for key, entry in manifest.tensors.items() if key.fqn not in found}
    return (replace(manifest, tensors=tensors), found) if found else (manifest, found)


def _in_order(manifest: Manifest) -> list[str]:
    known = collect_model_names(manifest)
    return [*dict.fromkeys(key.fqn for key in manifest.tensors if key.fqn in known), *manifest.aliases]


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A group with its sizes: the names that it becomes by place, and how their elements move; none for a renaming."""

    group: Group
    targets: Mapping[Slot, str]
    moves: Moves | None
    tables: Mapping[Slot, MoveTable]


@dataclass
class _Maker:
    source: Manifest
    recipe: Recipe
    grouped: Grouped
    env: Env
    quantized: frozenset[str] = frozenset()
    """Weights whose scales were taken out of ``source``, to follow them."""
    mapped: dict[int, _Mapped] = field(default_factory=dict)
    equal: list[EqualPair] = field(default_factory=list)
    cropped: dict[str, int] = field(default_factory=dict)
    padded: dict[str, int] = field(default_factory=dict)
    cast: dict[tuple[DType, DType], list[TensorEntry]] = field(default_factory=dict)
    _with_rest: dict[tuple[int, int], Line] = field(default_factory=dict)
    _known: dict[tuple[int, tuple[tuple[str, int], ...]], tuple[Moves, Mapping[Slot, MoveTable]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        shapes = self._shapes()
        for group in self.grouped.groups:
            self.mapped[id(group)] = self._map(group, shapes)
        self._check_names()
        self.equal += self._copies()

    def with_companions(self, made: Manifest, before: Manifest, carried: Mapping[str, str]) -> Manifest:
        """``made`` with the tensors ``carried`` of ``before``, each beside the quantized weight that needs it."""
        tensors = dict(made.tensors)
        for name, weight in carried.items():
            if weight not in self.grouped.dropped:
                renamed = self._new_name(weight)
                beside = rename_companion(name, weight, renamed)
                if beside is None or StateKey(beside) in tensors:
                    raise UnsupportedError(
                        f"{weight} is quantized, and the recipe would part it from {name} by the name {renamed}; "
                        f"dequantize the model with {format_option('dequantize', True)}"
                    )
                tensors[StateKey(beside)] = before.tensors[StateKey(name)]
        return replace(made, tensors=tensors)

    def manifest(self) -> Manifest:
        tensors: dict[StateKey, TensorEntry] = {}
        done, dropped = set[tuple[int, str]](), frozenset(self.grouped.dropped)
        for key, entry in self.source.tensors.items():
            group = None if entry.kind is Kind.EXTRA else self.grouped.group_at(key)
            if group is None:
                if entry.kind is Kind.EXTRA or key.fqn not in dropped:
                    tensors[key] = entry
            elif (id(group), key.slot) not in done:
                done.add((id(group), key.slot))
                tensors |= self._moved(self.mapped[id(group)], key.slot)
        zeros = {ZEROS: bytes(MAX_ITEM_BYTES)} if self.padded else {}
        return replace(
            self.source,
            tensors=tensors,
            aliases=self._aliases(),
            groups=tuple(map(self._param_group, self.source.groups)),
            literals={**self.source.literals, **zeros},
            must_equal=(*self.source.must_equal, *self.equal),
        )

    def notes(self) -> Iterable[Note]:
        for name in self.grouped.dropped:
            yield Note(Outcome.DROPPED, name, f"the recipe {self.recipe.name} drops it", asked=True)
        for name, number in self.cropped.items():
            why = f"padding that {self.recipe.right} does not have"
            yield Note(Outcome.DROPPED, f"{format_count(number, 'element')} of {name}", why, asked=True)
        for name, number in self.padded.items():
            yield Note(
                Outcome.DEFAULTED,
                f"{format_count(number, 'element')} of {name}",
                f"padding of {self.recipe.right}: zeros",
            )
        for (before, after), entries in self.cast.items():
            yield note_cast(before, after, entries, f", by the recipe {self.recipe.name}")
        added = [name for name, group in self.grouped.group_of.items() if group.line.plus]
        if added:
            why = "computed in float32 and rounded once: the way back can differ in the last bit"
            yield Note(Outcome.KEPT, f"arithmetic on {format_count(len(added), 'tensor')}", why, len(added))
        has_new_shapes = any(not group.line.is_renaming for group in self.grouped.groups)
        if has_new_shapes and any(not _OF_MUON.isdisjoint(group.options) for group in self.source.groups):
            why = "Muon orthogonalizes each tensor as a whole, and tensors of other shapes are updated in another way"
            yield Note(Outcome.KEPT, "optimizer state of Muon", why)

    def _copies(self) -> Iterable[EqualPair]:
        """Names that are dropped because they repeat another, each with that one. Raises UnsupportedError."""
        for name in self.grouped.dropped if self.recipe.is_inverse else ():
            owners = (owner for pattern, owner in self.recipe.copies.items() if pattern.match(name) is not None)
            copy, owner = self.source.tensors.get(StateKey(name)), next(owners, "")
            owned = self.source.tensors.get(StateKey(owner))
            if copy is None or owned is None:
                continue
            if copy.shape != owned.shape or copy.dtype is not owned.dtype:
                raise UnsupportedError(f"{name} is a copy of {owner} by the recipe, and differs in shape or dtype")
            yield EqualPair(f"{name} and {owner}, which it repeats", owned, copy)

    def _shapes(self) -> Mapping[str, Shape]:
        """The shape of each weight; of one that is not there, that of its optimizer state."""
        shapes: dict[str, Shape] = {}
        for key, entry in self.source.tensors.items():
            if entry.kind is not Kind.EXTRA and (key.slot == WEIGHT or not shapes.get(key.fqn)):
                shapes[key.fqn] = entry.shape
        return {**shapes, **{alias: shapes[owner] for alias, owner in self.source.aliases.items() if owner in shapes}}

    def _map(self, group: Group, shapes: Mapping[str, Shape]) -> _Mapped:
        if group.line.is_renaming:
            return _Mapped(group, targets(group, self.env), None, {})
        self._check_plain(group)
        tied = next((name for name in group.sources.values() if name in self.source.aliases), None)
        if tied is not None and len(group.sources) > 1:
            raise UnsupportedError(
                f"{tied} is tied to {self.source.aliases[tied]}, and the recipe makes one tensor of it and of others"
            )
        group = self._with_axes(group, shapes)
        line = group.line
        if line.keeps_names and not line.variables & self.env.keys():
            name = next(iter(group.sources.values()))
            raise UsageError(
                f"{name} has this name in both namings, and no size of the recipe tells which one it is in; name the "
                f"folder of config.json with {format_option('config')}"
            )
        env = bound(group, shapes, self.env)
        key = id(line), tuple(sorted(env.items()))
        if key not in self._known:
            moves = make_moves(line, env)
            tables = {
                slot: MoveTable(found, len(moves.source.dims[slot[0]])) for slot, found in moves.by_source.items()
            }
            self._known[key] = moves, tables
        return _Mapped(group, targets(group, env), *self._known[key])

    def _with_axes(self, group: Group, shapes: Mapping[str, Shape]) -> Group:
        """The group whose line has as many axes as its tensors. Raises UsageError if these have different numbers."""
        line = group.line
        if not line.has_rest:
            return group
        numbers = {
            len(shapes[name]) - len(line.left[which].axes or ()) + is_rest((line.left[which].axes or (One(),))[-1])
            for (which, _), name in group.sources.items()
        }
        if len(numbers) > 1 or min(numbers) < 0:
            raise UsageError(f"{join_names(list(group.sources.values()), 2)} have different numbers of axes")
        (number,) = numbers
        if (group.number, number) not in self._with_rest:
            self._with_rest[group.number, number] = line.with_rest(number)
        return replace(group, line=self._with_rest[group.number, number])

    def _check_plain(self, group: Group) -> None:
        for name in group.sources.values():
            entry = self.source.tensors.get(StateKey(name))
            if entry is not None and (name in self.quantized or is_quantized(name, entry.dtype)):
                raise UnsupportedError(
                    f"{name} is quantized ({entry.dtype.value}), and a recipe would part it from its scales; "
                    f"dequantize the model with {format_option('dequantize', True)}"
                )

    def _check_names(self) -> None:
        """Raises UsageError if two tensors become one name, or the way back would read a name as another."""
        back, slots = self.recipe.inverse(), self._slots()
        origin = {StateKey(name, slot): name for name in self.grouped.kept for slot in slots[name, None]}
        for group, mapped in self.mapped.items():
            first = next(iter(mapped.group.sources.values()))
            here = {slot for name in mapped.group.sources.values() for slot in slots[name, group]}
            for key in (StateKey(name, slot) for name in mapped.targets.values() for slot in here):
                if key in origin:
                    raise UsageError(
                        f"the recipe makes {key} of {origin[key]} and of {first}; names must stay distinct"
                    )
                origin[key] = first
        names = {key.fqn for key in origin}
        for mapped in self.mapped.values():
            check_way_back(mapped.group, mapped.targets, back, names)

    def _slots(self) -> Mapping[tuple[str, int | None], set[str]]:
        """The slots of each name that a group has, by name and group; those that stay have None. A tied name has the
        weight of its owner."""
        found: dict[tuple[str, int | None], set[str]] = defaultdict(set)
        keys = (key for key, entry in self.source.tensors.items() if entry.kind is not Kind.EXTRA)
        for key in (*keys, *map(StateKey, self.source.aliases)):
            group = self.grouped.group_at(key)
            found[key.fqn, None if group is None else id(group)].add(key.slot)
        return found

    def _moved(self, mapped: _Mapped, slot: str) -> dict[StateKey, TensorEntry]:
        """The tensors that a group's tensors of a slot become."""
        sources = self._entries(mapped.group, slot)
        line = mapped.group.line
        if mapped.moves is None:
            return {
                StateKey(mapped.targets[place[0], ()], slot): self._as_written(entry, line, slot)
                for place, entry in sources.items()
            }
        shapes = mapped.moves.source.shapes
        odd = next((place for place, entry in sources.items() if entry.shape != shapes[place[0]]), None)
        if odd is None:
            self._check_elementwise(slot, next(iter(mapped.group.sources.values())))
            return self._placed(mapped, slot, sources)
        if all(entry.shape == () for entry in sources.values()):
            return self._copied(mapped, slot, sources)
        name, entry = mapped.group.sources[odd], sources[odd]
        raise UnsupportedError(
            f"{slot} of {name} has the shape {list(entry.shape)}, and the weight {list(shapes[odd[0]])}: it cannot "
            f"follow the weight to another shape; convert the weights alone with {format_option('state', 'model')}"
        )

    def _check_elementwise(self, slot: str, name: str) -> None:
        """Raises UnsupportedError if a slot has another shape than the weight elsewhere, as a square preconditioner."""
        other = self._odd_slots.get(slot)
        if other is not None:
            raise UnsupportedError(
                f"{slot} of {other} has another shape than the weight, so that of {name}, which has the same, is not "
                f"known to follow it element by element; convert the weights alone with "
                f"{format_option('state', 'model')}"
            )

    @cached_property
    def _odd_slots(self) -> Mapping[str, str]:
        """Slots that have another shape than the weight, each with the name of such a weight. Numbers are left out."""
        return {
            key.slot: key.fqn
            for key, entry in self.source.tensors.items()
            if entry.kind is not Kind.EXTRA
            and entry.shape
            and (weight := self.source.tensors.get(StateKey(key.fqn))) is not None
            and entry.shape != weight.shape
        }

    def _entries(self, group: Group, slot: str) -> dict[Slot, TensorEntry]:
        """The tensors of a slot by place. A weight that takes part in arithmetic is computed from its fp32 master."""
        found = {place: self.source.tensors.get(StateKey(name, slot)) for place, name in group.sources.items()}
        lacking = [group.sources[place] for place, entry in found.items() if entry is None]
        present = {place: entry for place, entry in found.items() if entry is not None}
        if lacking and present and not group.line.is_renaming:
            there = next(group.sources[place] for place in present)
            raise IncompleteError(
                f"{slot} of {join_names(lacking)} is missing, and that of {there} is there: they become one tensor"
            )
        if slot == WEIGHT and group.line.plus:
            masters = {place: self.source.tensors.get(StateKey(group.sources[place], MASTER)) for place in present}
            present = {
                place: entry
                if (master := masters[place]) is None
                else replace(master, dtype=entry.dtype, kind=entry.kind)
                for place, entry in present.items()
            }
        return present

    def _as_written(self, entry: TensorEntry, line: Line, slot: str) -> TensorEntry:
        """With what the line adds to weights, and in its dtype."""
        if slot not in (WEIGHT, MASTER):
            return entry
        dtype = line.dtypes[1] if slot == WEIGHT else None
        if dtype in (None, entry.dtype) and not line.plus:
            return entry
        if dtype not in (None, entry.dtype):
            check_cast(entry.shards.dtype, dtype)
            self.cast.setdefault((entry.dtype, dtype), []).append(entry)
        if line.plus and entry.dtype not in CASTABLE:
            raise UnsupportedError(
                f"the recipe adds {line.plus} to {line.left[0].name.text}, which is {entry.dtype.value}"
            )
        return replace(entry, dtype=dtype or entry.dtype, plus=entry.plus + line.plus)

    def _placed(self, mapped: _Mapped, slot: str, sources: Mapping[Slot, TensorEntry]) -> dict[StateKey, TensorEntry]:
        assert mapped.moves is not None, "shapes are given"
        moves, line = mapped.moves, mapped.group.line
        parts: dict[Slot, list[tuple[Slot, Boxes]]] = {place: [] for place in mapped.targets}
        for place, entry in sources.items():
            split = split_table(entry.shards, entry.shape, moves.source.dims[place[0]])
            for target, boxes in mapped.tables[place].parts(split) if place in mapped.tables else ():
                parts[target].append((place, boxes))
            if slot == WEIGHT and moves.cropped.get(place[0]):
                self.cropped[mapped.group.sources[place]] = moves.cropped[place[0]]
        found = {}
        for target, name in mapped.targets.items():
            fills = moves.fills.get(target[0], ())
            used = {place: sources[place] for place, _ in parts[target]} or sources
            like = _one_kind(used, StateKey(name, slot), mapped.group)
            dims, dtype = moves.target.dims[target[0]], like.shards.dtype
            table = joined([boxes for _, boxes in parts[target]], fills, dims, dtype, ZEROS)
            if fills and slot == WEIGHT:
                self.padded[name] = sum(fill.numel for fill in fills)
            entry = TensorEntry(moves.target.shapes[target[0]], like.dtype, like.kind, table, like.plus)
            found[StateKey(name, slot)] = self._as_written(entry, line, slot)
        return found

    def _copied(self, mapped: _Mapped, slot: str, sources: Mapping[Slot, TensorEntry]) -> dict[StateKey, TensorEntry]:
        """Numbers such as a step: each target has that of the tensors that it is made of, which must be the same."""
        (place, first), *others = sources.items()
        for other, entry in others:
            if not _is_same_range(first, entry):
                one, two = mapped.group.sources[place], mapped.group.sources[other]
                self.equal.append(EqualPair(f"{slot} of {one} and of {two}, which become one tensor", first, entry))
        return {StateKey(name, slot): first for name in mapped.targets.values()}

    def _aliases(self) -> dict[str, str]:
        """Tied names in the new naming. Raises UnsupportedError if a name and its owner become different tensors."""
        dropped, found = frozenset(self.grouped.dropped), dict[str, str]()
        for alias, owner in self.source.aliases.items():
            if alias in dropped:
                continue
            if owner in dropped:
                raise UnsupportedError(f"the recipe drops {owner}, and {alias} is tied to it; drop both or none")
            if self._change(alias) != self._change(owner):
                raise UnsupportedError(f"{alias} is tied to {owner}, and the recipe makes different tensors of them")
            found[self._new_name(alias)] = self._new_name(owner)
        return found

    def _change(self, name: str) -> tuple[Moves | None, int, DType | None]:
        """Changes of a line beside the name: how elements move, the number added, the dtype."""
        group = self.grouped.group_of.get(name)
        if group is None:
            return None, 0, None
        return self.mapped[id(group)].moves, group.line.plus, group.line.dtypes[1]

    def _new_name(self, name: str) -> str:
        group = self.grouped.group_of.get(name)
        return name if group is None else next(iter(self.mapped[id(group)].targets.values()))

    def _param_group(self, group: ParamGroup) -> ParamGroup:
        """The group with the new names, each where its first old one was."""
        params, inside = dict[str, None](), frozenset(group.params)
        for name in group.params:
            found = self.grouped.state_group_of.get(name)
            if found is None:
                params |= {} if name in self.grouped.dropped else {name: None}
                continue
            outside = [each for each in found.sources.values() if each not in inside]
            if outside and not found.line.is_renaming:
                raise UnsupportedError(f"{name} and {outside[0]} become one tensor, and are in two parameter groups")
            params |= dict.fromkeys(self.mapped[id(found)].targets.values())
        return replace(group, params=tuple(params))


def _one_kind(entries: Mapping[Slot, TensorEntry], made: StateKey, group: Group) -> TensorEntry:
    """One of the tensors that ``made`` is made of. Raises UnsupportedError if they differ in more than their shards."""
    first, *others = entries
    like = entries[first]
    for place in others:
        entry = entries[place]
        if (entry.dtype, entry.shards.dtype, entry.shards.framing, entry.plus) != (
            like.dtype,
            like.shards.dtype,
            like.shards.framing,
            like.plus,
        ):
            raise UnsupportedError(
                f"{made} would be made of {group.sources[first]} and {group.sources[place]}, which are stored in two "
                f"ways ({like.shards.dtype.value} and {entry.shards.dtype.value})"
            )
    return like


def without_unknown(manifest: Manifest, recipe: Recipe, exclude: tuple[str, ...]) -> TransformResult:
    """The manifest without tensors whose names match a glob of ``exclude`` and are none that ``recipe`` takes."""
    names = _in_order(manifest) if exclude else []
    unknown = frozenset(
        name
        for name in names
        if not is_selected(name, (), exclude) and not any(is_known(name, form, names) for form in recipe.forms())
    )
    if not unknown:
        return manifest, ()
    made, notes = select_tensors(manifest, include=(), exclude=tuple(map(escape, sorted(unknown))))
    return replace(made, unreadable_names=made.unreadable_names | unknown), notes


def _is_same_range(one: TensorEntry, other: TensorEntry) -> bool:
    return (
        len(one.shards) == len(other.shards) == 1
        and one.shards.get_byte_range(0) == other.shards.get_byte_range(0)
        and one.dtype is other.dtype
    )


def with_ties(manifest: Manifest, recipe: Recipe, config: Mapping[str, Any] | None) -> Manifest:
    """The manifest, in the names of the recipe's right side, with its ties, if the configuration of the model says that
    it has them. There the tied name has no bytes of its own; on the way back it is given, since a live model has it,
    unless the left side has no such names.
    """
    if not recipe.tied or not read_tie_flag(config or {}, recipe.tied_by_default):
        return manifest
    manifest = reassign_owners(manifest, lambda name: name not in recipe.tied)
    tensors, aliases, equal = dict(manifest.tensors), dict(manifest.aliases), list(manifest.must_equal)
    for alias, owner in recipe.tied.items():
        weight, owned = tensors.get(StateKey(alias)), tensors.get(StateKey(owner))
        if owned is None or alias in aliases:
            continue
        if weight is not None:
            if weight.shape != owned.shape or weight.dtype is not owned.dtype:
                raise UnsupportedError(f"{alias} and {owner} are tied by config.json, and differ in shape or dtype")
            equal.append(make_tied_pair(f"{alias} and {owner}, which config.json ties", owned, weight))
            state = [key.slot for key in tensors if key.fqn == alias and key.slot != WEIGHT]
            if state:
                raise UnsupportedError(
                    f"{alias} is tied to {owner} by config.json, and has {join_names(state)} of its own"
                )
            del tensors[StateKey(alias)]
        aliases[alias] = owner
    groups = tuple(
        replace(group, params=tuple(dict.fromkeys(aliases.get(name, name) for name in group.params)))
        for group in manifest.groups
    )
    if recipe.is_inverse and not recipe.left_ties:
        aliases = {alias: owner for alias, owner in aliases.items() if alias not in recipe.tied}
    return replace(manifest, tensors=tensors, aliases=aliases, groups=groups, must_equal=tuple(equal))
