"""Finds the places of model and optimizer in a tree of state. Pure.

A DCP and a file of torch.save are trees of the user's own making; each leaf is a tensor or an object.
``get_state_dict`` puts optimizer state at ``(..., "state", fqn, slot)`` and options at ``(..., "param_groups", number,
option)``; torchtitan flattens both into one string, ``state.<fqn>.<slot>``. The model is the mapping whose names the
optimizer knows; without such names, the one that is called a model; else the only possible one. Several possible ones
are refused. Everything outside of model and optimizer is the user's own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from ckpt_tools.core.manifest import TreePath, join_path
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.trainers.lightning import TRAINED_WEIGHTS

MODEL_NAMES = ("model", "module", "state_dict", "model_state_dict")
"""Usual names of a model's entry, which decide between mappings that no optimizer knows."""

_AVERAGE_NAME = re.compile(r"(?i)(?:^|[^a-z])(?:ema|swa|shadow|averaged?|avg)(?:[^a-z]|$)")
"""Names that trainers give to a moving average of a model: ``model_ema``, ``params_ema``, ``shadow_params``."""


MAX_SHOWN_CHOICES = 4

MAX_PATH_PARTS = 100
"""Maximum depth of a tree, so that walking it ends."""


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


PathRole = WeightRole | StateRole | OptionRole | ExtraRole


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
    twin_prefixes: list[TreePath] = []
    if state == "all" and optim_prefix is not None:
        twin_prefixes = _find_twins(found_prefix, _group_by_mapping(paths, numels, optim_prefix))
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
        remaining = _keep_best_fitting(candidates, paths, numels, optim_prefix)
        remaining = [rival for rival in remaining if not _is_averaged(rival)] or remaining
        if len(remaining) > 1:
            remaining = list(filter(_is_model_name, remaining)) or remaining
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
    largest_numel = max((sum(each.values()) for each in weight_mappings.values()), default=0)
    return [] if root_numel and root_numel >= largest_numel else list(weight_mappings)


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
    common_prefix = reduce(find_common_prefix, candidates)
    if _is_model_name(common_prefix):
        return common_prefix
    raise UnsupportedError(f"there are several models {describe_choices('model_key', candidates)}")


def _keep_best_fitting(
    candidates: list[TreePath], paths: Mapping[str, TreePath], numels: Mapping[str, int], optim_prefix: TreePath | None
) -> list[TreePath]:
    """The models with the fewest tensors that differ in size from the optimizer's state of the same name."""
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
            return parse_flattened_name(flat)
    return None


def parse_flattened_name(flat_name: str) -> StateRole | OptionRole | None:
    kind, _, rest = flat_name.partition(".")
    fqn, _, name = rest.rpartition(".")
    if not fqn or kind not in ("state", "param_groups"):
        return None
    return StateRole(fqn, name) if kind == "state" else OptionRole(fqn, name)


def note_other_models(
    paths: Mapping[str, TreePath], numels: Mapping[str, int], tree: TreePrefixes, state: str | None
) -> tuple[Note, ...]:
    """Notes on other mappings that could be meant: with the same tensors, if weights alone are used, and with the name
    of a model, which was passed over for its size alone, as no optimizer knows the parameters of either."""
    mappings = _group_by_mapping(paths, numels, tree.optim)
    if state == "model" and (twin_prefixes := _find_twins(tree.model, mappings)):
        others = join_names([join_path(twin) for twin in twin_prefixes])
        why = (
            f"the weights are those of {join_path(tree.model)}, and {others} has tensors of the same names; choose with"
        )
        advice = format_option("model_key", join_path(twin_prefixes[0]))
        return (Note(Outcome.KEPT, "the model's place in the tree", f"{why} {advice}"),)
    optim_roles = (_find_optim_role(paths[name], tree.optim) for name in numels)
    knows_names = any(isinstance(place, StateRole) and not place.fqn.isdecimal() for place in optim_roles)
    if knows_names or not _is_model_name(tree.model):
        return ()
    other_models = [other for other in mappings if _is_model_name(other) and other[: len(tree.model)] != tree.model]
    why = f"the model is {join_path(tree.model)}, and this is carried along; choose it with"
    names = sorted(join_path(other) for other in other_models)
    return tuple(
        Note(Outcome.KEPT, f"tensors in {name}", f"{why} {format_option('model_key', name)}") for name in names
    )


def find_common_prefix(first: TreePath, second: TreePath) -> TreePath:
    different = (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[: next(different, min(len(first), len(second)))]
