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
from typing import Any

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
from ckpt_tools.core.param_order import ParamOrder
from ckpt_tools.core.value_refs import iter_ref_paths, iter_tensor_refs, replace_tensor_refs
from ckpt_tools.core.values import ValueNumbering
from ckpt_tools.core.wording import format_count, join_names
from ckpt_tools.errors import CkptError, MalformedError, UnsupportedError, UsageError
from ckpt_tools.formats.foreign import refuse_weights
from ckpt_tools.formats.state_dict.leaf import TensorLeaf
from ckpt_tools.formats.state_dict.masters import with_masters
from ckpt_tools.formats.state_dict.param_numbers import (
    NumberedGroup,
    follow_order,
    match_numbers,
    notes_of_order,
    why_unnamed,
)
from ckpt_tools.serialization.unread_tensors import explain_unreadable
from ckpt_tools.trainers.lightning import TRAINED_WEIGHTS

MODEL_NAMES = ("model", "module", "state_dict", "model_state_dict")
"""Usual names of a model's entry, which decide between mappings that no optimizer knows."""

_AVERAGED = re.compile(r"(?i)(?:^|[^a-z])(?:ema|swa|shadow|averaged?|avg)(?:[^a-z]|$)")
"""Names that trainers give to a moving average of a model: ``model_ema``, ``params_ema``, ``shadow_params``."""


MAX_CHOICES = 4

MAX_PATH_PARTS = 100
"""Maximum depth of a tree, so that walking it ends."""

MAX_NUMBER_DIGITS = 18
"""Maximum digits of the number of a parameter, as text."""


@dataclass(frozen=True, slots=True)
class Weight:
    fqn: str


@dataclass(frozen=True, slots=True)
class State:
    fqn: str
    slot: str


@dataclass(frozen=True, slots=True)
class Option:
    """A hyperparameter of a group, named by its number, or of a parameter, where the saver flattened groups away."""

    owner: int | str
    name: str


@dataclass(frozen=True, slots=True)
class Extra:
    path: TreePath


@dataclass(frozen=True, slots=True)
class PartOfValue:
    """What lies at ``path`` in a value that is no tensor: of optimizer state, or of ``get_extra_state``."""

    owner: StateKey
    path: TreePath

    @property
    def is_state(self) -> bool:
        return self.owner.slot != WEIGHT


PathRole = Weight | State | Option | Extra
LeafRole = PathRole | PartOfValue


@dataclass(frozen=True, slots=True)
class Tree:
    """The prefixes under which model and optimizer live; ``optim`` is None where there is no optimizer. ``numbers`` as
    in ``StateTree``."""

    model: TreePath
    optim: TreePath | None
    numbers: tuple[int, ...] = ()


def find_tree(
    paths: Mapping[str, TreePath],
    numels: Mapping[str, int],
    *,
    model_key: str | None,
    optim_key: str | None,
    own: Collection[str] = (),
    integers: Collection[str] = (),
    state: str | None = None,
) -> Tree:
    """The tree of a checkpoint with leaves at ``paths``. Those with ``numels`` are tensors, and ``integers`` those that
    are not of floating point. Leaves that are known to be the user's ``own`` are ignored. ``state`` is "model" if
    weights alone are used, and "all" if the optimizer is used too.

    Raises:
        UsageError: a given key leads nowhere. UnsupportedError: there are several optimizers, or several models.
    """
    given = None if model_key is None else _given(model_key, paths, "model_key")
    optim = None if optim_key is None else _given(optim_key, paths, "optim_key")
    if own:
        paths = {name: path for name, path in paths.items() if name not in own}
        numels = {name: numel for name, numel in numels.items() if name not in own}
    if optim_key is None:
        found = _optim_prefixes(paths.values())
        if len(found) > 1 and state != "model":
            raise UnsupportedError(f"there are several optimizers {choices('optim_key', found)}")
        optim = found[0] if len(found) == 1 else None
    if given is not None:
        return Tree(given, optim)
    known = {place.fqn for path in paths.values() if isinstance(place := _in_optim(path, optim), State)}
    model = _model_prefix(paths, numels, optim, known, integers)
    twins = [] if state != "all" or optim is None else _twins(model, _by_mapping(paths, numels, optim))
    if twins == [TRAINED_WEIGHTS] and "pytorch-lightning_version" in paths:
        return Tree(TRAINED_WEIGHTS, optim)
    if twins:
        raise UnsupportedError(
            "several models have the same names and shapes, and nothing says which one the optimizer belongs to "
            f"{choices('model_key', [model, *twins])}"
        )
    return Tree(model, optim)


