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

from ckpt_tools.core.value_refs import replace_stored_tensors
from ckpt_tools.core.values import (
    PARAMETER,
    TENSOR_CLASS,
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

_ALLOWED_TENSOR_CLASSES = (None, PARAMETER, TENSOR_CLASS)
"""Classes of tensors that the loader allows."""

_ALLOWED_CALLS = frozenset(
    (
        GlobalRef("torch", "device"),
        GlobalRef("torch.serialization", "_get_layout"),
        GlobalRef("torch._utils", "_rebuild_sparse_tensor"),
        GlobalRef("collections", "Counter"),
    )
)
"""Calls that the loader allows, and that the reader of pickles writes down as objects."""

_NAMESPACE_CLASSES = (GlobalRef("argparse", "Namespace"), GlobalRef("types", "SimpleNamespace"))
_PATH_CLASSES = tuple(GlobalRef("pathlib", name) for name in ("PosixPath", "PurePosixPath"))
_SCALAR_FUNCTIONS = tuple(GlobalRef(module, "scalar") for module in ("numpy.core.multiarray", "numpy._core.multiarray"))
_NUMPY_DTYPE = GlobalRef("numpy", "dtype")
_NUMPY_CODES = frozenset(("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"))

_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, bytearray, Size, StorageRef)


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


class _OmittedPlaceholder:
    """Stands for a value that is left out."""


_OMITTED: Final = _OmittedPlaceholder()


@dataclass(frozen=True, slots=True)
class LoadableValue:
    """A value that the loader takes, and its differences from the original."""

    value: Value
    left_out: tuple[LeftOut, ...]
    replaced: tuple[Replaced, ...]


def make_loadable_value(value: Value, path: str) -> LoadableValue:
    """``value`` of the file ``path`` without names that are not allowed, and what became of these.

    Raises:
        UnsupportedError: it is or holds a model that was pickled whole, or nothing of it would be left.
    """
    visitor = _LoadableVisitor(path)
    loadable_value = visitor.visit(value, ())
    if loadable_value is _OMITTED:
        kind = _describe_class(value)
        raise UnsupportedError(f"it is a {kind}, which torch.load(weights_only=True) refuses", path=path)
    return LoadableValue(loadable_value, tuple(visitor.left_out), tuple(visitor.replaced))


def find_refused_classes(value: Value) -> tuple[str, ...]:
    """The classes of objects in ``value`` that ``torch.load(weights_only=True)`` refuses."""
    visitor = _LoadableVisitor("")
    try:
        visitor.visit(value, ())
    except UnsupportedError:
        return ("torch.nn.Module",)
    kinds = [each.kind for each in visitor.left_out] + [each.kind for each in visitor.replaced]
    return tuple(dict.fromkeys(kinds))


_ValuePath = tuple[str | int, ...]


