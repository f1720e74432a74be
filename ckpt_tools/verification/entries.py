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
from ckpt_tools.formats.state_dict.from_deepspeed import user_entries
from ckpt_tools.verification.report import ENTRY, Aspect, Difference

_OF_FORMATS = frozenset(("megatron", "deepspeed"))
"""Entries that say how a format laid the checkpoint out."""

_SPEED = frozenset(("foreach", "fused", "capturable", "differentiable", "default_config"))
"""Options of an optimizer that do not change its results."""

_ABSENT = object()


def differing_entries(ours: Manifest, theirs: Manifest, names: tuple[str, str]) -> list[Difference]:
    """Entries that both sides have, with other values, and values of state that one alone has if both have some."""
    found = [*_options(ours, theirs, names)]
    for a, b, side in ((ours, theirs, names[0]), (theirs, ours, names[1])):
        only = a.values.keys() - b.values.keys() if b.values else ()
        found += [Difference(StateKey(str(key), ENTRY), Aspect.ENTRY, f"only in {side}") for key in sorted(only)]
    if None not in (ours.step, theirs.step) and ours.step != theirs.step:
        found.append(_difference("step", ours.step, theirs.step, names))
    for path, a, b in _pairs(_entries(ours), _entries(theirs)):
        if not path.startswith(HEADER_ENTRY) and _is_plain(a) and _is_plain(b) and not _same(a, b):
            found.append(_difference(path, a, b, names))
    return found


def differing_texts(ours: Manifest, theirs: Manifest, names: tuple[str, str]) -> list[Difference]:
    """Texts of a safetensors header that one side alone has, or that differ."""
    a, b = ({HEADER_ENTRY: _entries(each).get(HEADER_ENTRY, {})} for each in (ours, theirs))
    found = [_difference(path, x, y, names) for path, x, y in _pairs(a, b) if x != y and not isinstance(x, Mapping)]
    for texts, others, side in ((a, b, names[0]), (b, a, names[1])):
        for name in texts[HEADER_ENTRY].keys() - others[HEADER_ENTRY].keys():
            found.append(Difference(StateKey(f"{HEADER_ENTRY}.{name}", ENTRY), Aspect.ENTRY, f"only in {side}"))
    return found


def not_compared(ours: Manifest, theirs: Manifest) -> tuple[Note, ...]:
    """Notes on the entries of both sides that are neither tensors nor plain values."""
    pairs = _pairs(_entries(ours), _entries(theirs))
    paths = [
        path for path, a, b in pairs if not (_is_plain(a) and _is_plain(b)) and not (_is_tensor(a) or _is_tensor(b))
    ]
    return tuple(Note(Outcome.NOT_COMPARED, path, "it is neither a tensor nor a plain value") for path in paths)


def _options(ours: Manifest, theirs: Manifest, names: tuple[str, str]) -> Iterator[Difference]:
    """Hyperparameters of the same parameters. Those of many parameters with the same values are one difference."""
    others = _by_parameter(theirs)
    found: dict[tuple[str, str, str], list[tuple[str, Any, Any]]] = {}
    for fqn, options in _by_parameter(ours).items():
        for name in sorted(options.keys() & others.get(fqn, {}).keys() - _SPEED):
            a, b = options[name], others[fqn][name]
            if _is_plain(a) and _is_plain(b) and not _same(a, b):
                found.setdefault((name, repr(a), repr(b)), []).append((fqn, a, b))
    for (name, _, _), rows in found.items():
        fqn, a, b = rows[0]
        many = "" if len(rows) == 1 else f" and {len(rows) - 1:,} more"
        yield _difference(f"{name} of {fqn}{many}", a, b, names)


def _by_parameter(manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    return {fqn: group.options for group in manifest.groups for fqn in group.params}


def _entries(manifest: Manifest) -> dict[str, Any]:
    found, _ = user_entries(manifest)
    stated = (
        {} if manifest.step is None else {name for name in ("step", "global_step") if found.get(name) == manifest.step}
    )
    entries = {name: value for name, value in found.items() if name not in _OF_FORMATS and name not in stated}
    return {**entries, **{str(key): value for key, value in manifest.values.items()}}


def _pairs(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The leaves that both trees have, by their paths."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        others = {str(name): value for name, value in b.items()}
        for name, value in a.items():
            other = others.get(str(name), _ABSENT)
            if other is not _ABSENT:
                yield from _pairs(value, other, f"{path}.{name}" if path else str(name))
    elif _is_list(a) and _is_list(b) and not (_is_plain(a) and _is_plain(b)):
        yield f"number of items of {path}", len(a), len(b)
        for number, pair in enumerate(zip(a, b, strict=False)):
            yield from _pairs(*pair, f"{path}.{number}")
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


def _same(a: Any, b: Any) -> bool:
    """True if the values are equal: 1 and 1.0 are, a list and a tuple are, NaN and NaN are."""
    if _is_list(a) and _is_list(b):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (a != a and b != b)


def _difference(path: str, a: Any, b: Any, names: tuple[str, str]) -> Difference:
    what = f"{_shown(a)} in {names[0]}, {_shown(b)} in {names[1]}"
    return Difference(StateKey(path, ENTRY), Aspect.ENTRY, what)


def _shown(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