_Mappings = Mapping[TreePath, Mapping[str | int, int]]
"""Elements of the tensors in each mapping of a tree, by their keys there."""


def _by_mapping(paths: Mapping[str, TreePath], numels: Mapping[str, int], optim: TreePath | None) -> _Mappings:
    """The tensors outside of the optimizer."""
    mappings: defaultdict[TreePath, dict[str | int, int]] = defaultdict(dict)
    for name, numel in numels.items():
        path = paths[name]
        if path and _in_optim(path, optim) is None:
            mappings[path[:-1]][path[-1]] = numel
    return mappings


def _twins(model: TreePath, mappings: _Mappings) -> list[TreePath]:
    """The mappings with tensors of the names and sizes of the model's, which are not called an average of it."""
    own = mappings.get(model, {}).items()
    return [
        each
        for each, inside in mappings.items()
        if own and each != model and own <= inside.items() and not _is_averaged(each)
    ]


def _is_averaged(prefix: TreePath) -> bool:
    return any(_AVERAGED.search(str(part)) for part in prefix)


def _given(key: str, paths: Mapping[str, TreePath], name: str) -> TreePath:
    prefixes = {path[:length] for path in paths.values() for length in range(len(path) + 1)}
    for prefix in prefixes:
        if join_path(prefix) == key:
            return prefix
    raise UsageError(f"{format_option(name, key)} does not exist in this checkpoint")


def _optim_prefixes(paths: Iterable[TreePath]) -> list[TreePath]:
    return list(dict.fromkeys(prefix for path in paths if (prefix := _optim_part(path)) is not None))


def choices(key: str, prefixes: Iterable[TreePath]) -> str:
    """The end of a message that refuses several things: their names, and the options that choose each."""
    names = [join_path(prefix) for prefix in prefixes]
    options = " or ".join(format_option(key, name) for name in names[:MAX_CHOICES])
    return f"({join_names(names)}); choose one with {options}"


def _optim_part(path: TreePath) -> TreePath | None:
    """The path before the first sign of an optimizer, or None."""
    for position, part in enumerate(path):
        if part == "param_groups" and position + 1 < len(path) and isinstance(path[position + 1], int):
            return path[:position]
        if isinstance(part, str) and part.startswith("param_groups.") and position + 1 == len(path):
            return path[:position]
    return None


def _model_prefix(
    paths: Mapping[str, TreePath],
    numels: Mapping[str, int],
    optim: TreePath | None,
    known: set[str],
    integers: Collection[str],
) -> TreePath:
    """The parent of the names that the optimizer knows best; if it knows none, the one that names or sizes leave."""
    mappings = _by_mapping(paths, numels, optim)
    hits = {prefix: sum(key in known for key in inside) for prefix, inside in mappings.items()}
    best = max(hits.values(), default=0)
    rivals = [prefix for prefix in mappings if best and hits[prefix] == best]
    if len(rivals) == 1:
        return rivals[0]
    if rivals:
        fitting = _fitting(rivals, paths, numels, optim)
        fitting = [rival for rival in fitting if not _is_averaged(rival)] or fitting
        chosen = (len(fitting) > 1 and list(filter(_is_model_name, fitting))) or fitting
        if len(chosen) > 1:
            raise UnsupportedError(
                "there are several models whose tensors have the names and shapes that the optimizer knows "
                f"{choices('model_key', chosen)}"
            )
        return chosen[0]
    sizes = {prefix: sum(inside.values()) for prefix, inside in mappings.items()}
    models = _possible_models(mappings, _optim_prefixes(paths.values()), {paths[n] for n in integers if n in paths})
    return _by_names(models) or max(sizes, key=lambda prefix: (_is_model_name(prefix), sizes[prefix]), default=())


def _is_model_name(prefix: TreePath) -> bool:
    return bool(prefix) and prefix[-1] in MODEL_NAMES