class _LoadableVisitor:
    def __init__(self, path: str) -> None:
        self.left_out: list[LeftOut] = []
        self.replaced: list[Replaced] = []
        self._path = path
        self._result_by_id: dict[int, Value] = {}
        self._visited_values: list[Value] = []

    def visit(self, value: Value, value_path: _ValuePath) -> Value:
        """``value`` without objects that are not allowed; shared values, and those inside themselves, stay so."""
        if type(value) in _PLAIN_TYPES:
            return value
        visited = self._result_by_id.get(id(value))
        if visited is not None:
            if visited is _OMITTED:
                self._omit_value(value, value_path)
            return visited
        self._visited_values.append(value)
        visit = _VISIT_BY_TYPE.get(type(value))
        result = self._omit_value(value, value_path) if visit is None else visit(self, value, value_path)
        self._result_by_id[id(value)] = result
        return result

    def _visit_dict(self, value: dict[Value, Value], place: _ValuePath) -> Value:
        result: dict[Value, Value] = OrderedDict() if isinstance(value, OrderedDict) else {}
        self._result_by_id[id(value)] = result
        if isinstance(value, DefaultDict):
            self.replaced.append(Replaced(_format_value_path(place), "collections.defaultdict", "a dict"))
        for key, item in value.items():
            item_path = (*place, key if type(key) in (str, int) else repr(key)[:60])
            if not _is_plain_key(key):
                self._omit_value(key, item_path)
                continue
            loadable_item = self.visit(item, item_path)
            if loadable_item is not _OMITTED:
                result[key] = loadable_item
        if isinstance(value, OrderedDict) and isinstance(result, OrderedDict) and value.attributes is not None:
            result.attributes = self._visit_dict(value.attributes, (*place, "__dict__"))
        return result

    def _visit_list(self, value: list[Value], place: _ValuePath) -> Value:
        result: list[Value] = []
        self._result_by_id[id(value)] = result
        result.extend(self._visit_items(value, place))
        return result

    def _visit_items(self, value: Any, place: _ValuePath) -> Iterator[Value]:
        for position, item in enumerate(value):
            found = self.visit(item, (*place, position))
            yield None if found is _OMITTED else found

    def _visit_set(self, value: set[Value] | frozenset[Value], place: _ValuePath) -> Value:
        if isinstance(value, frozenset):
            self.replaced.append(Replaced(_format_value_path(place), "builtins.frozenset", "a set"))
        for item in sorted(value, key=repr):  # an order that is the same in each run
            if not _is_plain_key(item):
                self._omit_value(item, (*place, repr(item)[:60]))
        return {item for item in value if _is_plain_key(item)}

    def _visit_tensor(self, value: StoredTensor, place: _ValuePath) -> Value:
        if value.wrapper not in _ALLOWED_TENSOR_CLASSES:
            return self._omit_value(value, place)
        if value.state is None:
            return value
        state = self.visit(value.state, (*place, "__dict__"))
        return replace(value, state=None if state is _OMITTED else state)

    def _visit_object(self, value: Opaque, place: _ValuePath) -> Value:
        if {"_parameters", "_buffers", "_modules"} <= value.attributes.keys():  # a torch.nn.Module of any class
            raise UnsupportedError(
                f"{_format_value_path(place)} is a model ({_describe_class(value)}) that was pickled whole, and its "
                "code alone tells which tensors it has; where you have and trust that code, save torch.load(FILE, "
                "weights_only=False) again with the model's state_dict() in its place",
                path=self._path,
            )
        if value.ref in _ALLOWED_CALLS and (called := self._visit_call(value, place)) is not _OMITTED:
            return called
        for convert, by in _CONVERSIONS:
            converted = convert(value)
            if converted is not _OMITTED:
                self.replaced.append(Replaced(_format_value_path(place), _describe_class(value), by))
                return self.visit(converted, place) if isinstance(converted, dict) else converted
        return self._omit_value(value, place)

    def _visit_call(self, value: Opaque, place: _ValuePath) -> Value:
        """The call of an allowed function if its arguments are allowed too; else ``_OMITTED``."""
        is_plain = value.form == "call" and value.state is None and not (value.kwargs or value.items or value.pairs)
        num_omitted = len(self.left_out)
        args = tuple(self._visit_items(value.args, place)) if is_plain else ()
        if is_plain and len(self.left_out) == num_omitted:
            return Opaque(value.ref, args)
        del self.left_out[num_omitted:]
        return _OMITTED

    def _omit_value(self, value: Value, place: _ValuePath) -> Value:
        tensors: set[int] = set()
        replace_stored_tensors(value, lambda tensor: tensors.add(id(tensor)))
        self.left_out.append(LeftOut(_format_value_path(place), _describe_class(value), len(tensors)))
        return _OMITTED


_VISIT_BY_TYPE: Mapping[type, Callable[[_LoadableVisitor, Any, _ValuePath], Value]] = {
    dict: _LoadableVisitor._visit_dict,
    OrderedDict: _LoadableVisitor._visit_dict,
    DefaultDict: _LoadableVisitor._visit_dict,
    list: _LoadableVisitor._visit_list,
    tuple: lambda visitor, value, place: tuple(visitor._visit_items(value, place)),
    set: _LoadableVisitor._visit_set,
    frozenset: _LoadableVisitor._visit_set,
    StoredTensor: _LoadableVisitor._visit_tensor,
    GlobalRef: lambda visitor, value, place: value if value.dtype is not None else visitor._omit_value(value, place),
    Opaque: _LoadableVisitor._visit_object,
}


def _format_value_path(place: _ValuePath) -> str:
    """``optimizer.param_groups[0].lr``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".") or "the whole file"


def _describe_class(value: Value) -> str:
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
    return type(value) in _PLAIN_TYPES or (isinstance(value, GlobalRef) and value.dtype is not None)


def _convert_namespace(value: Opaque) -> Value:
    plain = value.ref in _NAMESPACE_CLASSES and not value.args and not value.items and not value.pairs
    return dict(value.attributes) if plain else _OMITTED


def _convert_path(value: Opaque) -> Value:
    parts = value.args if value.ref in _PATH_CLASSES else (None,)
    return str(PurePosixPath(*parts)) if all(type(part) is str for part in parts) else _OMITTED


def _convert_numpy_scalar(value: Opaque) -> Value:
    """A numpy scalar: ``scalar(dtype, bytes)``."""
    if value.ref not in _SCALAR_FUNCTIONS or len(value.args) != 2:
        return _OMITTED
    dtype, data = value.args
    code = _get_dtype_code(dtype)
    if code is None or type(data) is not bytes or len(data) != np.dtype(code).itemsize:
        return _OMITTED
    return np.frombuffer(data, code)[0].item()


def _get_dtype_code(dtype: Value) -> str | None:
    """``dtype('f8', False, True)`` with its byte order in the state: ``(3, '<', None, None, None, -1, -1, 0)``."""
    if not isinstance(dtype, Opaque) or dtype.ref != _NUMPY_DTYPE or not dtype.args:
        return None
    code, state = dtype.args[0], dtype.state
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
    return f"{order}{code}" if code in _NUMPY_CODES and order in ("<", "|") else None


_CONVERSIONS: tuple[tuple[Callable[[Opaque], Value], str], ...] = (
    (_convert_namespace, "a dict"),
    (_convert_path, "text"),
    (_convert_numpy_scalar, "a number"),
)
