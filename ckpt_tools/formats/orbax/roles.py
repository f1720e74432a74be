"""Roles of the leaves of an Orbax tree: model or moments of Adam. Pure.

Flax and most training loops keep the weights under ``params``. A tree without it is a model, unless a name says that it
holds more. optax keeps Adam's moments in two copies of the tree of weights, ``mu`` and ``nu``: two trees that lie side
by side under these names, and have exactly the names and shapes of the weights, are taken for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import TreePath, join_path
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.state_tree.prefixes import describe_choices

PARAMS = "params"

MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
"""optax's names, and ours for the same."""

_OPTIMIZER_NAMES = frozenset((*MOMENTS, "opt_state", "opt_states", "optimizer", "optimizer_state", "opt"))


@dataclass(frozen=True, slots=True)
class OrbaxRoles:
    """Names of weights by path, and (name, slot) of moments by path; every other leaf is the user's own."""

    weights: Mapping[TreePath, str]
    moments: Mapping[TreePath, tuple[str, str]]


def find_roles(shapes: Mapping[TreePath, Shape], numbers: Collection[TreePath], model_key: str | None) -> OrbaxRoles:
    """The roles of the arrays that have these shapes. Those of ``numbers`` were plain numbers when they were saved:
    they are weights under ``params``, and beside the weights of a tree that is a model they are not.

    Raises:
        UsageError: ``model_key`` leads nowhere. UnsupportedError: nothing says which part is the model.
    """
    if model_key is None:
        prefix = _find_model_prefix(shapes)
    else:
        prefixes = {path[:end] for path in shapes for end in range(len(path)) if join_path(path[:end]) == model_key}
        if not prefixes:
            raise UsageError(f"{format_option('model_key', model_key)} does not exist in this checkpoint")
        prefix = min(prefixes, key=len)
    model_paths = [path for path in shapes if path[: len(prefix)] == prefix and (prefix or path not in numbers)]
    weights = {path: join_path(path[len(prefix) :]) for path in model_paths}
    if len(set(weights.values())) < len(weights):
        raise UnsupportedError("two weights have one name, as a name of the tree holds dots")
    return OrbaxRoles(weights, _find_moments(shapes, prefix, weights))


def _find_model_prefix(paths: Collection[TreePath]) -> TreePath:
    prefixes = {
        path[: path.index(PARAMS) + 1] for path in paths if PARAMS in path[:-1] and not _is_optimizer_path(path)
    }
    if len(prefixes) == 1:
        return next(iter(prefixes))
    if prefixes:
        raise UnsupportedError(f"there are several models {describe_choices('model_key', sorted(prefixes))}")
    optimizer_path = next((path for path in paths if _is_optimizer_path(path)), None)
    if optimizer_path is not None:
        raise UnsupportedError(
            f"it is optimizer state by its name, and no part of the tree is called {PARAMS}; say where the model is "
            f"with {format_option('model_key')}",
            key=join_path(optimizer_path),
        )
    return ()


def _is_optimizer_path(path: TreePath) -> bool:
    """Whether a name on the way, before any ``params``, is that of optimizer state."""
    names_above = path[: path.index(PARAMS)] if PARAMS in path else path
    return not _OPTIMIZER_NAMES.isdisjoint(names_above)


def _find_moments(
    shapes: Mapping[TreePath, Shape], prefix: TreePath, weights: Mapping[TreePath, str]
) -> dict[TreePath, tuple[str, str]]:
    """The moments of Adam, if one pair of trees holds them for every weight."""
    # opt_state/0/mu/<weight>, opt_state/0/nu/<weight>: taken for Adam's moments only if exactly one pair of trees, side
    # by side, has every weight's path and shape. Anything less stays the user's own.
    weight_shapes = {path[len(prefix) :]: shapes[path] for path in weights}
    moment_parents = {
        path[:at] for path in shapes if path not in weights for at, part in enumerate(path) if part == "mu"
    }
    matching_parents = [
        pair
        for pair in moment_parents
        if all(_collect_shapes_below(shapes, (*pair, name)) == weight_shapes for name in MOMENTS)
    ]
    if len(matching_parents) != 1 or not weight_shapes:
        return {}
    return {
        (*matching_parents[0], name, *path[len(prefix) :]): (fqn, slot)
        for path, fqn in weights.items()
        for name, slot in MOMENTS.items()
    }


def _collect_shapes_below(shapes: Mapping[TreePath, Shape], prefix: TreePath) -> dict[TreePath, Shape]:
    return {path[len(prefix) :]: shape for path, shape in shapes.items() if path[: len(prefix)] == prefix}