def _possible_models(mappings: _Mappings, optims: Sequence[TreePath], integers: Collection[TreePath]) -> list[TreePath]:
    """The mappings that could each be a model: they hold more than single numbers, and none is an optimizer's.

    Tensors at the root are a model where they are the most. Beside another model they are not."""
    weights = {
        prefix: inside
        for prefix, inside in mappings.items()
        if any(numel > 1 and (*prefix, key) not in integers for key, numel in inside.items())
        and not isinstance(next(iter(inside)), int)
        and not any(prefix[: len(optim)] == optim and prefix != optim for optim in optims)
    }
    # A moving average of another mapping has a name that says so, and tensors of the same names and sizes.
    averaged = list(filter(_is_averaged, weights))
    same = [a for a in averaged if any(b != a and weights[a].items() <= weights[b].items() for b in weights)]
    weights = {prefix: inside for prefix, inside in weights.items() if prefix not in same}
    root = sum(weights.pop((), {}).values())
    return [] if root and root >= max((sum(each.values()) for each in weights.values()), default=0) else list(weights)


def _by_names(models: list[TreePath]) -> TreePath | None:
    """The model among the mappings that could be one, or the mapping called a model that holds them all; None where
    there is none.

    Raises:
        UnsupportedError: nothing says which one it is.
    """
    named = [prefix for prefix in models if _is_model_name(prefix)]
    highest = min(map(len, named), default=0)
    rivals = [prefix for prefix in named if len(prefix) == highest] or models
    if len(rivals) < 2:
        return next(iter(rivals), None)
    shared = reduce(_common, rivals)
    if _is_model_name(shared):
        return shared
    raise UnsupportedError(f"there are several models {choices('model_key', rivals)}")


def _fitting(
    rivals: list[TreePath], paths: Mapping[str, TreePath], numels: Mapping[str, int], optim: TreePath | None
) -> list[TreePath]:
    """Those models whose tensors have as many elements as the optimizer's state of the same name."""
    by_path = {paths[name]: numel for name, numel in numels.items()}
    wrong: Counter[TreePath] = Counter()
    for path, numel in by_path.items():
        place = _in_optim(path, optim)
        if isinstance(place, State) and place.slot.startswith("exp_avg"):
            for rival in rivals:
                wrong[rival] += by_path.get((*rival, place.fqn)) != numel
    least = min(wrong[rival] for rival in rivals)
    return [rival for rival in rivals if wrong[rival] == least]


def role_of(path: TreePath, tree: Tree, *, is_tensor: bool) -> PathRole:
    """Role of the leaf at ``path``."""
    in_optim = _in_optim(path, tree.optim)
    if in_optim is not None:
        return in_optim
    depth = len(tree.model)
    in_model = path[:depth] == tree.model and (len(path) == depth + 1 or (depth > 0 and len(path) > depth))
    return Weight(join_path(path[depth:])) if in_model and is_tensor else Extra(path)


def _in_optim(path: TreePath, optim: TreePath | None) -> State | Option | None:
    if optim is None or path[: len(optim)] != optim:
        return None
    match path[len(optim) :]:
        case ("state", fqn, *slot) if slot:
            return State(str(fqn), join_path(slot))
        case ("param_groups", int(number), *option) if option:
            return Option(number, join_path(option))
        case (str(flat),):
            return _flattened(flat)
    return None


def _flattened(flat: str) -> State | Option | None:
    kind, _, rest = flat.partition(".")
    fqn, _, name = rest.rpartition(".")
    if not fqn or kind not in ("state", "param_groups"):
        return None
    return State(fqn, name) if kind == "state" else Option(fqn, name)


@dataclass(frozen=True, slots=True)
class Leaves:
    """A tree of state by its leaves: each has a name of its own and a path, and is a tensor or an object.

    ``inner`` are tensors that objects refer to, ``own`` the names of leaves that are the user's, at any path.
    ``is_ordered`` is True if the tensors are in the model's order. ``unread`` has the reason for each leaf that is a
    tensor, or holds one, that cannot be read.
    """

    paths: Mapping[str, TreePath]
    tensors: Mapping[str, TensorLeaf]
    objects: Mapping[str, Any]
    inner: Mapping[StateKey, TensorLeaf] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    is_ordered: bool = True
    unread: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def inner_key(name: str, number: int) -> StateKey:
        """The key of the tensor of that number in an object."""
        return StateKey(f"{name}[{number}]", "extra")


