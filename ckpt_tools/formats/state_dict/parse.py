"""Finds model and optimizer in a tree of state. Pure: paths in, a manifest out.

A DCP and a file of torch.save are trees of the user's own making; each leaf is a tensor or an object.
``get_state_dict`` puts optimizer state at ``(..., "state", fqn, slot)`` and options at ``(..., "param_groups", number,
option)``; torchtitan flattens both into one string, ``state.<fqn>.<slot>``. The model is the mapping whose names the
optimizer knows; without such names, the one that is called a model; else the only possible one. Several possible ones
are refused. Everything outside of model and optimizer is the user's own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.literals import is_number, make_number_table
from ckpt_tools.core.manifest import (
    WEIGHT,
    Kind,
    Manifest,
    ParamGroup,
    StateKey,
    StateTree,
    TensorEntry,
    TensorRef,
    join_path,
)
from ckpt_tools.core.manifest import TreePath as TreePath
from ckpt_tools.core.matching import is_selected
from ckpt_tools.core.names import is_extra_state
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.value_refs import iter_ref_paths, iter_tensor_refs, replace_tensor_refs
from ckpt_tools.core.values import ValueNumbering
from ckpt_tools.core.wording import format_count, join_names
from ckpt_tools.errors import CkptError, MalformedError, UnsupportedError, UsageError
from ckpt_tools.formats.foreign import refuse_non_weights
from ckpt_tools.formats.state_dict.leaf import TensorLeaf
from ckpt_tools.formats.state_dict.masters import rename_master_slots
from ckpt_tools.formats.state_dict.param_numbers import (
    NumberedGroup,
    apply_param_order,
    match_numbers,
    note_assumed_order,
    why_unnamed,
)
from ckpt_tools.serialization.unread_tensors import explain_unreadable
from ckpt_tools.trainers.lightning import TRAINED_WEIGHTS

if TYPE_CHECKING:
    from ckpt_tools.core.name_files import ParamOrder

MODEL_NAMES = ("model", "module", "state_dict", "model_state_dict")
"""Usual names of a model's entry, which decide between mappings that no optimizer knows."""

_AVERAGE_NAME = re.compile(r"(?i)(?:^|[^a-z])(?:ema|swa|shadow|averaged?|avg)(?:[^a-z]|$)")
"""Names that trainers give to a moving average of a model: ``model_ema``, ``params_ema``, ``shadow_params``."""


MAX_SHOWN_CHOICES = 4

MAX_PATH_PARTS = 100
"""Maximum depth of a tree, so that walking it ends."""

MAX_NUMBER_DIGITS = 18
"""Maximum digits of the number of a parameter, as text."""


@dataclass(frozen=True, slots=True)
class WeightRole:
    fqn: str


@dataclass(frozen=True, slots=True)
class StateRole:
    fqn: str
    slot: str


@dataclass(frozen=True, slots=True)
class OptionRole:
    """A hyperparameter of a group, named by its number, or of a parameter, where the saver flattened groups away."""

    owner: int | str
    name: str


@dataclass(frozen=True, slots=True)
class ExtraRole:
    path: TreePath


@dataclass(frozen=True, slots=True)
class ValuePartRole:
    """What lies at ``path`` in a value that is no tensor: of optimizer state, or of ``get_extra_state``."""

    owner: StateKey
    path: TreePath

    @property
    def is_state(self) -> bool:
        return self.owner.slot != WEIGHT


PathRole = WeightRole | StateRole | OptionRole | ExtraRole
LeafRole = PathRole | ValuePartRole


@dataclass(frozen=True, slots=True)
class TreePrefixes:
    """The prefixes under which model and optimizer live; ``optim`` is None where there is no optimizer. ``numbers`` as
    in ``StateTree``."""

    model: TreePath
    optim: TreePath | None
    numbers: tuple[int, ...] = ()


def find_prefixes(
    paths: Mapping[str, TreePath],
    numels: Mapping[str, int],
    *,
    model_key: str | None,
    optim_key: str | None,
    own_names: Collection[str] = (),
    integer_names: Collection[str] = (),
    state: str | None = None,
) -> TreePrefixes:
    """The tree of a checkpoint with leaves at ``paths``. Those with ``numels`` are tensors, and ``integer_names``
    those that are not of floating point. Leaves that are known to be the user's ``own_names`` are ignored. ``state``
    is "model" if weights alone are used, and "all" if the optimizer is used too.

    Raises:
        UsageError: a given key leads nowhere. UnsupportedError: there are several optimizers, or several models.
    """
    # Evidence for the model's place, the strongest first: the user's key; names that the optimizer's state has; the
    # only mapping that can be a model, or that is called one; the largest. A tie between the first kinds is refused.
    model_prefix = None if model_key is None else _resolve_key(model_key, paths, "model_key")
    optim_prefix = None if optim_key is None else _resolve_key(optim_key, paths, "optim_key")
    if own_names:
        paths = {name: path for name, path in paths.items() if name not in own_names}
        numels = {name: numel for name, numel in numels.items() if name not in own_names}
    if optim_key is None:
        optim_prefixes = _find_optim_prefixes(paths.values())
        if len(optim_prefixes) > 1 and state != "model":
            raise UnsupportedError(f"there are several optimizers {describe_choices('optim_key', optim_prefixes)}")
        optim_prefix = optim_prefixes[0] if len(optim_prefixes) == 1 else None
    if model_prefix is not None:
        return TreePrefixes(model_prefix, optim_prefix)
    optimizer_names = {
        place.fqn for path in paths.values() if isinstance(place := _find_optim_role(path, optim_prefix), StateRole)
    }
    found_prefix = _find_model_prefix(paths, numels, optim_prefix, optimizer_names, integer_names)
    twin_prefixes = (
        []
        if state != "all" or optim_prefix is None
        else _find_twins(found_prefix, _group_by_mapping(paths, numels, optim_prefix))
    )
    if twin_prefixes == [TRAINED_WEIGHTS] and "pytorch-lightning_version" in paths:
        return TreePrefixes(TRAINED_WEIGHTS, optim_prefix)
    if twin_prefixes:
        raise UnsupportedError(
            "several models have the same names and shapes, and nothing says which one the optimizer belongs to "
            f"{describe_choices('model_key', [found_prefix, *twin_prefixes])}"
        )
    return TreePrefixes(found_prefix, optim_prefix)


