"""The value of a file of ``torch.save`` as ``torch.load(weights_only=True)`` takes it. Pure.

That loader allows a closed list of names (torch/_weights_only_unpickler.py, ``_get_allowed_globals``). Plain data and
tensors stay. A few objects that hold plain data become it; every other object is left out. A dict loses the key of such
an object; in a list or a tuple None takes its place, so that the others keep their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np

from ckpt_tools.core.value_refs import extracted
from ckpt_tools.core.values import (
    PARAMETER,
    DefaultDict,
    GlobalRef,
    Opaque,
    OrderedDict,
    Size,
    StorageRef,
    StoredTensor,
    Value,
)
from ckpt_tools.errors import UnsupportedError

TENSOR = GlobalRef("torch", "Tensor")
_WRAPPERS = (None, PARAMETER, TENSOR)
"""Classes of tensors that the loader allows."""

_CALLS = frozenset(
    (
        GlobalRef("torch", "device"),
        GlobalRef("torch.serialization", "_get_layout"),
        GlobalRef("torch._utils", "_rebuild_sparse_tensor"),
        GlobalRef("collections", "Counter"),
    )
)
"""Calls that the loader allows, and that the reader of pickles writes down as objects."""

_NAMESPACES = (GlobalRef("argparse", "Namespace"), GlobalRef("types", "SimpleNamespace"))
_PATHS = tuple(GlobalRef("pathlib", name) for name in ("PosixPath", "PurePosixPath"))
_SCALARS = tuple(GlobalRef(module, "scalar") for module in ("numpy.core.multiarray", "numpy._core.multiarray"))
_NUMPY_DTYPE = GlobalRef("numpy", "dtype")
_NUMPY_CODES = frozenset(("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"))

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, Size, StorageRef)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An object that is not in the output: its place, its class, and the number of tensors in it."""

    place: str
    kind: str
    num_tensors: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """An object that became a plain value: its place, its class, and the kind of value."""

    place: str
    kind: str
    by: str


class _Gone:
    """In the place of what is left out."""


_GONE: Final = _Gone()


@dataclass(frozen=True, slots=True)
class Loadable:
    """A value that the loader takes, and its differences from the original."""

    value: Value
    left_out: tuple[LeftOut, ...]
    replaced: tuple[Replaced, ...]


def loadable(value: Value, path: str) -> Loadable:
    """``value``, which the file ``path`` holds, of allowed names alone.

    Raises:
        UnsupportedError: it is or holds a model that was pickled whole, or nothing of it would be left.
    """
    visitor = _Visitor(path)
    found = visitor.visit(value, ())
    if found is _GONE:
        raise UnsupportedError(f"it is a {_kind(value)}, which torch.load(weights_only=True) refuses", path=path)
    return Loadable(found, tuple(visitor.left_out), tuple(visitor.replaced))


def refused_in(value: Value) -> tuple[str, ...]:
    """The classes of objects in ``value`` that ``torch.load(weights_only=True)`` refuses."""
    visitor = _Visitor("")
    try:
        visitor.visit(value, ())
    except UnsupportedError:
        return ("torch.nn.Module",)
    kinds = [each.kind for each in visitor.left_out] + [each.kind for each in visitor.replaced]
    return tuple(dict.fromkeys(kinds))


_Place = tuple[str | int, ...]


