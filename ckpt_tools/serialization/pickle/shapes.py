"""Shapes that values of a pickle have, and rules of the closed list: predicates with their descriptions.

A shape looks only at what cannot change any more (scalars, tuples, names), or asks what stays true when a list or dict
grows: a pickle may fill a list after a call took it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from ckpt_tools.core.values import GlobalRef, Opaque, Size, StoredTensor, Value, are_naturals
from ckpt_tools.serialization.pickle.machine import PickleTooLongError, resolve_name

CollectionT = TypeVar("CollectionT", bound=Sized)

_items_left: ContextVar[list[int] | None] = ContextVar("items_left", default=None)


@contextmanager
def limit_walked_items(num_items: int) -> Iterator[None]:
    """Limit the items of lists, tuples and dicts that shapes look at: a million objects may share one long list."""
    token = _items_left.set([num_items])
    try:
        yield
    finally:
        _items_left.reset(token)


def charge_items(values: CollectionT, *, weight: int = 1) -> CollectionT:
    """``values``, each accounted for as ``weight`` items that are looked at. Raises PickleTooLongError."""
    budget = _items_left.get()
    if budget is not None:
        budget[0] -= weight * len(values)
        if budget[0] < 0:
            raise PickleTooLongError("its objects share lists or dicts so long that they are not all looked at")
    return values


@dataclass(frozen=True, slots=True)
class ValueShape:
    """A set of values: those that ``accepts`` takes, described by ``text`` in the documentation."""

    text: str
    accepts: Callable[[Value], bool]

    def __or__(self, other: ValueShape) -> ValueShape:
        return ValueShape(f"{self.text} or {other.text}", lambda value: self.accepts(value) or other.accepts(value))


def with_text(text: str, shape: ValueShape) -> ValueShape:
    """The same values, described by ``text``."""
    return ValueShape(text, shape.accepts)


def instance_of(text: str, *kinds: type) -> ValueShape:
    return ValueShape(text, lambda value: type(value) in kinds)


INT, STR, BOOL = instance_of("int", int), instance_of("str", str), instance_of("bool", bool)
BYTES, FLOAT = instance_of("bytes", bytes), instance_of("float", float)
NOTHING = instance_of("None", type(None))
NUMBER = instance_of("number", int, float)
TENSOR = instance_of("tensor", StoredTensor)
SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, GlobalRef, Size})
ANY = ValueShape("anything (judged by itself)", lambda value: True)
CONTAINER = instance_of("list, tuple or dict", list, tuple, dict)
NATURALS = ValueShape("tuple of ints", are_naturals)


def one_of(*texts: str) -> ValueShape:
    """One of these strings."""
    return ValueShape(" or ".join(map(repr, texts)), lambda value: type(value) is str and value in texts)


def string_matching(text: str, pattern: str) -> ValueShape:
    compiled = re.compile(pattern)
    return ValueShape(text, lambda value: type(value) is str and compiled.fullmatch(value) is not None)


def equal_to(expected: Value) -> ValueShape:
    return ValueShape(repr(expected), lambda value: type(value) is type(expected) and value == expected)


def global_name(*texts: str) -> ValueShape:
    """One of these names, not called."""
    return ValueShape(" or ".join(texts), lambda value: type(value) is GlobalRef and str(value) in texts)


def made_by(*texts: str) -> ValueShape:
    """An object that one of these names made."""
    text = " or ".join(texts)

    def accepts(value: Value) -> bool:
        return type(value) is Opaque and str(resolve_name(value.ref)) in texts

    return ValueShape(f"object of {text}", accepts)


def _sequence_of(kind: type[tuple[Value, ...]] | type[list[Value]], shape: ValueShape) -> ValueShape:
    def accepts(value: Value) -> bool:
        return type(value) is kind and all(shape.accepts(each) for each in charge_items(value))

    return ValueShape(f"{kind.__name__} of {shape.text}", accepts)


def tuple_of(shape: ValueShape) -> ValueShape:
    """A tuple of any length."""
    return _sequence_of(tuple, shape)


def list_of(shape: ValueShape) -> ValueShape:
    """A list of any length; later items are checked too, because a proof runs at the end."""
    return _sequence_of(list, shape)


def row(*shapes: ValueShape) -> ValueShape:
    """A tuple of exactly these."""

    def accepts(value: Value) -> bool:
        is_row = type(value) is tuple and len(value) == len(shapes)
        return is_row and all(shape.accepts(each) for shape, each in zip(shapes, value, strict=True))

    return ValueShape("(" + ", ".join(shape.text for shape in shapes) + ")", accepts)


def fields(**shapes: ValueShape) -> ValueShape:
    """A dict of no other keys than these."""

    def accepts(value: Value) -> bool:
        items = charge_items(value).items() if type(value) is dict else ()
        return type(value) is dict and all(key in shapes and shapes[key].accepts(item) for key, item in items)

    return ValueShape("{" + ", ".join(f"{key}: {shape.text}" for key, shape in shapes.items()) + "}", accepts)


def dict_of(key: ValueShape, item: ValueShape) -> ValueShape:
    def accepts(value: Value) -> bool:
        return type(value) is dict and all(key.accepts(k) and item.accepts(v) for k, v in charge_items(value).items())

    return ValueShape(f"dict of {key.text} to {item.text}", accepts)


def is_attribute(key: Value) -> bool:
    """A name that an object may be given: no hook of Python's own, and none that unpicklers look up."""
    return type(key) is str and not key.startswith("__") and key not in ("append", "extend", "add")


ATTRIBUTES = ValueShape(
    "dict of attributes", lambda value: type(value) is dict and all(map(is_attribute, charge_items(value)))
)
PLAIN_ATTRIBUTES = ValueShape(
    "dict of attributes that are numbers, strings or names",
    lambda value: ATTRIBUTES.accepts(value) and all(type(item) in SCALARS for item in charge_items(value).values()),
)


def with_slots(shape: ValueShape) -> ValueShape:
    """A pair of dicts, the form in which picklers give attributes in slots."""
    return shape | row(shape | NOTHING, shape | NOTHING)


@dataclass(frozen=True, slots=True)
class NameRule:
    """Allowed uses of each of ``names`` of each of ``modules``, and why they run no code of the pickle."""

    modules: str
    names: str
    reason: str
    call: tuple[ValueShape, ...] = ()
    new: tuple[ValueShape, ...] = ()
    state: ValueShape | None = None
    has_items: bool = False
    has_pairs: bool = False

    @property
    def keys(self) -> Iterator[tuple[str, str]]:
        return ((module, each) for module in self.modules.split() for each in self.names.split())


NO_ARGUMENTS = row()
ENUM = row(INT | STR)
AN_ENUM = "an enum looks its member up"
ITS_ATTRIBUTES = "its attributes are set one by one; they cannot be hooks"
A_NAME = "a name by itself: importing torch runs nothing of the pickle's"


def attribute_rule(modules: str, names: str) -> NameRule:
    """A class whose objects are made without arguments and given attributes."""
    return NameRule(modules, names, ITS_ATTRIBUTES, new=(NO_ARGUMENTS,), state=with_slots(ATTRIBUTES))