_NumelsByMapping = Mapping[TreePath, Mapping[str | int, int]]
"""Elements of the tensors in each mapping of a tree, by their keys there."""


def _group_by_mapping(
    paths: Mapping[str, TreePath], numels: Mapping[str, int], optim_prefix: TreePath | None
) -> _NumelsByMapping:
    """The tensors outside of the optimizer."""
    numels_by_mapping: defaultdict[TreePath, dict[str | int, int]] = defaultdict(dict)
    for name, numel in numels.items():
        path = paths[name]
        if path and _find_optim_role(path, optim_prefix) is None:
            numels_by_mapping[path[:-1]][path[-1]] = numel
    return numels_by_mapping


def _find_twins(model_prefix: TreePath, mappings: _NumelsByMapping) -> list[TreePath]:
    """The mappings with tensors of the names and sizes of the model's, which are not called an average of it."""
    model_items = mappings.get(model_prefix, {}).items()
    return [
        each
        for each, inside in mappings.items()
        if model_items and each != model_prefix and model_items <= inside.items() and not _is_averaged(each)
    ]


def _is_averaged(prefix: TreePath) -> bool:
    return any(_AVERAGE_NAME.search(str(part)) for part in prefix)


def _resolve_key(key: str, paths: Mapping[str, TreePath], option_name: str) -> TreePath:
    prefixes = {path[:length] for path in paths.values() for length in range(len(path) + 1)}
    for prefix in prefixes:
        if join_path(prefix) == key:
            return prefix
    raise UsageError(f"{format_option(option_name, key)} does not exist in this checkpoint")


def _find_optim_prefixes(paths: Iterable[TreePath]) -> list[TreePath]:
    return list(dict.fromkeys(prefix for path in paths if (prefix := _find_optim_prefix(path)) is not None))


def describe_choices(option_name: str, prefixes: Iterable[TreePath]) -> str:
    """The end of a message that refuses several things: their names, and the options that choose each."""
    names = [join_path(prefix) for prefix in prefixes]
    options = " or ".join(format_option(option_name, name) for name in names[:MAX_SHOWN_CHOICES])
    return f"({join_names(names)}); choose one with {options}"


def _find_optim_prefix(path: TreePath) -> TreePath | None:
    """The path before the first sign of an optimizer, or None."""
    for position, part in enumerate(path):
        if part == "param_groups" and position + 1 < len(path) and isinstance(path[position + 1], int):
            return path[:position]
        if isinstance(part, str) and part.startswith("param_groups.") and position + 1 == len(path):
            return path[:position]
    return None


def _find_model_prefix(
    paths: Mapping[str, TreePath],
    numels: Mapping[str, int],
    optim_prefix: TreePath | None,
    optimizer_names: set[str],
    integer_names: Collection[str],
) -> TreePath:
    """The parent of the names that the optimizer knows best; if it knows none, the one that names or sizes leave."""
    # One mapping has the most names that the optimizer knows: it is the model. Several have: those whose sizes fit the
    # moments best, of these the ones not called an average, of these the ones called a model. Still several: refused.
    mappings = _group_by_mapping(paths, numels, optim_prefix)
    name_hits = {prefix: sum(key in optimizer_names for key in inside) for prefix, inside in mappings.items()}
    most_hits = max(name_hits.values(), default=0)
    candidates = [prefix for prefix in mappings if most_hits and name_hits[prefix] == most_hits]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        fitting_candidates = _keep_best_fitting(candidates, paths, numels, optim_prefix)
        fitting_candidates = [rival for rival in fitting_candidates if not _is_averaged(rival)] or fitting_candidates
        remaining = (
            len(fitting_candidates) > 1 and list(filter(_is_model_name, fitting_candidates))
        ) or fitting_candidates
        if len(remaining) > 1:
            raise UnsupportedError(
                "there are several models whose tensors have the names and shapes that the optimizer knows "
                f"{describe_choices('model_key', remaining)}"
            )
        return remaining[0]
    sizes = {prefix: sum(inside.values()) for prefix, inside in mappings.items()}
    possible_models = _find_possible_models(
        mappings, _find_optim_prefixes(paths.values()), {paths[n] for n in integer_names if n in paths}
    )
    return _choose_by_name(possible_models) or max(
        sizes, key=lambda prefix: (_is_model_name(prefix), sizes[prefix]), default=()
    )


