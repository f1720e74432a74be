"""Tensors inside values: the ``StoredTensor`` leaves of a pickle become ``TensorRef`` leaves of a manifest, and back.

A value may share its parts and an ``Opaque`` may contain itself; each part is visited once, and what was shared or
cyclic stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpt_tools.core.manifest import TensorRef
from ckpt_tools.core.values import DefaultDict, Opaque, OrderedDict, Size, StoredTensor, Value


def iter_tensor_refs(value: Value) -> Iterator[TensorRef]:
    """Every ``TensorRef`` in ``value``, as often as it is met."""
    return (found for found in iter_values(value) if isinstance(found, TensorRef))


def has_tensors(value: Value) -> bool:
    """Whether there is a tensor in ``value``, read or referred to."""
    return any(isinstance(part, TensorRef | StoredTensor) for part in iter_values(value))


def is_tree(value: Value) -> bool:
    """Whether a value is a dict whose keys are all texts, and at least one."""
    return isinstance(value, dict) and bool(value) and all(type(key) is str for key in value)


def iter_ref_paths(value: Value) -> Iterator[tuple[str, TensorRef]]:
    """Every ``TensorRef`` in ``value`` with the path at which it is met first: keys and positions, joined by dots."""
    seen: set[int] = set()
    pending: list[tuple[str, Value]] = [("", value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, TensorRef):
            yield path.removeprefix("."), value
        elif id(value) not in seen:
            seen.add(id(value))
            parts = value.items() if isinstance(value, dict) else enumerate(_get_parts(value))
            pending.extend((f"{path}.{name}", part) for name, part in parts)


def iter_values(value: Value) -> Iterator[Value]:
    """``value`` and every value in it: tensors as often as they are met, all others once."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, TensorRef | StoredTensor):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            yield value
            pending.extend(_get_parts(value))


def _get_parts(value: Value) -> Iterable[Value]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, Opaque):
        return [value.ref, value.args, value.kwargs, value.state, value.items, value.pairs]
    return ()


def replace_tensor_refs(value: Value, make: Callable[[TensorRef], Value]) -> Value:
    """``value`` with what ``make`` gives in the place of each reference; itself where there is none."""
    return _LeafReplacer(TensorRef, make).visit(value) if any(True for _ in iter_tensor_refs(value)) else value


def replace_stored_tensors(value: Value, make: Callable[[StoredTensor], Value]) -> Value:
    """``value`` with what ``make`` gives in the place of each tensor that has elements; itself where there is none."""
    has_stored_tensor = any(isinstance(leaf, StoredTensor) for leaf in iter_values(value))
    return _LeafReplacer(StoredTensor, make).visit(value) if has_stored_tensor else value


class _LeafReplacer:
    def __init__(self, kind: type, make: Callable[[Any], Value]) -> None:
        self._kind = kind
        self._make = make
        self._copies: dict[int, Value] = {}

    def visit(self, value: Value) -> Value:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, self._kind):
            self._copies[id(value)] = made = self._make(value)
            return made
        if isinstance(value, dict):
            return self._copy_dict(value)
        if isinstance(value, list):
            copy = self._copies[id(value)] = []
            copy.extend(map(self.visit, value))
            return copy
        if isinstance(value, Opaque):
            return self._copy_opaque(value)
        if isinstance(value, tuple | set | frozenset) and not isinstance(value, Size):
            return type(value)(map(self.visit, value))
        return value

    def _copy_dict(self, value: dict[Any, Value]) -> Value:
        copy: dict[Any, Value] = {}
        if isinstance(value, OrderedDict):
            copy = OrderedDict((), value.attributes)
        elif isinstance(value, DefaultDict):
            copy = DefaultDict(value.factory)
        self._copies[id(value)] = copy
        copy.update((self.visit(key), self.visit(item)) for key, item in value.items())
        return copy

    def _copy_opaque(self, value: Opaque) -> Value:
        copy = self._copies[id(value)] = Opaque(value.ref, form=value.form)
        for part in ("ref", "args", "kwargs", "state", "items", "pairs"):
            setattr(copy, part, self.visit(getattr(value, part)))
        return copy
