"""A manifest as the names of a DCP. Pure.

DCP flattens the tree that a user saves into names joined by dots, each a tensor or an object: dicts are always taken
apart, lists only where they hold dicts or tensors, empty ones vanish (torch 2.15.0, checkpoint/_traverse.py,
``traverse_state_dict``). The tree is ``{"app": {"model", "optim", ...}}`` with the user's entries beside model and
optimizer, the one that the source had if that was a DCP, or the bare model's names where there is a model alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tools.core.literals import read_literal_number
from ckpt_tools.core.manifest import (
    WEIGHT,
    Kind,
    Manifest,
    ParamGroup,
    StateKey,
    StateTree,
    TensorRef,
    TreePath,
    join_path,
)
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.value_refs import has_tensors, is_tree, iter_tensor_refs
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.messages.wording import format_count
from ckpt_tools.state_tree.from_deepspeed import (
    collect_user_entries,
    convert_group_for_torch,
    has_decoupled_decay,
)

APP_TREE = StateTree(("app", "model"), ("app", "optim"))
"""What the FSDP2 recipes of torch use: one Stateful, saved as ``app``."""

MAX_ENTRIES = 10_000_000
"""Names of one checkpoint; dicts that share their values could describe any number of them."""


def choose_tree(manifest: Manifest, *, model_key: str | None, optim_key: str | None) -> StateTree:
    """Tree of a DCP of ``manifest``: a given key wins over the source's own place."""
    tree = manifest.tree if manifest.format == "dcp" else None
    if is_model_only(manifest) and (tree is None or tree.optim is not None or tree.extras):
        tree = StateTree((), None)
    tree = tree or APP_TREE
    if model_key is not None and join_path(tree.model) != model_key:
        model = tuple(model_key.split(".")) if model_key else ()
        tree = StateTree(model, (*model[:-1], "optim"), tree.is_flattened)
    if optim_key is not None and (tree.optim is None or join_path(tree.optim) != optim_key):
        tree = replace(tree, optim=tuple(optim_key.split(".")) if optim_key else ())
    return tree


def is_model_only(manifest: Manifest) -> bool:
    """True if there are only weights and buffers."""
    return not manifest.groups and not manifest.extra and not manifest.select_kinds(Kind.STATE)


@dataclass(frozen=True, slots=True)
class Entries:
    """Every name of a DCP with its path in the tree, and its tensor or object.

    ``tensors`` names tensors of the manifest, ``aliases`` maps the names of ties to the names that own the bytes.
    ``tree`` has the places of model and optimizer, where there is a tree.
    """

    paths: Mapping[str, TreePath]
    tensors: Mapping[str, StateKey]
    aliases: Mapping[str, str]
    objects: Mapping[str, Any]
    notes: tuple[Note, ...]
    tree: StateTree | None = None


def entries_of(manifest: Manifest, tree: StateTree, *, whole_values: bool = False) -> Entries:
    """The names of ``manifest`` in ``tree``; with ``whole_values`` those of ``Manifest.values`` are one entry each, and
    dicts that are empty or have other keys than texts, as in a pickle.

    Raises:
        UnsupportedError: two entries would have one name, or there are too many.
    """
    entries = _EntryCollector(manifest, tree, whole_values)
    entries.add_model()
    entries.add_optimizer()
    entries.add_values()
    entries.add_extras()
    notes = (*entries.notes, *entries.note_unused_tensors())
    return Entries(entries.paths, entries.tensors, entries.aliases, entries.objects, notes, tree)