def _is_model_name(prefix: TreePath) -> bool:
    return bool(prefix) and prefix[-1] in MODEL_NAMES


def _find_possible_models(
    mappings: _NumelsByMapping, optim_prefixes: Sequence[TreePath], integer_paths: Collection[TreePath]
) -> list[TreePath]:
    """The mappings that could each be a model: they hold more than single numbers, and none is an optimizer's.

    Tensors at the root are a model where they are the most. Beside another model they are not."""
    weight_mappings = {
        prefix: inside
        for prefix, inside in mappings.items()
        if any(numel > 1 and (*prefix, key) not in integer_paths for key, numel in inside.items())
        and not isinstance(next(iter(inside)), int)
        and not any(prefix[: len(optim)] == optim and prefix != optim for optim in optim_prefixes)
    }
    # A moving average of another mapping has a name that says so, and tensors of the same names and sizes.
    averages = list(filter(_is_averaged, weight_mappings))
    redundant_averages = [
        a
        for a in averages
        if any(b != a and weight_mappings[a].items() <= weight_mappings[b].items() for b in weight_mappings)
    ]
    weight_mappings = {prefix: inside for prefix, inside in weight_mappings.items() if prefix not in redundant_averages}
    root_numel = sum(weight_mappings.pop((), {}).values())
    return (
        []
        if root_numel and root_numel >= max((sum(each.values()) for each in weight_mappings.values()), default=0)
        else list(weight_mappings)
    )


def _choose_by_name(possible_models: list[TreePath]) -> TreePath | None:
    """The model among the mappings that could be one, or the mapping called a model that holds them all; None where
    there is none.

    Raises:
        UnsupportedError: nothing says which one it is.
    """
    named_models = [prefix for prefix in possible_models if _is_model_name(prefix)]
    least_depth = min(map(len, named_models), default=0)
    candidates = [prefix for prefix in named_models if len(prefix) == least_depth] or possible_models
    if len(candidates) < 2:
        return next(iter(candidates), None)
    common_prefix = reduce(_common_prefix, candidates)
    if _is_model_name(common_prefix):
        return common_prefix
    raise UnsupportedError(f"there are several models {describe_choices('model_key', candidates)}")


def _keep_best_fitting(
    candidates: list[TreePath], paths: Mapping[str, TreePath], numels: Mapping[str, int], optim_prefix: TreePath | None
) -> list[TreePath]:
    """Those models whose tensors have as many elements as the optimizer's state of the same name."""
    numel_by_path = {paths[name]: numel for name, numel in numels.items()}
    mismatches: Counter[TreePath] = Counter()
    for path, numel in numel_by_path.items():
        role = _find_optim_role(path, optim_prefix)
        if isinstance(role, StateRole) and role.slot.startswith("exp_avg"):
            for rival in candidates:
                mismatches[rival] += numel_by_path.get((*rival, role.fqn)) != numel
    fewest_mismatches = min(mismatches[rival] for rival in candidates)
    return [rival for rival in candidates if mismatches[rival] == fewest_mismatches]


def find_role(path: TreePath, tree: TreePrefixes, *, is_tensor: bool) -> PathRole:
    """Role of the leaf at ``path``."""
    optim_role = _find_optim_role(path, tree.optim)
    if optim_role is not None:
        return optim_role
    depth = len(tree.model)
    in_model = path[:depth] == tree.model and (len(path) == depth + 1 or (depth > 0 and len(path) > depth))
    return WeightRole(join_path(path[depth:])) if in_model and is_tensor else ExtraRole(path)


def _find_optim_role(path: TreePath, optim_prefix: TreePath | None) -> StateRole | OptionRole | None:
    if optim_prefix is None or path[: len(optim_prefix)] != optim_prefix:
        return None
    match path[len(optim_prefix) :]:
        case ("state", fqn, *slot) if slot:
            return StateRole(str(fqn), join_path(slot))
        case ("param_groups", int(number), *option) if option:
            return OptionRole(number, join_path(option))
        case (str(flat),):
            return _parse_flattened_name(flat)
    return None


def _parse_flattened_name(flat_name: str) -> StateRole | OptionRole | None:
    kind, _, rest = flat_name.partition(".")
    fqn, _, name = rest.rpartition(".")
    if not fqn or kind not in ("state", "param_groups"):
        return None
    return StateRole(fqn, name) if kind == "state" else OptionRole(fqn, name)


@dataclass(frozen=True, slots=True)
class TreeLeaves:
    """A tree of state by its leaves: each has a name of its own and a path, and is a tensor or an object.

    ``inner`` are tensors that objects refer to, ``own_names`` the names of leaves that are the user's, at any path.
    ``is_ordered`` is True if the tensors are in the model's order. ``unread`` has the reason for each leaf that is a
    tensor, or holds one, that cannot be read.
    """

    paths: Mapping[str, TreePath]
    tensors: Mapping[str, TensorLeaf]
    objects: Mapping[str, Any]
    inner: Mapping[StateKey, TensorLeaf] = field(default_factory=dict)
    own_names: frozenset[str] = frozenset()
    is_ordered: bool = True
    unread: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def make_inner_key(name: str, number: int) -> StateKey:
        """The key of the tensor of that number in an object."""
        return StateKey(f"{name}[{number}]", "extra")


