"""Builds the manifest that a recipe makes: new names, and shards that are moved box by box. Pure: no byte is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.casts import CASTABLE, check_cast
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.literals import make_literal_file_name
from ckpt_tools.core.manifest import MASTER, WEIGHT, EqualPair, Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.quantized import is_quantized, rename_companion
from ckpt_tools.core.transforms import note_cast
from ckpt_tools.errors import IncompleteError, UnsupportedError, UsageError
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.recipes.axes import is_rest_axis
from ckpt_tools.recipes.groups import (
    NameGroups,
    TensorGroup,
    bind_sizes,
    check_round_trip,
    list_target_names,
)
from ckpt_tools.recipes.moves import GroupPlace, LineMoves, make_moves
from ckpt_tools.recipes.recipe import Recipe, RecipeLine
from ckpt_tools.recipes.sizes import SizeValues
from ckpt_tools.recipes.tables import MoveTable, ShardBoxes, join_boxes, split_table

ZEROS_FILE = make_literal_file_name("padding")
"""The file of padding. An element of any dtype is read from it over and over."""

MAX_ITEM_BYTES = 16

_MUON_OPTIONS = frozenset({"ns_steps", "ns_coefficients"})
"""Options of torch's Muon that no other optimizer has."""


@dataclass
class ManifestBuilder:
    source: Manifest
    recipe: Recipe
    name_groups: NameGroups
    env: SizeValues
    weight_by_companion: Mapping[str, str]
    """Tensors that follow the quantized weight that needs them: no line has them."""
    equal_pairs: list[EqualPair] = field(default_factory=list)
    num_cropped: dict[str, int] = field(default_factory=dict)
    num_padded: dict[str, int] = field(default_factory=dict)
    cast_entries: dict[tuple[DType, DType], list[TensorEntry]] = field(default_factory=dict)
    _expanded_lines: dict[tuple[int, int], RecipeLine] = field(default_factory=dict)
    _moves_cache: dict[tuple[int, tuple[tuple[str, int], ...]], tuple[LineMoves, Mapping[GroupPlace, MoveTable]]] = (
        field(default_factory=dict)
    )

    def __post_init__(self) -> None:
        shapes = self._find_shapes()
        groups = tuple(self._map_group(group, shapes) for group in self.name_groups.groups)
        self.name_groups = replace(self.name_groups, groups=groups)
        self._check_new_names()
        self.equal_pairs += self._iter_dropped_copies()

    def build_manifest(self) -> Manifest:
        tensors: dict[StateKey, TensorEntry] = {}
        moved_slots, left_out = set[tuple[int, str]](), {*self.name_groups.dropped_names, *self.weight_by_companion}
        for key, entry in self.source.tensors.items():
            group = None if entry.kind is Kind.EXTRA else self.name_groups.find_group(key)
            if group is not None and (id(group), key.slot) not in moved_slots:
                moved_slots.add((id(group), key.slot))
                tensors |= self._move_slot(group, key.slot)
            elif group is None and (entry.kind is Kind.EXTRA or key.fqn not in left_out):
                tensors[key] = entry
        for companion, weight in self.weight_by_companion.items():
            if weight not in self.name_groups.dropped_names:
                tensors[self._rename_companion(companion, weight, tensors)] = self.source.tensors[StateKey(companion)]
        zeros = {ZEROS_FILE: bytes(MAX_ITEM_BYTES)} if self.num_padded else {}
        return replace(
            self.source,
            tensors=tensors,
            aliases=self._rename_aliases(),
            groups=tuple(map(self._map_param_group, self.source.groups)),
            literals={**self.source.literals, **zeros},
            must_equal=(*self.source.must_equal, *self.equal_pairs),
        )

    def _rename_companion(self, companion: str, weight: str, tensors: Collection[StateKey]) -> StateKey:
        """The companion's key beside the new name of its weight. Raises UnsupportedError if that parts them."""
        renamed = self._get_new_name(weight)
        new_companion = rename_companion(companion, weight, renamed)
        if new_companion is None or StateKey(new_companion) in tensors:
            raise UnsupportedError(
                f"{weight} is quantized, and the recipe would part it from {companion} by the name {renamed}; "
                f"dequantize the model with {format_option('dequantize', True)}"
            )
        return StateKey(new_companion)

    def iter_notes(self) -> Iterable[Note]:
        for name in self.name_groups.dropped_names:
            yield Note(Outcome.DROPPED, name, f"the recipe {self.recipe.name} drops it", asked=True)
        for name, number in self.num_cropped.items():
            why = f"padding that {self.recipe.right} does not have"
            yield Note(Outcome.DROPPED, f"{format_count(number, 'element')} of {name}", why, asked=True)
        for name, number in self.num_padded.items():
            why = f"padding of {self.recipe.right}: zeros"
            yield Note(Outcome.DEFAULTED, f"{format_count(number, 'element')} of {name}", why)
        for (before, after), entries in self.cast_entries.items():
            yield note_cast(before, after, entries, f", by the recipe {self.recipe.name}")
        added = [name for name, group in self.name_groups.group_by_name.items() if group.line.plus]
        if added:
            why = "computed in float32 and rounded once: the way back can differ in the last bit"
            yield Note(Outcome.KEPT, f"arithmetic on {format_count(len(added), 'tensor')}", why, len(added))
        has_new_shapes = any(not group.line.is_renaming for group in self.name_groups.groups)
        if has_new_shapes and any(not _MUON_OPTIONS.isdisjoint(group.options) for group in self.source.groups):
            why = "Muon orthogonalizes each tensor as a whole, and tensors of other shapes are updated in another way"
            yield Note(Outcome.KEPT, "optimizer state of Muon", why)

    def _iter_dropped_copies(self) -> Iterable[EqualPair]:
        """Names that are dropped because they repeat another, each with that one. Raises UnsupportedError."""
        for name in self.name_groups.dropped_names if self.recipe.is_inverse else ():
            owners = (owner for pattern, owner in self.recipe.copies.items() if pattern.match_name(name) is not None)
            copy, owner = self.source.tensors.get(StateKey(name)), next(owners, "")
            owner_entry = self.source.tensors.get(StateKey(owner))
            if copy is None or owner_entry is None:
                continue
            if copy.shape != owner_entry.shape or copy.dtype is not owner_entry.dtype:
                raise UnsupportedError(f"{name} is a copy of {owner} by the recipe, and differs in shape or dtype")
            yield EqualPair(f"{name} and {owner}, which it repeats", owner_entry, copy)

    def _find_shapes(self) -> Mapping[str, Shape]:
        """The shape of each weight by name; where the weight is missing, the shape of its optimizer state."""
        shapes: dict[str, Shape] = {}
        for key, entry in self.source.tensors.items():
            if entry.kind is not Kind.EXTRA and (key.slot == WEIGHT or not shapes.get(key.fqn)):
                shapes[key.fqn] = entry.shape
        return {**shapes, **{alias: shapes[owner] for alias, owner in self.source.aliases.items() if owner in shapes}}

    def _map_group(self, group: TensorGroup, shapes: Mapping[str, Shape]) -> TensorGroup:
        """The group with the names that it becomes, and how elements move."""
        if group.line.is_renaming:
            return replace(group, target_names=list_target_names(group, self.env))
        self._check_not_quantized(group)
        tied = next((name for name in group.source_names.values() if name in self.source.aliases), None)
        if tied is not None and len(group.source_names) > 1:
            raise UnsupportedError(
                f"{tied} is tied to {self.source.aliases[tied]}, and the recipe makes one tensor of it and of others"
            )
        group = self._expand_rest_axes(group, shapes)
        line = group.line
        if line.has_name_of_both_sides and not line.size_variables & self.env.keys():
            name = group.first_source_name
            raise UsageError(
                f"{name} has this name in both namings, and no size of the recipe tells which one it is in; name the "
                f"folder of config.json with {format_option('config')}"
            )
        env = bind_sizes(group, shapes, self.env)
        # Moves depend on the line and the sizes, and not on the layer: 80 layers share one entry of the cache.
        key = id(line), tuple(sorted(env.items()))
        if key not in self._moves_cache:
            moves = make_moves(line, env)
            tables = {slot: MoveTable(each, len(moves.source.dims[slot[0]])) for slot, each in moves.by_source.items()}
            self._moves_cache[key] = moves, tables
        line_moves, move_tables = self._moves_cache[key]
        return replace(group, target_names=list_target_names(group, env), moves=line_moves, move_tables=move_tables)

    def _expand_rest_axes(self, group: TensorGroup, shapes: Mapping[str, Shape]) -> TensorGroup:
        """The group whose line has as many axes as its tensors. Raises UsageError if these have different numbers."""
        line = group.line
        if not line.has_rest:
            return group
        rest_counts = {
            len(shapes[name]) - len(line.left[which].axes or ()) + any(map(is_rest_axis, line.left[which].axes or ()))
            for (which, _), name in group.source_names.items()
        }
        if len(rest_counts) > 1 or min(rest_counts) < 0:
            raise UsageError(f"{join_names(list(group.source_names.values()), 2)} have different numbers of axes")
        (number,) = rest_counts
        if (group.line_number, number) not in self._expanded_lines:
            self._expanded_lines[group.line_number, number] = line.with_rest(number)
        return replace(group, line=self._expanded_lines[group.line_number, number])

    @cached_property
    def _quantized_weights(self) -> frozenset[str]:
        return frozenset(self.weight_by_companion.values())

    def _check_not_quantized(self, group: TensorGroup) -> None:
        for name in group.source_names.values():
            entry = self.source.tensors.get(StateKey(name))
            if entry is not None and (name in self._quantized_weights or is_quantized(name, entry.dtype)):
                raise UnsupportedError(
                    f"{name} is quantized ({entry.dtype.value}), and a recipe would part it from its scales; "
                    f"dequantize the model with {format_option('dequantize', True)}"
                )

    def _check_new_names(self) -> None:
        """Raises UsageError if two tensors become one name, or the way back would read a name as another: a recipe can
        be reversed."""
        inverse_recipe = self.recipe.inverse()
        sources: dict[StateKey, str] = {}
        slots_by_group: dict[int, set[str]] = defaultdict(set)
        keys = (key for key, entry in self.source.tensors.items() if entry.kind is not Kind.EXTRA)
        # A tied name has the weight of its owner.
        for key in (*keys, *map(StateKey, self.source.aliases)):
            group = self.name_groups.find_group(key)
            if group is not None:
                slots_by_group[id(group)].add(key.slot)
            elif key.fqn in self.name_groups.kept_names:
                sources[key] = key.fqn
        for group in self.name_groups.groups:
            first = group.first_source_name
            for key in (StateKey(name, s) for name in group.target_names.values() for s in slots_by_group[id(group)]):
                if key in sources:
                    raise UsageError(
                        f"the recipe makes {key} of {sources[key]} and of {first}; names must stay distinct"
                    )
                sources[key] = first
        names = {key.fqn for key in sources}
        for group in self.name_groups.groups:
            check_round_trip(group, inverse_recipe, names)

    def _move_slot(self, group: TensorGroup, slot: str) -> dict[StateKey, TensorEntry]:
        """The tensors that a group's tensors of a slot become."""
        sources, line = self._select_entries(group, slot), group.line
        if group.moves is None:
            return {
                StateKey(group.target_names[place[0], ()], slot): self._apply_line_arithmetic(entry, line, slot)
                for place, entry in sources.items()
            }
        shapes = group.moves.source.shapes
        reshaped_place = next((place for place, entry in sources.items() if entry.shape != shapes[place[0]]), None)
        if reshaped_place is None:
            self._check_elementwise(slot, group.first_source_name)
            return self._place_elements(group, slot, sources)
        if all(entry.shape == () for entry in sources.values()):
            return self._copy_numbers(group, slot, sources)
        name, entry = group.source_names[reshaped_place], sources[reshaped_place]
        raise UnsupportedError(
            f"{slot} of {name} has the shape {list(entry.shape)}, and the weight {list(shapes[reshaped_place[0]])}: it "
            "cannot follow the weight to another shape; convert the weights alone with "
            f"{format_option('state', 'model')}"
        )

    def _check_elementwise(self, slot: str, name: str) -> None:
        """Raises UnsupportedError if a slot has another shape than the weight elsewhere, as a square preconditioner."""
        other = self._reshaped_slots.get(slot)
        if other is not None:
            raise UnsupportedError(
                f"{slot} of {other} has another shape than the weight, so that of {name}, which has the same, is not "
                f"known to follow it element by element; convert the weights alone with "
                f"{format_option('state', 'model')}"
            )

    @cached_property
    def _reshaped_slots(self) -> Mapping[str, str]:
        """Slots that have another shape than the weight, each with the name of such a weight. Numbers are left out."""
        return {
            key.slot: key.fqn
            for key, entry in self.source.tensors.items()
            if entry.kind is not Kind.EXTRA
            and entry.shape
            and (weight := self.source.tensors.get(StateKey(key.fqn))) is not None
            and entry.shape != weight.shape
        }

    def _select_entries(self, group: TensorGroup, slot: str) -> dict[GroupPlace, TensorEntry]:
        """The tensors of a slot by place. A weight that takes part in arithmetic is computed from its fp32 master."""
        entries = {place: self.source.tensors.get(StateKey(name, slot)) for place, name in group.source_names.items()}
        missing_names = [group.source_names[place] for place, entry in entries.items() if entry is None]
        present = {place: entry for place, entry in entries.items() if entry is not None}
        if missing_names and present and not group.line.is_renaming:
            there = next(group.source_names[place] for place in present)
            raise IncompleteError(
                f"{slot} of {join_names(missing_names)} is missing, and that of {there} is there: they become one "
                f"tensor"
            )
        if slot == WEIGHT and group.line.plus:
            masters = {place: self.source.tensors.get(StateKey(group.source_names[place], MASTER)) for place in present}
            present = {
                place: entry
                if (master := masters[place]) is None
                else replace(master, dtype=entry.dtype, kind=entry.kind)
                for place, entry in present.items()
            }
        return present

    def _apply_line_arithmetic(self, entry: TensorEntry, line: RecipeLine, slot: str) -> TensorEntry:
        """The entry with what the line adds to weights, and in the line's dtype."""
        if slot not in (WEIGHT, MASTER):
            return entry
        dtype = line.dtypes[1] if slot == WEIGHT else None
        if dtype in (None, entry.dtype) and not line.plus:
            return entry
        if dtype not in (None, entry.dtype):
            check_cast(entry.shards.dtype, dtype)
            self.cast_entries.setdefault((entry.dtype, dtype), []).append(entry)
        if line.plus and entry.dtype not in CASTABLE:
            raise UnsupportedError(
                f"the recipe adds {line.plus} to {line.left[0].name.text}, which is {entry.dtype.value}"
            )
        return replace(entry, dtype=dtype or entry.dtype, plus=entry.plus + line.plus)

    def _place_elements(
        self, group: TensorGroup, slot: str, sources: Mapping[GroupPlace, TensorEntry]
    ) -> dict[StateKey, TensorEntry]:
        # Each source's shards are split to the line's dims, and each part is sent to its target. Then what each target
        # got is joined, with zeros where no source has elements.
        assert group.moves is not None, "shapes are given"
        moves, line = group.moves, group.line
        parts: dict[GroupPlace, list[tuple[GroupPlace, ShardBoxes]]] = {place: [] for place in group.target_names}
        for place, entry in sources.items():
            split = split_table(entry.shards, entry.shape, moves.source.dims[place[0]])
            for target, boxes in group.move_tables[place].split_by_target(split) if place in group.move_tables else ():
                parts[target].append((place, boxes))
            if slot == WEIGHT and moves.num_cropped.get(place[0]):
                self.num_cropped[group.source_names[place]] = moves.num_cropped[place[0]]
        placed_entries = {}
        for target, name in group.target_names.items():
            fills = moves.fills_by_pattern.get(target[0], ())
            # An empty tensor has no part: then any source tells its dtype and framing.
            used_sources = {place: sources[place] for place, _ in parts[target]} or sources
            prototype = _check_same_storage(used_sources, StateKey(name, slot), group)
            dims, dtype = moves.target.dims[target[0]], prototype.shards.dtype
            table = join_boxes([boxes for _, boxes in parts[target]], fills, dims, dtype, ZEROS_FILE)
            if fills and slot == WEIGHT:
                self.num_padded[name] = sum(fill.numel for fill in fills)
            entry = TensorEntry(moves.target.shapes[target[0]], prototype.dtype, prototype.kind, table, prototype.plus)
            placed_entries[StateKey(name, slot)] = self._apply_line_arithmetic(entry, line, slot)
        return placed_entries

    def _copy_numbers(
        self, group: TensorGroup, slot: str, sources: Mapping[GroupPlace, TensorEntry]
    ) -> dict[StateKey, TensorEntry]:
        """Numbers such as a step: each target gets the one of its sources, which must all be equal."""
        (place, first), *others = sources.items()
        for other, entry in others:
            if not _is_same_range(first, entry):
                one, two = group.source_names[place], group.source_names[other]
                self.equal_pairs.append(
                    EqualPair(f"{slot} of {one} and of {two}, which become one tensor", first, entry)
                )
        return {StateKey(name, slot): first for name in group.target_names.values()}

    def _rename_aliases(self) -> dict[str, str]:
        """Tied names in the new naming. Raises UnsupportedError if a name and its owner become different tensors."""
        dropped_names, new_aliases = frozenset(self.name_groups.dropped_names), dict[str, str]()
        for alias, owner in self.source.aliases.items():
            if alias in dropped_names:
                continue
            if owner in dropped_names:
                raise UnsupportedError(f"the recipe drops {owner}, and {alias} is tied to it; drop both or none")
            if self._get_change(alias) != self._get_change(owner):
                raise UnsupportedError(f"{alias} is tied to {owner}, and the recipe makes different tensors of them")
            new_aliases[self._get_new_name(alias)] = self._get_new_name(owner)
        return new_aliases

    def _get_change(self, name: str) -> tuple[LineMoves | None, int, DType | None]:
        """The changes of a line beside the name: moves of elements, the number added, the dtype."""
        group = self.name_groups.group_by_name.get(name)
        if group is None:
            return None, 0, None
        return group.moves, group.line.plus, group.line.dtypes[1]

    def _get_new_name(self, name: str) -> str:
        group = self.name_groups.group_by_name.get(name)
        return name if group is None else next(iter(group.target_names.values()))

    def _map_param_group(self, group: ParamGroup) -> ParamGroup:
        """The group with the new names, each where its first old one was."""
        params, group_params = dict[str, None](), frozenset(group.params)
        for name in group.params:
            tensor_group = self.name_groups.state_group_by_name.get(name)
            if tensor_group is None:
                params |= {} if name in self.name_groups.dropped_names else {name: None}
                continue
            foreign_params = [each for each in tensor_group.source_names.values() if each not in group_params]
            if foreign_params and not tensor_group.line.is_renaming:
                raise UnsupportedError(
                    f"{name} and {foreign_params[0]} become one tensor, and are in two parameter groups"
                )
            params |= dict.fromkeys(tensor_group.target_names.values())
        return replace(group, params=tuple(params))


def _check_same_storage(
    entries: Mapping[GroupPlace, TensorEntry], target_key: StateKey, group: TensorGroup
) -> TensorEntry:
    """The first of the tensors that become ``target_key``. Raises UnsupportedError if they are not all stored alike: in
    one dtype, one framing, with one addend."""
    get_storage = attrgetter("dtype", "shards.dtype", "shards.framing", "plus")
    first, *others = entries
    prototype = entries[first]
    for place in others:
        entry = entries[place]
        if get_storage(entry) != get_storage(prototype):
            raise UnsupportedError(
                f"{target_key} would be made of {group.source_names[first]} and {group.source_names[place]}, which are "
                f"stored in two ways ({prototype.shards.dtype.value} and {entry.shards.dtype.value})"
            )
    return prototype


def _is_same_range(one: TensorEntry, other: TensorEntry) -> bool:
    return (
        len(one.shards) == len(other.shards) == 1
        and one.shards.get_byte_range(0) == other.shards.get_byte_range(0)
        and one.dtype is other.dtype
    )