def manifest_of(
    leaves: Leaves,
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
    numels = {name: int(tensor.shards.numels.sum()) for name, tensor in leaves.tensors.items()}
    numels |= dict.fromkeys(leaves.unread, 1)
    integers = {name for name, tensor in leaves.tensors.items() if not tensor.dtype.is_floating}
    tree = find_tree(
        leaves.paths,
        numels,
        model_key=model_key,
        optim_key=optim_key,
        own=leaves.own,
        integers=integers,
        state=state,
    )
    doubts = () if model_key is not None else _doubts(leaves, numels, tree, state)
    parameters, has_optimizer = _parameter_shapes(leaves, tree, buffers), tree.optim is not None
    leaves, tree, notes = _by_name(leaves, tree, ties or {}, param_order, parameters)
    del numels, parameters, integers
    leaves, left = _without_unread(leaves, tree, include, exclude)
    roles = {name: _role(name, leaves, tree) for name in leaves.paths}
    refuse_weights(join_path(leaves.paths[name]) for name, where in roles.items() if isinstance(where, Weight))
    aliases, twins = _aliases(ties or {}, roles)
    numbers = {
        name: make_number_table(leaves.objects[name], name) for name in leaves.objects if isinstance(roles[name], State)
    }
    more = {name: leaves.tensors[owner] for name, owner in twins.items()}
    more |= {name: TensorLeaf((), table.dtype, table) for name, (table, _) in numbers.items()}
    if more:
        leaves = replace(leaves, tensors={**leaves.tensors, **more})
    values, leaves = _values(leaves, roles)
    extra, homes = _extras(leaves, roles, tree)
    in_optim = [path for path in leaves.paths.values() if path and path[:-1] == tree.optim]
    is_flattened = any(_flattened(str(path[-1])) for path in in_optim)
    dropped = (Note(Outcome.DROPPED, join_names(sorted(left)), "not selected", len(left), asked=True),) if left else ()
    manifest = Manifest(
        format_name,
        _entries(leaves, roles, buffers),
        aliases=aliases,
        groups=_groups(_options(leaves, roles), left),
        literals={file: data for _, files in numbers.values() for file, data in files.items()},
        extra=extra,
        values=values,
        step=_step(extra),
        world_size=world_size,
        tree=StateTree(tree.model, tree.optim, is_flattened, homes, numbers=tree.numbers),
        notes=(*doubts, *notes, *dropped),
        unreadable_names=left,
        unnamed_optimizer=f"{notes[0].what}: {notes[0].why}" if has_optimizer and tree.optim is None else "",
    )
    return with_masters(manifest)


def _without_unread(
    leaves: Leaves, tree: Tree, include: Sequence[str], exclude: Sequence[str]
) -> tuple[Leaves, frozenset[str]]:
    """The leaves without the tensors that cannot be read, and the names of these tensors, which are not chosen.

    Raises UnsupportedError for one that is chosen.
    """
    where = {name: role_of(path, tree, is_tensor=True) for name, path in leaves.paths.items()}
    objects = {
        name: explain_unreadable(v) for name, v in leaves.objects.items() if isinstance(where[name], Weight | State)
    }
    unread = {**leaves.unread, **{name: reason for name, reason in objects.items() if reason is not None}}
    if not unread:
        return leaves, frozenset()
    # A weight by the model's name, all others by their place in the tree.
    places = {name: (where[name], join_path(leaves.paths[name])) for name in unread}
    names = {name: place.fqn if isinstance(place, Weight) else path for name, (place, path) in places.items()}
    chosen = [name for name in unread if _is_chosen(where[name], names[name], include, exclude)]
    if chosen:
        name, reason = names[chosen[0]], unread[chosen[0]]
        joint = ", or" if ";" in reason else ";"  # a reason may say what to do too
        more = f" ({format_count(len(chosen) - 1, 'more tensor')} cannot be read)" if len(chosen) > 1 else ""
        raise UnsupportedError(
            f"{name}: {reason}{joint} leave it out with {format_option('exclude', name)}{more}", key=name
        )
    gone = {ref.key for name in unread for ref in iter_tensor_refs(leaves.objects.get(name))}
    kept = replace(
        leaves,
        paths={name: path for name, path in leaves.paths.items() if name not in unread},
        objects={name: value for name, value in leaves.objects.items() if name not in unread},
        inner={key: leaf for key, leaf in leaves.inner.items() if key not in gone},
        unread={},
    )
    return kept, frozenset(names.values())


def _is_chosen(where: PathRole, name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a leaf is chosen; state of the optimizer also goes by its parameter, and the user's own stays unless it
    is excluded."""
    by_parameter = isinstance(where, Extra | Option) or is_selected(where.fqn, include, exclude)
    return by_parameter and is_selected(name, (), exclude)


def _doubts(leaves: Leaves, numels: Mapping[str, int], tree: Tree, state: str | None) -> tuple[Note, ...]:
    """Notes on other mappings that could be meant: with the same tensors, if weights alone are used, and with the name
    of a model, which was passed over for its size alone, as no optimizer knows the parameters of either."""
    places = {name: leaves.paths[name] for name in numels if name not in leaves.own}
    mappings = _by_mapping(places, {name: numels[name] for name in places}, tree.optim)
    if state == "model" and (twins := _twins(tree.model, mappings)):
        others = join_names([join_path(twin) for twin in twins])
        why = (
            f"the weights are those of {join_path(tree.model)}, and {others} has tensors of the same names; choose with"
        )
        return (
            Note(
                Outcome.KEPT,
                "the model's place in the tree",
                f"{why} {format_option('model_key', join_path(twins[0]))}",
            ),
        )
    in_optim = (_in_optim(path, tree.optim) for path in places.values())
    knows_names = any(isinstance(place, State) and not place.fqn.isdecimal() for place in in_optim)
    if knows_names or not _is_model_name(tree.model):
        return ()
    named = [other for other in mappings if _is_model_name(other) and other[: len(tree.model)] != tree.model]
    why = f"the model is {join_path(tree.model)}, and this is carried along; choose it with"
    names = sorted(join_path(other) for other in named)
    return tuple(
        Note(Outcome.KEPT, f"tensors in {name}", f"{why} {format_option('model_key', name)}") for name in names
    )


def _by_name(
    leaves: Leaves, tree: Tree, ties: Mapping[str, str], order: ParamOrder | None, parameters: Mapping[str, Shape]
) -> tuple[Leaves, Tree, tuple[Note, ...]]:
    """The tree with its optimizer's numbers as names; as the user's own entry, where they could mean several."""
    numbered = {} if tree.optim is None else _numbered_groups(leaves, tree.optim)
    if tree.optim is None or not numbered:
        if order is not None:
            raise UsageError(
                f"{format_option('param_order')} is for optimizers that number their parameters; here is none"
            )
        return leaves, tree, ()
    groups, shapes = list(numbered.values()), _state_shapes(leaves, tree.optim, parameters)
    impossible = why_unnamed(groups, shapes, parameters)
    if impossible is not None and order is not None:
        raise UsageError(f"{format_option('param_order')} cannot name the parameters of this optimizer: {impossible}")
    names = _names_of_numbers(leaves, tree, groups, shapes, ties, order, parameters)
    if names is None or not _state_numbers(leaves, tree.optim) <= names.keys():
        without = replace(tree, optim=None)
        optimizer = str(tree.optim[_depth_of_extra(tree.optim, without)]) if tree.optim else "the optimizer"
        why = "it numbers its parameters, and nothing here proves which ones are meant; give their order with"
        return leaves, without, (Note(Outcome.KEPT, optimizer, impossible or f"{why} {format_option('param_order')}"),)
    numbers = tuple(number for group in groups for number in group.numbers)
    notes = () if order is not None else notes_of_order(groups, shapes, parameters)
    return _renamed(leaves, tree.optim, numbered, names), replace(tree, numbers=numbers), notes


def is_taken_by_number(leaves: Leaves, tree: Tree) -> bool:
    """Whether a reader takes the numbers of the tree's optimizer for parameters of its model."""
    groups = [] if tree.optim is None else list(_numbered_groups(leaves, tree.optim).values())
    if tree.optim is None or not groups:
        return False
    parameters = _parameter_shapes(leaves, tree, ())
    shapes = _state_shapes(leaves, tree.optim, parameters)
    names = match_numbers(groups, shapes, parameters, is_ordered=leaves.is_ordered)
    return names is not None and _state_numbers(leaves, tree.optim) <= names.keys()


def _names_of_numbers(
    leaves: Leaves,
    tree: Tree,
    groups: list[NumberedGroup],
    shapes: Mapping[int, Shape],
    ties: Mapping[str, str],
    order: ParamOrder | None,
    parameters: Mapping[str, Shape],
) -> dict[int, str] | None:
    if order is None:
        return match_numbers(groups, shapes, parameters, is_ordered=leaves.is_ordered)
    depth = len(tree.model)
    fqns = {name: join_path(path[depth:]) for name, path in leaves.paths.items()}
    owners = {fqns[alias]: fqns[owner] for alias, owner in ties.items()}
    tied = {alias: parameters[owner] for alias, owner in owners.items() if owner in parameters}
    found = follow_order(order, groups, shapes, {**tied, **parameters})
    return {number: owners.get(name, name) for number, name in found.items()}


def _numbered_groups(leaves: Leaves, optim: TreePath) -> dict[str, NumberedGroup]:
    found: dict[int, tuple[str, NumberedGroup]] = {}
    objects = {leaves.paths[name]: (name, value) for name, value in leaves.objects.items()}
    for path, (name, value) in objects.items():
        match path[len(optim) :] if path[: len(optim)] == optim else ():
            case ("param_groups", int(number), "params") if _are_numbers(value):
                _, names = objects.get((*path[:-1], "param_names"), ("", None))
                are_names = isinstance(names, list) and all(type(each) is str for each in names)
                found[number] = name, NumberedGroup(tuple(value), tuple(names) if are_names else None)
    return dict(found[number] for number in sorted(found))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(number) is int for number in value)


def _state_number(path: TreePath, optim: TreePath) -> int | None:
    """The number of the parameter whose state lies at ``path``; DCP makes text of the numbers."""
    match path[len(optim) :] if path[: len(optim)] == optim else ():
        case ("state", int(number) | str(number), _, *_) if str(number)[: MAX_NUMBER_DIGITS + 1].isdecimal():
            return int(number) if len(str(number)) <= MAX_NUMBER_DIGITS else None
    return None


def _state_numbers(leaves: Leaves, optim: TreePath) -> set[int]:
    found = (_state_number(path, optim) for path in leaves.paths.values())
    return {number for number in found if number is not None}


def _state_shapes(leaves: Leaves, optim: TreePath, parameters: Mapping[str, Shape]) -> dict[int, Shape]:
    """The one shape that all state of a parameter has but its step. One element, which no parameter has, is none."""
    single = {shape for shape in ((), (1,)) if shape not in parameters.values()}
    found: defaultdict[int, set[Shape]] = defaultdict(set)
    for name, tensor in leaves.tensors.items():
        path = leaves.paths[name]
        number = _state_number(path, optim)
        if number is not None and len(path) == len(optim) + 3 and path[-1] != "step":
            found[number].add(tensor.shape)
    return {n: next(iter(shapes)) for n, shapes in found.items() if len(shapes) == 1 and not shapes <= single}


def _parameter_shapes(leaves: Leaves, tree: Tree, buffers: Collection[str]) -> dict[str, Shape]:
    found = {}
    for name, tensor in leaves.tensors.items():
        where = role_of(leaves.paths[name], tree, is_tensor=True)
        if isinstance(where, Weight) and tensor.dtype.is_floating and name not in buffers:
            found[where.fqn] = tensor.shape
    return found


def _renamed(leaves: Leaves, optim: TreePath, groups: Mapping[str, NumberedGroup], names: Mapping[int, str]) -> Leaves:
    paths = dict(leaves.paths)
    for name, path in leaves.paths.items():
        number = _state_number(path, optim)
        if number is not None:
            paths[name] = (*optim, "state", names[number], *path[len(optim) + 2 :])
    params = {name: [names[number] for number in group.numbers] for name, group in groups.items()}
    return replace(leaves, paths=paths, objects={**leaves.objects, **params})


def _role(name: str, leaves: Leaves, tree: Tree) -> LeafRole:
    """Role of a leaf."""
    path, is_tensor = leaves.paths[name], name not in leaves.objects
    if name in leaves.own:
        return Extra(path)
    where = role_of(path, tree, is_tensor=is_tensor)
    if isinstance(where, State):
        is_plain = is_tensor or is_number(leaves.objects[name])
        depth = len(tree.optim or ()) + 3
        if len(path) > depth or not is_plain:
            owner = where if len(path) <= depth else State(where.fqn, str(path[depth - 1]))
            return PartOfValue(StateKey(owner.fqn, owner.slot), path[depth:])
    elif not isinstance(where, Option) and path[: len(tree.model)] == tree.model:
        own = path[len(tree.model) :]
        end = next((number for number, part in enumerate(own, 1) if is_extra_state(part)), 0)
        if end and (end < len(own) or not is_tensor):
            return PartOfValue(StateKey(join_path(own[:end])), own[end:])
    return where


def _values(leaves: Leaves, roles: Mapping[str, LeafRole]) -> tuple[dict[StateKey, Any], Leaves]:
    """The values that are no tensors, whole, and the leaves whose tensors inside them have names by their places."""
    found: dict[StateKey, Any] = {}
    for name, where in roles.items():
        if isinstance(where, PartOfValue):
            tensor = leaves.tensors.get(name)
            value = leaves.objects.get(name) if tensor is None else TensorRef(_key(where, tensor)[0])
            if where.path:
                _set(found.setdefault(where.owner, _Node()), where.path, value)
            else:
                found[where.owner] = value
    inner = dict(leaves.inner)
    for owner, value in found.items():
        value = _with_lists(value)
        names = {ref: TensorRef(_key_in_value(owner, place)) for place, ref in iter_ref_paths(value)}
        inner.update({new.key: inner.pop(old.key) for old, new in names.items() if old.key in inner})
        found[owner] = replace_tensor_refs(value, names.__getitem__)
    return found, replace(leaves, inner=inner)


def _key_in_value(owner: StateKey, place: str) -> StateKey:
    """The key of a tensor inside a value."""
    if owner.slot != WEIGHT:
        return StateKey(owner.fqn, f"{owner.slot}.{place}")
    return StateKey(f"{owner.fqn}.{place}", "extra")


def _options(leaves: Leaves, roles: Mapping[str, LeafRole]) -> dict[Option, Any]:
    """The hyperparameters; one that is a tensor, such as the ``lr`` of a captured graph, as a reference to it."""
    return {
        where: leaves.objects[name] if name in leaves.objects else TensorRef(_key(where, leaves.tensors[name])[0])
        for name, where in roles.items()
        if isinstance(where, Option)
    }


def _entries(
    leaves: Leaves, roles: Mapping[str, LeafRole], buffers: Collection[str] = ()
) -> dict[StateKey, TensorEntry]:
    found = {}
    for name, tensor in leaves.tensors.items():
        try:
            key, kind = _key(roles[name], tensor)
            kind = Kind.BUFFER if kind is Kind.PARAMETER and name in buffers else kind
            if key in found:
                raise MalformedError("another entry of the tree is the same tensor")
            found[key] = TensorEntry(tensor.shape, tensor.dtype, kind, tensor.shards)
        except CkptError as error:
            raise type(error)(error.message, path=error.path, key=name) from error
    for key, tensor in leaves.inner.items():
        if key in found:
            raise MalformedError("another entry of the tree has the name of this tensor", key=str(key))
        kind = Kind.EXTRA if key.slot == "extra" else Kind.STATE
        found[key] = TensorEntry(tensor.shape, tensor.dtype, kind, tensor.shards)
    return found


def _key(where: LeafRole, tensor: TensorLeaf) -> tuple[StateKey, Kind]:
    match where:
        case Weight(fqn):
            is_parameter = tensor.dtype.is_floating and not is_extra_state(fqn)
            return StateKey(fqn), Kind.PARAMETER if is_parameter else Kind.BUFFER
        case State(fqn, slot):
            return StateKey(fqn, slot), Kind.STATE
        case Option(owner, name):
            return StateKey(f"param_groups.{owner}", name), Kind.EXTRA
        case Extra(path):
            return StateKey(join_path(path), "extra"), Kind.EXTRA
        case PartOfValue(owner, path):
            return _key_in_value(owner, join_path(path)), Kind.STATE if where.is_state else Kind.EXTRA


def _aliases(ties: Mapping[str, str], roles: Mapping[str, LeafRole]) -> tuple[dict[str, str], dict[str, str]]:
    """Ties between weights, by fqn, and others, by leaf, which become tensors of their own."""
    aliases, twins = {}, {}
    for alias, owner in ties.items():
        ends = roles[alias], roles[owner]
        if isinstance(ends[0], Weight) and isinstance(ends[1], Weight):
            aliases[ends[0].fqn] = ends[1].fqn
        else:
            twins[alias] = owner
    return aliases, twins


def _groups(options: Mapping[Option, Any], left: Collection[str]) -> tuple[ParamGroup, ...]:
    """The optimizer's groups, without parameters that are ``left`` out; where options are kept by parameter, parameters
    with the same options are a group."""
    by_owner: defaultdict[int | str, dict[str, Any]] = defaultdict(dict)
    for each, value in options.items():
        by_owner[each.owner][each.name] = value
    numbered = {owner: options for owner, options in by_owner.items() if isinstance(owner, int)}
    groups: list[ParamGroup] = []
    for number in sorted(numbered):
        found = numbered[number].pop("params", ())
        params = map(str, found if isinstance(found, list | tuple) else ())
        groups.append(ParamGroup(tuple(name for name in params if name not in left), numbered[number]))
    if groups:
        return tuple(groups)
    by_param = {str(owner): values for owner, values in by_owner.items() if owner not in left}
    members: defaultdict[int, list[str]] = defaultdict(list)
    distinct = ValueNumbering()
    for fqn, values in by_param.items():
        members[distinct.get_number(dict(sorted(values.items())))].append(fqn)
    return tuple(ParamGroup(tuple(names), dict(by_param[names[0]])) for names in members.values())


def _extras(leaves: Leaves, roles: Mapping[str, LeafRole], tree: Tree) -> tuple[dict[str, Any], dict[str, TreePath]]:
    """The user's own entries as the tree they were, without the levels that model and optimizer share with them; and
    the path of each name at its top."""
    extra: dict[str, Any] = {}
    homes: dict[str, TreePath] = {}
    uses: Counter[str] = Counter()
    for name, where in roles.items():
        if isinstance(where, Extra):
            depth = _depth_of_extra(where.path, tree)
            home = where.path[: depth + 1]
            inner = where.path[depth:]
            if homes.setdefault(str(inner[0]), home) != home:
                inner = (_unused(join_path(where.path), homes, uses),)
                homes[inner[0]] = where.path
            tensor = leaves.tensors.get(name)
            _set(extra, inner, leaves.objects.get(name) if tensor is None else TensorRef(_key(where, tensor)[0]))
    return {str(name): _with_lists(value) for name, value in extra.items()}, homes


def _depth_of_extra(path: TreePath, tree: Tree) -> int:
    """Number of levels that the path to a user's entry shares with model and optimizer."""
    shared = tree.model[:-1] if tree.optim is None else _common(tree.model, tree.optim)
    return len(shared) if path[: len(shared)] == shared and len(path) > len(shared) else 0


def _unused(name: str, names: Mapping[str, TreePath], uses: Counter[str]) -> str:
    """``name``, or with a number behind it; ``uses`` counts the numbers given, so that none is tried twice."""
    found = name
    while found in names:
        uses[name] += 1
        found = f"{name}'{uses[name]}"
    return found


def _common(first: TreePath, second: TreePath) -> TreePath:
    different = (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[: next(different, min(len(first), len(second)))]


class _Node(dict[str | int, Any]):
    """A level of a tree under construction, apart from the dicts that are values of leaves."""


def _set(tree: dict[Any, Any], path: TreePath, value: Any) -> None:
    """Put ``value`` at ``path``; where an object stands in the way, the rest of the path is its name."""
    *parents, leaf = path
    for depth, part in enumerate(parents):
        inner = tree.setdefault(part, _Node())
        if not isinstance(inner, _Node):
            tree[join_path((*parents[depth:], leaf))] = value
            return
        tree = inner
    tree[leaf] = value


def _with_lists(value: Any) -> Any:
    """Levels whose keys are all the positions from 0 on were lists."""
    if not isinstance(value, _Node):
        return value
    inner = {part: _with_lists(item) for part, item in value.items()}
    state = value.get("state")
    if "param_groups" in value and isinstance(state, _Node):
        # By number, as Optimizer.load_state_dict wants it, and no list.
        inner["state"] = {part: _with_lists(item) for part, item in state.items()}
    if set(inner) == set(range(len(inner))):
        return [inner[position] for position in range(len(inner))]
    return {str(part): item for part, item in inner.items()}


STEP_NAMES = ("global_step", "global_steps", "step")
"""What training loops call their count of optimizer steps."""


def steps_in(extra: Mapping[str, Any]) -> Iterator[Any]:
    """The values that training loops keep under such a name, the likeliest first."""
    inner = (value for name, value in extra.items() if isinstance(value, dict) and "scheduler" not in name)
    return (found[name] for found in (extra, *inner) for name in STEP_NAMES if name in found)


def _step(extra: Mapping[str, Any]) -> int | None:
    return next((found for found in steps_in(extra) if type(found) is int), None)