@dataclass(slots=True)
class _EntryCollector:
    # (*tree.model, fqn)                             weights                 add_model
    # (*tree.optim, "state", fqn, slot)              optimizer state         add_optimizer, add_values
    # (*tree.optim, "param_groups", number, option)  hyperparameters         add_optimizer
    # (*tree.model[:-1], name, ...)                  the user's own entries  add_extras, or where the source had them
    # Each path goes through _register_path, which numbers parameters if the tree does, and refuses a taken name.
    manifest: Manifest
    tree: StateTree
    whole_values: bool
    paths: dict[str, TreePath] = field(default_factory=dict)
    tensors: dict[str, StateKey] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    numbers: dict[str, int] = field(init=False)
    """The number of each parameter by name; empty unless the optimizer of the tree numbers them."""

    def __post_init__(self) -> None:
        names = (name for group in self.manifest.groups for name in group.params)
        self.numbers = dict(zip(names, self.tree.numbers, strict=False))

    def add_model(self) -> None:
        names = {}
        for key, entry in self.manifest.tensors.items():
            if entry.kind in (Kind.PARAMETER, Kind.BUFFER):
                names[key.fqn] = self._add_tensor((*self.tree.model, key.fqn), key)
        for alias, owner in self.manifest.aliases.items():
            self.aliases[self._register_path((*self.tree.model, alias))] = names[owner]

    def add_optimizer(self) -> None:
        keys_in_values = {ref.key for ref in iter_tensor_refs(list(self.manifest.values.values()))}
        for key in self.manifest.select_kinds(Kind.STATE):
            if key not in keys_in_values:
                self._add_state(self._state_path(key), key)
        self._add_empty_state()
        for number, group in enumerate(self.manifest.groups):
            if self.manifest.tree is None:
                options, notes = convert_group_for_torch(
                    group.options, number, has_decoupled_decay(self.manifest.extra)
                )
                group = replace(group, options=options)
                self.notes += notes
            for path, value in self._iter_group_options(number, group):
                self._add_leaves(path, value)

    def _state_path(self, key: StateKey) -> TreePath:
        assert self.tree.optim is not None, "a tree with optimizer state has a place for it"
        slot = key.slot if self.manifest.tree is None else self.manifest.tree.get_slot_name(key.slot)
        if self.tree.is_flattened:
            return (*self.tree.optim, f"state.{key.fqn}.{slot}")
        return (*self.tree.optim, "state", key.fqn, slot)

    def _add_empty_state(self) -> None:
        """State for parameters without elements, which DeepSpeed does not optimize, and which ``dcp.load`` expects.

        It has no elements either: the parameter itself serves for each slot of its shape, and a 0-d slot is that of
        another parameter. No group has these parameters, as torch matches groups by their members.
        """
        if self.manifest.tree is not None or self.numbers:
            return
        state = self.manifest.select_kinds(Kind.STATE)
        names_with_state = {key.fqn for key in state}
        sample_name = next((key.fqn for key, entry in state.items() if not entry.shape), None)
        sample_keys = [key for key in state if key.fqn == sample_name]
        empty_parameters = [key for key, entry in self.manifest.select_kinds(Kind.PARAMETER).items() if not entry.numel]
        empty_parameters = [key for key in empty_parameters if sample_keys and key.fqn not in names_with_state]
        for key in empty_parameters:
            for slot in sample_keys:
                path = self._state_path(StateKey(key.fqn, slot.slot))
                self._add_tensor(path, key if state[slot].shape else slot)
        if empty_parameters:
            what = f"optimizer state of {format_count(len(empty_parameters), 'empty parameter')}"
            self.notes.append(Note(Outcome.DEFAULTED, what, "the source has none", len(empty_parameters)))

    def _iter_group_options(self, number: int, group: ParamGroup) -> Iterator[tuple[TreePath, Any]]:
        assert self.tree.optim is not None, "a tree with groups has a place for them"
        prefix = self.tree.optim
        if self.tree.is_flattened:
            for fqn in group.params:
                yield from (((*prefix, f"param_groups.{fqn}.{name}"), value) for name, value in group.options.items())
        else:
            prefix = (*prefix, "param_groups", number)
            yield (*prefix, "params"), [self.numbers.get(name, name) for name in group.params]
            yield from (((*prefix, name), value) for name, value in group.options.items())

    def add_values(self) -> None:
        for key, value in self.manifest.values.items():
            path = (*self.tree.model, key.fqn) if key.slot == WEIGHT else self._state_path(key)
            if self.whole_values:
                self.objects[self._register_path(path)] = value
            else:
                self._add_leaves(path, value)

    def add_extras(self) -> None:
        parent_path = self.tree.model[:-1]
        has_optimizer = self.manifest.groups or self.manifest.select_kinds(Kind.STATE)
        reserved = (self.tree.model, self.tree.optim if has_optimizer else None)
        extras, notes = collect_user_entries(self.manifest)
        self.notes += notes
        nested_paths = self._find_nested_entries()
        for name, value in extras.items():
            path = self.tree.extras.get(name, nested_paths.get(name, (*parent_path, name)))
            if name in nested_paths and isinstance(value, dict):
                self._add_leaves(path, value)
            elif path in reserved and name not in self.tree.extras:
                self.notes.append(Note(Outcome.DROPPED, name, "the model or the optimizer has this name in the tree"))
            else:
                self._add_leaves(path, value)

    def _find_nested_entries(self) -> dict[str, TreePath]:
        """Entries of the source that are in the mappings of its model or optimizer, and the mappings they belong in."""
        source = self.manifest.tree or StateTree((), None)
        new_parents = {
            home: self.tree.model if home == source.model else self.tree.optim for home in (source.model, source.optim)
        }
        return {
            name: path for name, home in source.extras.items() if home and (path := new_parents.get(home)) is not None
        }

    def _add_leaves(self, path: TreePath, value: Any) -> None:
        for leaf_path, item in iter_leaves(path, value, whole_values=self.whole_values):
            missing_keys = [ref.key for ref in iter_tensor_refs(item) if ref.key not in self.manifest.tensors]
            if missing_keys:
                self.notes.append(Note(Outcome.DROPPED, join_path(leaf_path), "its tensor is not selected", asked=True))
            elif isinstance(item, TensorRef):
                self._add_tensor(leaf_path, item.key)
            elif isinstance(item, _EmptyDictMarker):
                self.notes.append(Note(Outcome.DROPPED, join_path(leaf_path), "a DCP cannot hold an empty dict"))
            else:
                self.objects[self._register_path(leaf_path)] = item

    def _add_state(self, path: TreePath, key: StateKey) -> None:
        """State that a tree kept as a plain number is a plain number again."""
        entry = self.manifest.tensors[key]
        number = None if self.manifest.tree is None else read_literal_number(self.manifest, entry)
        if number is None:
            self._add_tensor(path, key)
        else:
            self.objects[self._register_path(path)] = number

    def _add_tensor(self, path: TreePath, key: StateKey) -> str:
        name = self._register_path(path)
        self.tensors[name] = key
        return name

    def _register_path(self, path: TreePath) -> str:
        state_path = (*(self.tree.optim or ()), "state")
        match path[len(state_path) :] if self.numbers and path[: len(state_path)] == state_path else ():
            case (str(fqn), *slot) if fqn in self.numbers:
                path = (*state_path, str(self.numbers[fqn]), *slot)
        name = join_path(path)
        if name in self.paths:
            raise UnsupportedError(
                f"two entries of the tree would have this name; choose others with {format_option('model_key')}",
                key=name,
            )
        if len(self.paths) == MAX_ENTRIES:
            raise UnsupportedError(f"more than {MAX_ENTRIES:,} entries are too many for a checkpoint")
        self.paths[name] = path
        return name

    def note_unused_tensors(self) -> Iterator[Note]:
        """Tensors that no entry refers to."""
        used_keys = {
            *self.tensors.values(),
            *(ref.key for value in self.objects.values() for ref in iter_tensor_refs(value)),
        }
        for key in self.manifest.select_kinds(Kind.EXTRA):
            if key not in used_keys:
                yield Note(Outcome.DROPPED, str(key), "no entry of the checkpoint refers to it")