def build_manifest(
    leaves: TreeLeaves,
    *,
    format_name: str,
    model_key: str | None,
    optim_key: str | None,
    world_size: int | None = None,
    ties: Mapping[str, str] | None = None,
    param_order: ParamOrder | None = None,
    buffers: Collection[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    state: str | None = None,
) -> Manifest:
    """The tree as a manifest. ``ties`` maps other names of a leaf to it, ``buffers`` are leaves that are known not to
    be parameters. A tensor that cannot be read is left out if ``include`` and ``exclude`` do not choose it.

    Raises:
        FormatError: a tensor's pieces do not cover it, it cannot be read, or there are several optimizers or models.
        UsageError: a key leads nowhere, or the order of parameters does not fit.
    """
    # 1. find the places of model and optimizer         4. a role for each leaf: weight, state, option, value, own entry
    # 2. the optimizer's numbers -> names               5. ties -> aliases of weights, or tensors of their own
    # 3. drop what cannot be read and is not selected   6. numbers -> 0-d tensors; values, the user's entries, groups
    # Names come before a selection by name, roles before what is refused by role.
    numels = {name: int(tensor.shards.numels.sum()) for name, tensor in leaves.tensors.items()}
    numels |= dict.fromkeys(leaves.unread, 1)
    integers = {name for name, tensor in leaves.tensors.items() if not tensor.dtype.is_floating}
    tree = find_prefixes(
        leaves.paths,
        numels,
        model_key=model_key,
        optim_key=optim_key,
        own_names=leaves.own_names,
        integer_names=integers,
        state=state,
    )
    doubt_notes = () if model_key is not None else _note_other_models(leaves, numels, tree, state)
    parameters, has_optimizer = _collect_parameter_shapes(leaves, tree, buffers), tree.optim is not None
    leaves, tree, notes = _name_numbered_parameters(leaves, tree, ties or {}, param_order, parameters)
    del numels, parameters, integers
    leaves, unselected = _drop_unread(leaves, tree, include, exclude)
    roles = {name: _find_leaf_role(name, leaves, tree) for name in leaves.paths}
    refuse_non_weights(join_path(leaves.paths[name]) for name, where in roles.items() if isinstance(where, WeightRole))
    aliases, duplicate_leaves = _split_ties(ties or {}, roles)
    number_tables = {
        name: make_number_table(leaves.objects[name], name)
        for name in leaves.objects
        if isinstance(roles[name], StateRole)
    }
    extra_leaves = {name: leaves.tensors[owner] for name, owner in duplicate_leaves.items()}
    extra_leaves |= {name: TensorLeaf((), table.dtype, table) for name, (table, _) in number_tables.items()}
    if extra_leaves:
        leaves = replace(leaves, tensors={**leaves.tensors, **extra_leaves})
    values, leaves = _collect_values(leaves, roles)
    extra, paths_by_entry = _collect_extras(leaves, roles, tree)
    optim_paths = [path for path in leaves.paths.values() if path and path[:-1] == tree.optim]
    is_flattened = any(_parse_flattened_name(str(path[-1])) for path in optim_paths)
    dropped_notes = (
        (Note(Outcome.DROPPED, join_names(sorted(unselected)), "not selected", len(unselected), asked=True),)
        if unselected
        else ()
    )
    manifest = Manifest(
        format_name,
        _build_entries(leaves, roles, buffers),
        aliases=aliases,
        groups=_build_groups(_collect_options(leaves, roles), unselected),
        literals={file: data for _, files in number_tables.values() for file, data in files.items()},
        extra=extra,
        values=values,
        step=next((found for found in iter_step_values(extra) if type(found) is int), None),
        world_size=world_size,
        tree=StateTree(tree.model, tree.optim, is_flattened, paths_by_entry, numbers=tree.numbers),
        notes=(*doubt_notes, *notes, *dropped_notes),
        unreadable_names=unselected,
        unnamed_optimizer=f"{notes[0].what}: {notes[0].why}" if has_optimizer and tree.optim is None else "",
    )
    return rename_master_slots(manifest)


def _drop_unread(
    leaves: TreeLeaves, tree: TreePrefixes, include: Sequence[str], exclude: Sequence[str]
) -> tuple[TreeLeaves, frozenset[str]]:
    """The leaves without the tensors that cannot be read, and the names of these tensors, which are not chosen.

    Raises UnsupportedError for one that is chosen.
    """
    roles = {name: find_role(path, tree, is_tensor=True) for name, path in leaves.paths.items()}
    objects = {
        name: explain_unreadable(v)
        for name, v in leaves.objects.items()
        if isinstance(roles[name], WeightRole | StateRole)
    }
    unread = {**leaves.unread, **{name: reason for name, reason in objects.items() if reason is not None}}
    if not unread:
        return leaves, frozenset()
    # A weight by the model's name, all others by their place in the tree.
    role_and_path = {name: (roles[name], join_path(leaves.paths[name])) for name in unread}
    names = {
        name: place.fqn if isinstance(place, WeightRole) else path for name, (place, path) in role_and_path.items()
    }
    selected = [name for name in unread if _is_leaf_selected(roles[name], names[name], include, exclude)]
    if selected:
        name, reason = names[selected[0]], unread[selected[0]]
        conjunction = ", or" if ";" in reason else ";"  # a reason may say what to do too
        others_text = f" ({format_count(len(selected) - 1, 'more tensor')} cannot be read)" if len(selected) > 1 else ""
        raise UnsupportedError(
            f"{name}: {reason}{conjunction} leave it out with {format_option('exclude', name)}{others_text}", key=name
        )
    dropped_keys = {ref.key for name in unread for ref in iter_tensor_refs(leaves.objects.get(name))}
    kept_leaves = replace(
        leaves,
        paths={name: path for name, path in leaves.paths.items() if name not in unread},
        objects={name: value for name, value in leaves.objects.items() if name not in unread},
        inner={key: leaf for key, leaf in leaves.inner.items() if key not in dropped_keys},
        unread={},
    )
    return kept_leaves, frozenset(names.values())


def _is_leaf_selected(role: PathRole, name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a leaf is chosen; state of the optimizer also goes by its parameter, and the user's own stays unless it
    is excluded."""
    is_parameter_selected = isinstance(role, ExtraRole | OptionRole) or is_selected(role.fqn, include, exclude)
    return is_parameter_selected and is_selected(name, (), exclude)


def _note_other_models(
    leaves: TreeLeaves, numels: Mapping[str, int], tree: TreePrefixes, state: str | None
) -> tuple[Note, ...]:
    """Notes on other mappings that could be meant: with the same tensors, if weights alone are used, and with the name
    of a model, which was passed over for its size alone, as no optimizer knows the parameters of either."""
    tensor_paths = {name: leaves.paths[name] for name in numels if name not in leaves.own_names}
    mappings = _group_by_mapping(tensor_paths, {name: numels[name] for name in tensor_paths}, tree.optim)
    if state == "model" and (twin_prefixes := _find_twins(tree.model, mappings)):
        others = join_names([join_path(twin) for twin in twin_prefixes])
        why = (
            f"the weights are those of {join_path(tree.model)}, and {others} has tensors of the same names; choose with"
        )
        return (
            Note(
                Outcome.KEPT,
                "the model's place in the tree",
                f"{why} {format_option('model_key', join_path(twin_prefixes[0]))}",
            ),
        )
    optim_roles = (_find_optim_role(path, tree.optim) for path in tensor_paths.values())
    knows_names = any(isinstance(place, StateRole) and not place.fqn.isdecimal() for place in optim_roles)
    if knows_names or not _is_model_name(tree.model):
        return ()
    other_models = [other for other in mappings if _is_model_name(other) and other[: len(tree.model)] != tree.model]
    why = f"the model is {join_path(tree.model)}, and this is carried along; choose it with"
    names = sorted(join_path(other) for other in other_models)
    return tuple(
        Note(Outcome.KEPT, f"tensors in {name}", f"{why} {format_option('model_key', name)}") for name in names
    )


def _name_numbered_parameters(
    leaves: TreeLeaves,
    tree: TreePrefixes,
    ties: Mapping[str, str],
    param_order: ParamOrder | None,
    parameters: Mapping[str, Shape],
) -> tuple[TreeLeaves, TreePrefixes, tuple[Note, ...]]:
    """The tree with its optimizer's numbers as names; as the user's own entry, where they could mean several."""
    groups_by_leaf = {} if tree.optim is None else _find_numbered_groups(leaves, tree.optim)
    if tree.optim is None or not groups_by_leaf:
        if param_order is not None:
            raise UsageError(
                f"{format_option('param_order')} is for optimizers that number their parameters; here is none"
            )
        return leaves, tree, ()
    groups, shapes = list(groups_by_leaf.values()), _collect_state_shapes(leaves, tree.optim, parameters)
    mismatch_reason = why_unnamed(groups, shapes, parameters)
    if mismatch_reason is not None and param_order is not None:
        raise UsageError(
            f"{format_option('param_order')} cannot name the parameters of this optimizer: {mismatch_reason}"
        )
    names = _match_numbers_to_names(leaves, tree, groups, shapes, ties, param_order, parameters)
    if names is None or not _collect_state_numbers(leaves, tree.optim) <= names.keys():
        tree_without_optim = replace(tree, optim=None)
        optimizer = (
            str(tree.optim[_count_shared_levels(tree.optim, tree_without_optim)]) if tree.optim else "the optimizer"
        )
        why = "it numbers its parameters, and nothing here proves which ones are meant; give their order with"
        return (
            leaves,
            tree_without_optim,
            (Note(Outcome.KEPT, optimizer, mismatch_reason or f"{why} {format_option('param_order')}"),),
        )
    numbers = tuple(number for group in groups for number in group.numbers)
    notes = () if param_order is not None else note_assumed_order(groups, shapes, parameters)
    return _replace_numbers(leaves, tree.optim, groups_by_leaf, names), replace(tree, numbers=numbers), notes


def is_matched_by_number(leaves: TreeLeaves, tree: TreePrefixes) -> bool:
    """Whether a reader takes the numbers of the tree's optimizer for parameters of its model."""
    groups = [] if tree.optim is None else list(_find_numbered_groups(leaves, tree.optim).values())
    if tree.optim is None or not groups:
        return False
    parameters = _collect_parameter_shapes(leaves, tree, ())
    shapes = _collect_state_shapes(leaves, tree.optim, parameters)
    names = match_numbers(groups, shapes, parameters, is_ordered=leaves.is_ordered)
    return names is not None and _collect_state_numbers(leaves, tree.optim) <= names.keys()


def _match_numbers_to_names(
    leaves: TreeLeaves,
    tree: TreePrefixes,
    groups: list[NumberedGroup],
    shapes: Mapping[int, Shape],
    ties: Mapping[str, str],
    param_order: ParamOrder | None,
    parameters: Mapping[str, Shape],
) -> dict[int, str] | None:
    if param_order is None:
        return match_numbers(groups, shapes, parameters, is_ordered=leaves.is_ordered)
    depth = len(tree.model)
    fqn_by_leaf = {name: join_path(path[depth:]) for name, path in leaves.paths.items()}
    owner_by_alias = {fqn_by_leaf[alias]: fqn_by_leaf[owner] for alias, owner in ties.items()}
    alias_shapes = {alias: parameters[owner] for alias, owner in owner_by_alias.items() if owner in parameters}
    names_by_number = apply_param_order(param_order, groups, shapes, {**alias_shapes, **parameters})
    return {number: owner_by_alias.get(name, name) for number, name in names_by_number.items()}


def _find_numbered_groups(leaves: TreeLeaves, optim_prefix: TreePath) -> dict[str, NumberedGroup]:
    groups_by_number: dict[int, tuple[str, NumberedGroup]] = {}
    objects_by_path = {leaves.paths[name]: (name, value) for name, value in leaves.objects.items()}
    for path, (name, value) in objects_by_path.items():
        match path[len(optim_prefix) :] if path[: len(optim_prefix)] == optim_prefix else ():
            case ("param_groups", int(number), "params") if isinstance(value, list) and {*map(type, value)} == {int}:
                _, names = objects_by_path.get((*path[:-1], "param_names"), ("", None))
                are_names = isinstance(names, list) and all(type(each) is str for each in names)
                groups_by_number[number] = name, NumberedGroup(tuple(value), tuple(names) if are_names else None)
    return dict(groups_by_number[number] for number in sorted(groups_by_number))


def _parse_state_number(path: TreePath, optim_prefix: TreePath) -> int | None:
    """The number of the parameter whose state lies at ``path``; DCP makes text of the numbers."""
    match path[len(optim_prefix) :] if path[: len(optim_prefix)] == optim_prefix else ():
        case ("state", int(number) | str(number), _, *_) if str(number)[: MAX_NUMBER_DIGITS + 1].isdecimal():
            return int(number) if len(str(number)) <= MAX_NUMBER_DIGITS else None
    return None


def _collect_state_numbers(leaves: TreeLeaves, optim_prefix: TreePath) -> set[int]:
    numbers = (_parse_state_number(path, optim_prefix) for path in leaves.paths.values())
    return {number for number in numbers if number is not None}


def _collect_state_shapes(
    leaves: TreeLeaves, optim_prefix: TreePath, parameters: Mapping[str, Shape]
) -> dict[int, Shape]:
    """The one shape that all state of a parameter has but its step. One element, which no parameter has, is none."""
    scalar_shapes = {shape for shape in ((), (1,)) if shape not in parameters.values()}
    shapes_by_number: defaultdict[int, set[Shape]] = defaultdict(set)
    for name, tensor in leaves.tensors.items():
        path = leaves.paths[name]
        number = _parse_state_number(path, optim_prefix)
        if number is not None and len(path) == len(optim_prefix) + 3 and path[-1] != "step":
            shapes_by_number[number].add(tensor.shape)
    return {
        n: next(iter(shapes))
        for n, shapes in shapes_by_number.items()
        if len(shapes) == 1 and not shapes <= scalar_shapes
    }


def _collect_parameter_shapes(leaves: TreeLeaves, tree: TreePrefixes, buffers: Collection[str]) -> dict[str, Shape]:
    shapes = {}
    for name, tensor in leaves.tensors.items():
        role = find_role(leaves.paths[name], tree, is_tensor=True)
        if isinstance(role, WeightRole) and tensor.dtype.is_floating and name not in buffers:
            shapes[role.fqn] = tensor.shape
    return shapes


def _replace_numbers(
    leaves: TreeLeaves, optim_prefix: TreePath, groups: Mapping[str, NumberedGroup], names_by_number: Mapping[int, str]
) -> TreeLeaves:
    paths = dict(leaves.paths)
    for name, path in leaves.paths.items():
        number = _parse_state_number(path, optim_prefix)
        if number is not None:
            paths[name] = (*optim_prefix, "state", names_by_number[number], *path[len(optim_prefix) + 2 :])
    params_by_leaf = {name: [names_by_number[number] for number in group.numbers] for name, group in groups.items()}
    return replace(leaves, paths=paths, objects={**leaves.objects, **params_by_leaf})


def _find_leaf_role(name: str, leaves: TreeLeaves, tree: TreePrefixes) -> LeafRole:
    """Role of a leaf."""
    path, is_tensor = leaves.paths[name], name not in leaves.objects
    if name in leaves.own_names:
        return ExtraRole(path)
    role = find_role(path, tree, is_tensor=is_tensor)
    if isinstance(role, StateRole):
        is_plain = is_tensor or is_number(leaves.objects[name])
        depth = len(tree.optim or ()) + 3
        if len(path) > depth or not is_plain:
            owner = role if len(path) <= depth else StateRole(role.fqn, str(path[depth - 1]))
            return ValuePartRole(StateKey(owner.fqn, owner.slot), path[depth:])
    elif not isinstance(role, OptionRole) and path[: len(tree.model)] == tree.model:
        path_in_model = path[len(tree.model) :]
        value_depth = next((number for number, part in enumerate(path_in_model, 1) if is_extra_state(part)), 0)
        if value_depth and (value_depth < len(path_in_model) or not is_tensor):
            return ValuePartRole(StateKey(join_path(path_in_model[:value_depth])), path_in_model[value_depth:])
    return role


def _collect_values(leaves: TreeLeaves, roles: Mapping[str, LeafRole]) -> tuple[dict[StateKey, Any], TreeLeaves]:
    """The values that are no tensors, whole, and the leaves whose tensors inside them have names by their places."""
    values: dict[StateKey, Any] = {}
    for name, role in roles.items():
        if isinstance(role, ValuePartRole):
            tensor = leaves.tensors.get(name)
            value = leaves.objects.get(name) if tensor is None else TensorRef(_make_key(role, tensor)[0])
            if role.path:
                _insert_value(values.setdefault(role.owner, _TreeLevel()), role.path, value)
            else:
                values[role.owner] = value
    inner = dict(leaves.inner)
    for owner, value in values.items():
        value = _restore_lists(value)
        names = {ref: TensorRef(_make_value_key(owner, place)) for place, ref in iter_ref_paths(value)}
        inner.update({new.key: inner.pop(old.key) for old, new in names.items() if old.key in inner})
        values[owner] = replace_tensor_refs(value, names.__getitem__)
    return values, replace(leaves, inner=inner)


def _make_value_key(owner: StateKey, path_in_value: str) -> StateKey:
    """The key of a tensor inside a value."""
    if owner.slot != WEIGHT:
        return StateKey(owner.fqn, f"{owner.slot}.{path_in_value}")
    return StateKey(f"{owner.fqn}.{path_in_value}", "extra")


def _collect_options(leaves: TreeLeaves, roles: Mapping[str, LeafRole]) -> dict[OptionRole, Any]:
    """The hyperparameters; one that is a tensor, such as the ``lr`` of a captured graph, as a reference to it."""
    return {
        where: leaves.objects[name] if name in leaves.objects else TensorRef(_make_key(where, leaves.tensors[name])[0])
        for name, where in roles.items()
        if isinstance(where, OptionRole)
    }


def _build_entries(
    leaves: TreeLeaves, roles: Mapping[str, LeafRole], buffers: Collection[str] = ()
) -> dict[StateKey, TensorEntry]:
    entries = {}
    for name, tensor in leaves.tensors.items():
        try:
            key, kind = _make_key(roles[name], tensor)
            kind = Kind.BUFFER if kind is Kind.PARAMETER and name in buffers else kind
            if key in entries:
                raise MalformedError("another entry of the tree is the same tensor")
            entries[key] = tensor.make_entry(kind)
        except CkptError as error:
            raise type(error)(error.message, path=error.path, key=name) from error
    for key, tensor in leaves.inner.items():
        if key in entries:
            raise MalformedError("another entry of the tree has the name of this tensor", key=str(key))
        entries[key] = tensor.make_entry(Kind.EXTRA if key.slot == "extra" else Kind.STATE)
    return entries


def _make_key(role: LeafRole, tensor: TensorLeaf) -> tuple[StateKey, Kind]:
    match role:
        case WeightRole(fqn):
            is_parameter = tensor.dtype.is_floating and not is_extra_state(fqn)
            return StateKey(fqn), Kind.PARAMETER if is_parameter else Kind.BUFFER
        case StateRole(fqn, slot):
            return StateKey(fqn, slot), Kind.STATE
        case OptionRole(owner, name):
            return StateKey(f"param_groups.{owner}", name), Kind.EXTRA
        case ExtraRole(path):
            return StateKey(join_path(path), "extra"), Kind.EXTRA
        case ValuePartRole(owner, path):
            return _make_value_key(owner, join_path(path)), Kind.STATE if role.is_state else Kind.EXTRA


def _split_ties(ties: Mapping[str, str], roles: Mapping[str, LeafRole]) -> tuple[dict[str, str], dict[str, str]]:
    """Ties between weights, by fqn, and others, by leaf, which become tensors of their own."""
    aliases, duplicates = {}, {}
    for alias, owner in ties.items():
        role_pair = roles[alias], roles[owner]
        if isinstance(role_pair[0], WeightRole) and isinstance(role_pair[1], WeightRole):
            aliases[role_pair[0].fqn] = role_pair[1].fqn
        else:
            duplicates[alias] = owner
    return aliases, duplicates


def _build_groups(options: Mapping[OptionRole, Any], unselected: Collection[str]) -> tuple[ParamGroup, ...]:
    """The optimizer's groups, without parameters that are ``unselected`` out; where options are kept by parameter,
    parameters with the same options are a group."""
    by_owner: defaultdict[int | str, dict[str, Any]] = defaultdict(dict)
    for each, value in options.items():
        by_owner[each.owner][each.name] = value
    options_by_number = {owner: options for owner, options in by_owner.items() if isinstance(owner, int)}
    groups: list[ParamGroup] = []
    for number in sorted(options_by_number):
        params_value = options_by_number[number].pop("params", ())
        params = map(str, params_value if isinstance(params_value, list | tuple) else ())
        groups.append(ParamGroup(tuple(name for name in params if name not in unselected), options_by_number[number]))
    if groups:
        return tuple(groups)
    options_by_param = {str(owner): values for owner, values in by_owner.items() if owner not in unselected}
    members: defaultdict[int, list[str]] = defaultdict(list)
    distinct = ValueNumbering()
    for fqn, values in options_by_param.items():
        members[distinct.get_number(dict(sorted(values.items())))].append(fqn)
    return tuple(ParamGroup(tuple(names), dict(options_by_param[names[0]])) for names in members.values())


def _collect_extras(
    leaves: TreeLeaves, roles: Mapping[str, LeafRole], tree: TreePrefixes
) -> tuple[dict[str, Any], dict[str, TreePath]]:
    """The user's own entries as the tree they were, without the levels that model and optimizer share with them; and
    the path of each name at its top."""
    extra: dict[str, Any] = {}
    paths_by_entry: dict[str, TreePath] = {}
    suffix_counts: Counter[str] = Counter()
    for name, role in roles.items():
        if isinstance(role, ExtraRole):
            depth = _count_shared_levels(role.path, tree)
            entry_path = role.path[: depth + 1]
            path_in_entry = role.path[depth:]
            if paths_by_entry.setdefault(str(path_in_entry[0]), entry_path) != entry_path:
                path_in_entry = (_make_unused_name(join_path(role.path), paths_by_entry, suffix_counts),)
                paths_by_entry[path_in_entry[0]] = role.path
            tensor = leaves.tensors.get(name)
            _insert_value(
                extra,
                path_in_entry,
                leaves.objects.get(name) if tensor is None else TensorRef(_make_key(role, tensor)[0]),
            )
    return {str(name): _restore_lists(value) for name, value in extra.items()}, paths_by_entry


def _count_shared_levels(path: TreePath, tree: TreePrefixes) -> int:
    """Number of levels that the path to a user's entry shares with model and optimizer."""
    shared_prefix = tree.model[:-1] if tree.optim is None else _common_prefix(tree.model, tree.optim)
    return len(shared_prefix) if path[: len(shared_prefix)] == shared_prefix and len(path) > len(shared_prefix) else 0


def _make_unused_name(name: str, used_names: Mapping[str, TreePath], suffix_counts: Counter[str]) -> str:
    """``name``, or with a number behind it; ``suffix_counts`` counts the numbers given, so that none is tried twice."""
    candidate = name
    while candidate in used_names:
        suffix_counts[name] += 1
        candidate = f"{name}'{suffix_counts[name]}"
    return candidate


def _common_prefix(first: TreePath, second: TreePath) -> TreePath:
    different = (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[: next(different, min(len(first), len(second)))]


class _TreeLevel(dict[str | int, Any]):
    """A level of a tree under construction, apart from the dicts that are values of leaves: only levels become lists
    again, if their keys are all of 0 to n - 1."""


def _insert_value(tree: dict[Any, Any], path: TreePath, value: Any) -> None:
    """Put ``value`` at ``path``; where an object stands in the way, the rest of the path is its name."""
    *parents, leaf = path
    for depth, part in enumerate(parents):
        inner = tree.setdefault(part, _TreeLevel())
        if not isinstance(inner, _TreeLevel):
            tree[join_path((*parents[depth:], leaf))] = value
            return
        tree = inner
    tree[leaf] = value


def _restore_lists(value: Any) -> Any:
    """Levels whose keys are all the positions from 0 on were lists."""
    if not isinstance(value, _TreeLevel):
        return value
    children = {part: _restore_lists(item) for part, item in value.items()}
    state = value.get("state")
    if "param_groups" in value and isinstance(state, _TreeLevel):
        # By number, as Optimizer.load_state_dict wants it, and no list.
        children["state"] = {part: _restore_lists(item) for part, item in state.items()}
    if set(children) == set(range(len(children))):
        return [children[position] for position in range(len(children))]
    return {str(part): item for part, item in children.items()}


STEP_NAMES = ("global_step", "global_steps", "step")
"""What training loops call their count of optimizer steps."""


def iter_step_values(extra: Mapping[str, Any]) -> Iterator[Any]:
    """The values that training loops keep under such a name, the likeliest first."""
    nested_dicts = (value for name, value in extra.items() if isinstance(value, dict) and "scheduler" not in name)
    return (found[name] for found in (extra, *nested_dicts) for name in STEP_NAMES if name in found)