class _Visitor:
    def __init__(self, path: str) -> None:
        self.left_out: list[LeftOut] = []
        self.replaced: list[Replaced] = []
        self._path = path
        self._made: dict[int, Value] = {}
        self._alive: list[Value] = []

    def visit(self, value: Value, place: _Place) -> Value:
        """``value`` without objects that are not allowed; shared values, and those inside themselves, stay so."""
        if type(value) in _PLAIN:
            return value
        known = self._made.get(id(value))
        if known is not None:
            if known is _GONE:
                self._left(value, place)
            return known
        self._alive.append(value)
        visit = _VISITS.get(type(value))
        found = self._left(value, place) if visit is None else visit(self, value, place)
        self._made[id(value)] = found
        return found

    def _dict(self, value: dict[Value, Value], place: _Place) -> Value:
        made: dict[Value, Value] = OrderedDict() if isinstance(value, OrderedDict) else {}
        self._made[id(value)] = made
        if isinstance(value, DefaultDict):
            self.replaced.append(Replaced(_shown(place), "collections.defaultdict", "a dict"))
        for key, item in value.items():
            inside = (*place, key if type(key) in (str, int) else repr(key)[:60])
            if not _is_plain_key(key):
                self._left(key, inside)
                continue
            found = self.visit(item, inside)
            if found is not _GONE:
                made[key] = found
        if isinstance(value, OrderedDict) and isinstance(made, OrderedDict) and value.attributes is not None:
            made.attributes = self._dict(value.attributes, (*place, "__dict__"))
        return made

    def _list(self, value: list[Value], place: _Place) -> Value:
        made: list[Value] = []
        self._made[id(value)] = made
        made.extend(self._items(value, place))
        return made

    def _items(self, value: Any, place: _Place) -> Iterator[Value]:
        for position, item in enumerate(value):
            found = self.visit(item, (*place, position))
            yield None if found is _GONE else found

    def _set(self, value: set[Value] | frozenset[Value], place: _Place) -> Value:
        if isinstance(value, frozenset):
            self.replaced.append(Replaced(_shown(place), "builtins.frozenset", "a set"))
        for item in value:
            if not _is_plain_key(item):
                self._left(item, (*place, repr(item)[:60]))
        return {item for item in value if _is_plain_key(item)}

    def _tensor(self, value: StoredTensor, place: _Place) -> Value:
        if value.wrapper not in _WRAPPERS:
            return self._left(value, place)
        if value.state is None:
            return value
        state = self.visit(value.state, (*place, "__dict__"))
        return replace(value, state=None if state is _GONE else state)

    def _object(self, value: Opaque, place: _Place) -> Value:
        if {"_parameters", "_buffers", "_modules"} <= value.attributes.keys():  # a torch.nn.Module of any class
            raise UnsupportedError(
                f"{_shown(place)} is a model ({_kind(value)}) that was pickled whole, and its code alone tells which "
                "tensors it has; where you have and trust that code, save torch.load(FILE, weights_only=False) again "
                "with the model's state_dict() in its place",
                path=self._path,
            )
        if value.ref in _CALLS and (called := self._called(value, place)) is not _GONE:
            return called
        for convert, by in _CONVERSIONS:
            found = convert(value)
            if found is not _GONE:
                self.replaced.append(Replaced(_shown(place), _kind(value), by))
                return self.visit(found, place) if isinstance(found, dict) else found
        return self._left(value, place)

    def _called(self, value: Opaque, place: _Place) -> Value:
        """An allowed call, if all that it is given is allowed too."""
        is_plain = value.form == "call" and value.state is None and not (value.kwargs or value.items or value.pairs)
        before = len(self.left_out)
        args = tuple(self._items(value.args, place)) if is_plain else ()
        if is_plain and len(self.left_out) == before:
            return Opaque(value.ref, args)
        del self.left_out[before:]
        return _GONE

    def _left(self, value: Value, place: _Place) -> Value:
        tensors: set[int] = set()
        extracted(value, lambda tensor: tensors.add(id(tensor)))
        self.left_out.append(LeftOut(_shown(place), _kind(value), len(tensors)))
        return _GONE


_VISITS: Mapping[type, Callable[[_Visitor, Any, _Place], Value]] = {
    dict: _Visitor._dict,
    OrderedDict: _Visitor._dict,
    DefaultDict: _Visitor._dict,
    list: _Visitor._list,
    tuple: lambda visitor, value, place: tuple(visitor._items(value, place)),
    set: _Visitor._set,
    frozenset: _Visitor._set,
    StoredTensor: _Visitor._tensor,
    GlobalRef: lambda visitor, value, place: value if value.dtype is not None else visitor._left(value, place),
    Opaque: _Visitor._object,
}


def _shown(place: _Place) -> str:
    """``optimizer.param_groups[0].lr``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".") or "the whole file"


def _kind(value: Value) -> str:
    """The class of an object, or the function that would make it."""
    if isinstance(value, Opaque):
        return str(value.ref) if isinstance(value.ref, GlobalRef) else "an inner class"
    if isinstance(value, StoredTensor):
        return str(value.wrapper)
    return str(value) if isinstance(value, GlobalRef) else type(value).__name__


def _is_plain_key(value: Value) -> bool:
    """True if the key can be hashed again unchanged and holds nothing that is not allowed."""
    if isinstance(value, tuple):
        return all(map(_is_plain_key, value))
    return type(value) in _PLAIN or (isinstance(value, GlobalRef) and value.dtype is not None)


def _namespace(value: Opaque) -> Value:
    plain = value.ref in _NAMESPACES and not value.args and not value.items and not value.pairs
    return dict(value.attributes) if plain else _GONE


def _path_text(value: Opaque) -> Value:
    parts = value.args if value.ref in _PATHS else (None,)
    return str(PurePosixPath(*parts)) if all(type(part) is str for part in parts) else _GONE


def _number(value: Opaque) -> Value:
    """A numpy scalar: ``scalar(dtype, bytes)``."""
    if value.ref not in _SCALARS or len(value.args) != 2:
        return _GONE
    dtype, data = value.args
    code = _dtype_code(dtype)
    if code is None or type(data) is not bytes or len(data) != np.dtype(code).itemsize:
        return _GONE
    return np.frombuffer(data, code)[0].item()


def _dtype_code(dtype: Value) -> str | None:
    """``dtype('f8', False, True)`` with its byte order in the state: ``(3, '<', None, None, None, -1, -1, 0)``."""
    if not isinstance(dtype, Opaque) or dtype.ref != _NUMPY_DTYPE or not dtype.args:
        return None
    code, state = dtype.args[0], dtype.state
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
    return f"{order}{code}" if code in _NUMPY_CODES and order in ("<", "|") else None


_CONVERSIONS: tuple[tuple[Callable[[Opaque], Value], str], ...] = (
    (_namespace, "a dict"),
    (_path_text, "text"),
    (_number, "a number"),
)
