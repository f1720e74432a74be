"""A tree of state as a manifest: roles of leaves, names for numbers, values, groups and the user's entries. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.literals import is_number, make_number_table
from ckpt_tools.core.manifest import (
    EXTRA_SLOT,
    MASTER,
    WEIGHT,
    Kind,
    Manifest,
    ParamGroup,
    StateKey,
    StateTree,
    TensorEntry,
    TensorRef,
    TreePath,
    join_path,
)
from ckpt_tools.core.matching import is_selected
from ckpt_tools.core.names import is_extra_state
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.value_refs import iter_ref_paths, iter_tensor_refs, replace_tensor_refs
from ckpt_tools.core.values import ValueNumbering
from ckpt_tools.errors import CkptError, MalformedError, UnsupportedError, UsageError
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.serialization.unread_tensors import explain_unreadable
from ckpt_tools.state_tree.incomplete_state import refuse_non_weights
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.state_tree.param_numbers import (
    NumberedGroup,
    apply_param_order,
    match_numbers,
    note_assumed_order,
    why_unnamed,
)
from ckpt_tools.state_tree.prefixes import (
    ExtraRole,
    OptionRole,
    PathRole,
    StateRole,
    TreePrefixes,
    WeightRole,
    find_common_prefix,
    find_prefixes,
    find_role,
    note_other_models,
    parse_flattened_name,
)

if TYPE_CHECKING:
    from ckpt_tools.core.name_files import ParamOrder

MAX_NUMBER_DIGITS = 18
"""Maximum digits of the number of a parameter, as text."""


@dataclass(frozen=True, slots=True)
class ValuePartRole:
    """A part, at ``path``, of a value that is not a tensor: of optimizer state, or of ``get_extra_state``."""

    owner: StateKey
    path: TreePath

    @property
    def is_state(self) -> bool:
        return self.owner.slot != WEIGHT


LeafRole = PathRole | ValuePartRole


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
        return StateKey(f"{name}[{number}]", EXTRA_SLOT)


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
    model_numels = {name: numel for name, numel in numels.items() if name not in leaves.own_names}
    doubt_notes = () if model_key is not None else note_other_models(leaves.paths, model_numels, tree, state)
    parameters, has_optimizer = _collect_parameter_shapes(leaves, tree, buffers), tree.optim is not None
    leaves, tree, notes = _name_numbered_parameters(leaves, tree, ties or {}, param_order, parameters)
    del numels, model_numels, parameters, integers
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
    is_flattened = any(parse_flattened_name(str(path[-1])) for path in optim_paths)
    dropped_note = Note(Outcome.DROPPED, join_names(sorted(unselected)), "not selected", len(unselected), asked=True)
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
        notes=(*doubt_notes, *notes, *((dropped_note,) if unselected else ())),
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
        depth = _count_shared_levels(tree.optim, tree_without_optim)
        optimizer = str(tree.optim[depth]) if tree.optim else "the optimizer"
        why = "it numbers its parameters, and nothing here proves which ones are meant; give their order with"
        note = Note(Outcome.KEPT, optimizer, mismatch_reason or f"{why} {format_option('param_order')}")
        return leaves, tree_without_optim, (note,)
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
    """The shape of each parameter by number: that of all its state but the step. A number whose state has several
    shapes is left out, and so is one of single elements, unless a parameter of the model has one element."""
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
    """The values that are not tensors, whole, and the leaves whose tensors inside them have names by their places."""
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
    return StateKey(f"{owner.fqn}.{path_in_value}", EXTRA_SLOT)


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
        entries[key] = tensor.make_entry(Kind.EXTRA if key.slot == EXTRA_SLOT else Kind.STATE)
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
            return StateKey(join_path(path), EXTRA_SLOT), Kind.EXTRA
        case ValuePartRole(owner, path):
            return _make_value_key(owner, join_path(path)), Kind.STATE if role.is_state else Kind.EXTRA


def _split_ties(ties: Mapping[str, str], roles: Mapping[str, LeafRole]) -> tuple[dict[str, str], dict[str, str]]:
    """Ties between weights, by fqn; and all other ties, by leaf, which become tensors of their own."""
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
    shared_prefix = tree.model[:-1] if tree.optim is None else find_common_prefix(tree.model, tree.optim)
    return len(shared_prefix) if path[: len(shared_prefix)] == shared_prefix and len(path) > len(shared_prefix) else 0


def _make_unused_name(name: str, used_names: Mapping[str, TreePath], suffix_counts: Counter[str]) -> str:
    """``name``, or with a number behind it; ``suffix_counts`` counts the numbers given, so that none is tried twice."""
    candidate = name
    while candidate in used_names:
        suffix_counts[name] += 1
        candidate = f"{name}'{suffix_counts[name]}"
    return candidate


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
    """``value`` with lists in place of the levels whose keys are all the positions from 0 on."""
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


_MASTER_SLOTS = frozenset(
    f"{name}{plural}" for name in ("master", "master_param", "master_weight", "fp32_param") for plural in ("", "s")
)
"""Slots of fp32 copies of the parameters in an optimizer's state: ``master_param`` is that of TransformerEngine's
``FusedAdam(master_weights=True)``, ``fp32_param`` that of Megatron-Core."""


def rename_master_slots(manifest: Manifest) -> Manifest:
    """The manifest with its masters in the slot ``MASTER``; its tree keeps the slot's own name."""
    master_keys = [
        key for key in manifest.select_kinds(Kind.STATE) if key.slot in _MASTER_SLOTS and _is_master(manifest, key)
    ]
    if manifest.tree is None or not master_keys:
        return manifest
    slot = master_keys[0].slot
    renamed_keys = {key: StateKey(key.fqn, MASTER) for key in master_keys if key.slot == slot}
    tensors = {renamed_keys.get(key, key): entry for key, entry in manifest.tensors.items()}
    return replace(manifest, tensors=tensors, tree=replace(manifest.tree, masters=slot))


def _is_master(manifest: Manifest, key: StateKey) -> bool:
    state = manifest.tensors[key]
    weight = manifest.tensors.get(StateKey(manifest.aliases.get(key.fqn, key.fqn)))
    return weight is not None and weight.shape == state.shape and state.dtype is DType.FLOAT32