class _EmptyDictMarker:
    """Stands for an empty dict among leaves."""


def iter_leaves(path: TreePath, value: Any, *, whole_values: bool = False) -> Iterator[tuple[TreePath, Any]]:
    """The leaves of ``value`` as DCP takes it apart, an empty dict as ``_EmptyDictMarker``; if ``whole_values``, as
    files of torch are taken apart."""
    if whole_values and isinstance(value, dict) and not (is_tree(value) or has_tensors(value)):
        yield path, value
    elif isinstance(value, dict):
        if not value:
            yield path, _EmptyDictMarker()
        for name, item in value.items():
            yield from iter_leaves((*path, str(name)), item, whole_values=whole_values)
    elif isinstance(value, list) and _has_dicts_or_tensors(value, set()):
        for position, item in enumerate(value):
            yield from iter_leaves((*path, position), item, whole_values=whole_values)
    else:
        yield path, value


def _has_dicts_or_tensors(value: list[Any], seen_ids: set[int]) -> bool:
    """Whether a list holds a dict or a tensor, at any depth of lists; one that is shared is looked into once."""
    seen_ids.add(id(value))
    return any(
        isinstance(item, dict | TensorRef)
        or (isinstance(item, list) and id(item) not in seen_ids and _has_dicts_or_tensors(item, seen_ids))
        for item in value
    )
