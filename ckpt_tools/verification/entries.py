"""Comparison of what is not a tensor: hyperparameters, the step, the scheduler, the user's own entries, and parts of
optimizer state and of modules' extra state.

Formats keep entries of their own beside these, so an entry is compared if both sides have it. Objects of classes that
are not interpreted are counted, not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.core.manifest import Manifest, StateKey, TensorRef
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.values import StoredTensor
from ckpt_tools.state_tree.from_deepspeed import collect_user_entries
from ckpt_tools.verification.report import ENTRY_SLOT, Aspect, Difference

_FORMAT_ENTRIES = frozenset(("megatron", "deepspeed"))
"""Entries that say how a format laid the checkpoint out."""

_SPEED_OPTIONS = frozenset(("foreach", "fused", "capturable", "differentiable", "default_config"))
"""Options of an optimizer that do not change its results."""

_ABSENT = object()


def find_differing_entries(ours: Manifest, theirs: Manifest, names: tuple[str, str]) -> list[Difference]:
    """Entries that both sides have, with other values, and values of state that one alone has if both have some."""
    differences = [*_compare_options(ours, theirs, names)]
    for a, b, side in ((ours, theirs, names[0]), (theirs, ours, names[1])):
        only_keys = a.values.keys() - b.values.keys() if b.values else ()
        differences += [
            Difference(StateKey(str(key), ENTRY_SLOT), Aspect.ENTRY, f"only in {side}") for key in sorted(only_keys)
        ]
    if None not in (ours.step, theirs.step) and ours.step != theirs.step:
        differences.append(_build_difference("step", ours.step, theirs.step, names))
    for path, a, b in _iter_common_leaves(_collect_entries(ours), _collect_entries(theirs)):
        if not path.startswith(HEADER_ENTRY) and _is_plain(a) and _is_plain(b) and not _is_equal(a, b):
            differences.append(_build_difference(path, a, b, names))
    return differences


def find_differing_texts(ours: Manifest, theirs: Manifest, names: tuple[str, str]) -> list[Difference]:
    """Texts of a safetensors header that one side alone has, or that differ."""
    a, b = ({HEADER_ENTRY: _collect_entries(each).get(HEADER_ENTRY, {})} for each in (ours, theirs))
    differences = [
        _build_difference(path, x, y, names)
        for path, x, y in _iter_common_leaves(a, b)
        if x != y and not isinstance(x, Mapping)
    ]
    for texts, others, side in ((a, b, names[0]), (b, a, names[1])):
        for name in texts[HEADER_ENTRY].keys() - others[HEADER_ENTRY].keys():
            differences.append(
                Difference(StateKey(f"{HEADER_ENTRY}.{name}", ENTRY_SLOT), Aspect.ENTRY, f"only in {side}")
            )
    return differences


def list_uncompared_entries(ours: Manifest, theirs: Manifest) -> tuple[Note, ...]:
    """Notes on the entries of both sides that are neither tensors nor plain values."""
    pairs = _iter_common_leaves(_collect_entries(ours), _collect_entries(theirs))
    paths = [
        path for path, a, b in pairs if not (_is_plain(a) and _is_plain(b)) and not (_is_tensor(a) or _is_tensor(b))
    ]
    return tuple(Note(Outcome.NOT_COMPARED, path, "it is neither a tensor nor a plain value") for path in paths)


def _compare_options(ours: Manifest, theirs: Manifest, names: tuple[str, str]) -> Iterator[Difference]:
    """Hyperparameters of the same parameters. Those of many parameters with the same values are one difference."""
    their_options = _map_options_by_parameter(theirs)
    groups: dict[tuple[str, str, str], list[tuple[str, Any, Any]]] = {}
    for fqn, options in _map_options_by_parameter(ours).items():
        for name in sorted(options.keys() & their_options.get(fqn, {}).keys() - _SPEED_OPTIONS):
            a, b = options[name], their_options[fqn][name]
            if _is_plain(a) and _is_plain(b) and not _is_equal(a, b):
                groups.setdefault((name, repr(a), repr(b)), []).append((fqn, a, b))
    for (name, _, _), rows in groups.items():
        fqn, a, b = rows[0]
        others_text = "" if len(rows) == 1 else f" and {len(rows) - 1:,} more"
        yield _build_difference(f"{name} of {fqn}{others_text}", a, b, names)


def _map_options_by_parameter(manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    return {fqn: group.options for group in manifest.groups for fqn in group.params}


def _collect_entries(manifest: Manifest) -> dict[str, Any]:
    all_entries, _ = collect_user_entries(manifest)
    step_entries = (
        {}
        if manifest.step is None
        else {name for name in ("step", "global_step") if all_entries.get(name) == manifest.step}
    )
    entries = {
        name: value for name, value in all_entries.items() if name not in _FORMAT_ENTRIES and name not in step_entries
    }
    return {**entries, **{str(key): value for key, value in manifest.values.items()}}


def _iter_common_leaves(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves that both trees have, by their paths."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        their_items = {str(name): value for name, value in b.items()}
        for name, value in a.items():
            their_value = their_items.get(str(name), _ABSENT)
            if their_value is not _ABSENT:
                yield from _iter_common_leaves(value, their_value, f"{path}.{name}" if path else str(name))
    elif _is_list(a) and _is_list(b) and not (_is_plain(a) and _is_plain(b)):
        yield f"number of items of {path}", len(a), len(b)
        for number, pair in enumerate(zip(a, b, strict=False)):
            yield from _iter_common_leaves(*pair, f"{path}.{number}")
    else:
        yield path, a, b


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, TensorRef | StoredTensor)


def _is_plain(value: Any) -> bool:
    if _is_list(value):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _is_equal(a: Any, b: Any) -> bool:
    """True if the values are equal: 1 and 1.0 are, a list and a tuple are, NaN and NaN are."""
    if _is_list(a) and _is_list(b):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return bool(a == b) or (a != a and b != b)


def _build_difference(path: str, a: Any, b: Any, names: tuple[str, str]) -> Difference:
    description = f"{_format_value(a)} in {names[0]}, {_format_value(b)} in {names[1]}"
    return Difference(StateKey(path, ENTRY_SLOT), Aspect.ENTRY, description)


def _format_value(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
