"""Where the model and the optimizer live in a DCP tree. Pure: paths in, places out.

A DCP is a tree of the user's own making, saved leaf by leaf; ``planner_data`` keeps each leaf's path.
``get_state_dict`` puts optimizer state at ``(..., "state", fqn, slot)`` and options at ``(..., "param_groups",
number, option)``; torchtitan flattens both into one string, ``state.<fqn>.<slot>``. The model is the mapping whose
names the optimizer knows, or, without an optimizer, the one with the most elements. What is in neither is the user's
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt_tools.errors import UnsupportedError, UsageError

Path = tuple[str | int, ...]

MODEL_NAMES = ("model", "module", "state_dict")
"""What the field calls a model's entry: decides between mappings of which none is known to an optimizer."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer of the model."""

    fqn: str


@dataclass(frozen=True, slots=True)
class State:
    """Optimizer state of one parameter."""

    fqn: str
    slot: str


@dataclass(frozen=True, slots=True)
class Option:
    """A hyperparameter of a group, named by its number, or of a parameter, where the saver flattened groups away."""

    owner: int | str
    name: str


@dataclass(frozen=True, slots=True)
class Extra:
    """The user's own entry."""

    path: Path


Place = Weight | State | Option | Extra


@dataclass(frozen=True, slots=True)
class Tree:
    """The prefixes under which model and optimizer live; ``optim`` is None where there is no optimizer."""

    model: Path
    optim: Path | None


def find_tree(
    paths: Mapping[str, Path], numels: Mapping[str, int], *, model_key: str | None, optim_key: str | None
) -> Tree:
    """The tree of a checkpoint whose leaves lie at ``paths``, those with ``numels`` being tensors.

    Raises:
        UsageError: a given key leads nowhere. UnsupportedError: there are several optimizers.
    """
    optim = _optim_prefix(paths.values()) if optim_key is None else _given(optim_key, paths, "--optim-key")
    if model_key is not None:
        return Tree(_given(model_key, paths, "--model-key"), optim)
    known = {place.fqn for path in paths.values() if isinstance(place := _in_optim(path, optim), State)}
    return Tree(_model_prefix(paths, numels, optim, known), optim)


def _given(key: str, paths: Mapping[str, Path], option: str) -> Path:
    prefixes = {path[:length] for path in paths.values() for length in range(len(path) + 1)}
    for prefix in prefixes:
        if ".".join(map(str, prefix)) == key:
            return prefix
    raise UsageError(f"{option} {key!r} names nothing in this checkpoint")


def _optim_prefix(paths: Iterable[Path]) -> Path | None:
    found = Counter(prefix for path in paths if (prefix := _optim_part(path)) is not None)
    if len(found) > 1:
        names = ", ".join(".".join(map(str, prefix)) for prefix in found)
        raise UnsupportedError(f"there are several optimizers ({names}); choose one with --optim-key")
    return next(iter(found), None)


def _optim_part(path: Path) -> Path | None:
    """What stands before the first sign of an optimizer, or None."""
    for position, part in enumerate(path):
        if part == "param_groups" and position + 1 < len(path) and isinstance(path[position + 1], int):
            return path[:position]
        if isinstance(part, str) and part.startswith("param_groups.") and position + 1 == len(path):
            return path[:position]
    return None


def _model_prefix(paths: Mapping[str, Path], numels: Mapping[str, int], optim: Path | None, known: set[str]) -> Path:
    """The parent of the names that the optimizer knows best, then by name, then by size."""
    sizes: Counter[Path] = Counter()
    hits: Counter[Path] = Counter()
    for name, numel in numels.items():
        path = paths[name]
        if path and _in_optim(path, optim) is None:
            sizes[path[:-1]] += numel
            hits[path[:-1]] += path[-1] in known
    if not sizes:
        return ()
    return max(sizes, key=lambda prefix: (hits[prefix], bool(prefix) and prefix[-1] in MODEL_NAMES, sizes[prefix]))


def place(path: Path, tree: Tree, *, is_tensor: bool) -> Place:
    """What the leaf at ``path`` is."""
    in_optim = _in_optim(path, tree.optim)
    if in_optim is not None:
        return in_optim
    depth = len(tree.model)
    in_model = path[:depth] == tree.model and (len(path) == depth + 1 or (depth > 0 and len(path) > depth))
    return Weight(".".join(map(str, path[depth:]))) if in_model and is_tensor else Extra(path)


def _in_optim(path: Path, optim: Path | None) -> State | Option | None:
    if optim is None or path[: len(optim)] != optim:
        return None
    match path[len(optim) :]:
        case ("state", fqn, *slot) if slot:
            return State(str(fqn), ".".join(map(str, slot)))
        case ("param_groups", int(number), *option) if option:
            return Option(number, ".".join(map(str, option)))
        case (str(flat),):
            return _flattened(flat)
    return None


def _flattened(flat: str) -> State | Option | None:
    kind, _, rest = flat.partition(".")
    fqn, _, name = rest.rpartition(".")
    if not fqn or kind not in ("state", "param_groups"):
        return None
    return State(fqn, name) if kind == "state" else Option(fqn, name)
