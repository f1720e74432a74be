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
from ckpt_tools.serialization.pickle.machine import TooLongError

Walked = TypeVar("Walked", bound=Sized)

_items_left: ContextVar[list[int] | None] = ContextVar("items_left", default=None)


@contextmanager
def looking_at_most(num_items: int) -> Iterator[None]:
    """Limit the items of lists, tuples and dicts that shapes look at: a million objects may share one long list."""
    token = _items_left.set([num_items])
    try:
        yield
    finally:
        _items_left.reset(token)


def walked(values: Walked, *, weight: int = 1) -> Walked:
    """``values``, each accounted for as ``weight`` items that are looked at. Raises TooLongError."""
    left = _items_left.get()
    if left is not None:
        left[0] -= weight * len(values)
        if left[0] < 0:
            raise TooLongError("its objects share lists or dicts so long that they are not all looked at")
    return values


@dataclass(frozen=True, slots=True)
class Shape:
    """``text`` says in the documentation which values ``accepts`` takes."""

    text: str
    accepts: Callable[[Value], bool]

    def __or__(self, other: Shape) -> Shape:
        return Shape(f"{self.text} or {other.text}", lambda value: self.accepts(value) or other.accepts(value))


def titled(text: str, shape: Shape) -> Shape:
    """The same values, described by ``text``."""
    return Shape(text, shape.accepts)


def exactly(text: str, *kinds: type) -> Shape:
    return Shape(text, lambda value: type(value) in kinds)


INT, STR, BOOL = exactly("int", int), exactly("str", str), exactly("bool", bool)
BYTES, FLOAT = exactly("bytes", bytes), exactly("float", float)
NOTHING = exactly("None", type(None))
NUMBER = exactly("number", int, float)
TENSOR = exactly("tensor", StoredTensor)
SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, GlobalRef, Size})
ANY = Shape("anything (judged by itself)", lambda value: True)
CONTAINER = exactly("list, tuple or dict", list, tuple, dict)
NATURALS = Shape("tuple of ints", are_naturals)


def words(*texts: str) -> Shape:
    """One of these strings."""
    return Shape(" or ".join(map(repr, texts)), lambda value: type(value) is str and value in texts)


def matching(text: str, pattern: str) -> Shape:
    compiled = re.compile(pattern)
    return Shape(text, lambda value: type(value) is str and compiled.fullmatch(value) is not None)


def constant(wanted: Value) -> Shape:
    return Shape(repr(wanted), lambda value: type(value) is type(wanted) and value == wanted)


def name(*texts: str) -> Shape:
    """One of these names, not called."""
    return Shape(" or ".join(texts), lambda value: type(value) is GlobalRef and str(value) in texts)


def named(ref: Value) -> GlobalRef | None:
    """The name that ``ref`` is, or that ``getattr`` looks up in a class, as protocols below 4 name an inner class."""
    if type(ref) is not Opaque:
        return ref if type(ref) is GlobalRef else None
    is_inner = ref.ref == GETATTR and ref.form == "call" and tuple(map(type, ref.args)) == (GlobalRef, str)
    return GlobalRef(ref.args[0].module, f"{ref.args[0].name}.{ref.args[1]}") if is_inner else None


GETATTR = GlobalRef("builtins", "getattr")


def made_of(*texts: str) -> Shape:
    """An object that one of these names made."""
    text = " or ".join(texts)
    return Shape(f"object of {text}", lambda value: type(value) is Opaque and str(named(value.ref)) in texts)


def _each(kind: type[tuple[Value, ...]] | type[list[Value]], shape: Shape) -> Shape:
    def accepts(value: Value) -> bool:
        return type(value) is kind and all(shape.accepts(each) for each in walked(value))

    return Shape(f"{kind.__name__} of {shape.text}", accepts)


def several(shape: Shape) -> Shape:
    """A tuple of any length."""
    return _each(tuple, shape)


def list_of(shape: Shape) -> Shape:
    """A list of any length; later items are checked too, because a proof runs at the end."""
    return _each(list, shape)


def row(*shapes: Shape) -> Shape:
    """A tuple of exactly these."""

    def accepts(value: Value) -> bool:
        is_row = type(value) is tuple and len(value) == len(shapes)
        return is_row and all(shape.accepts(each) for shape, each in zip(shapes, value, strict=True))

    return Shape("(" + ", ".join(shape.text for shape in shapes) + ")", accepts)


def fields(**shapes: Shape) -> Shape:
    """A dict of no other keys than these."""

    def accepts(value: Value) -> bool:
        return type(value) is dict and all(
            key in shapes and shapes[key].accepts(item) for key, item in walked(value).items()
        )

    return Shape("{" + ", ".join(f"{key}: {shape.text}" for key, shape in shapes.items()) + "}", accepts)


def mapping(key: Shape, item: Shape) -> Shape:
    def accepts(value: Value) -> bool:
        return type(value) is dict and all(key.accepts(k) and item.accepts(v) for k, v in walked(value).items())

    return Shape(f"dict of {key.text} to {item.text}", accepts)


def is_attribute(key: Value) -> bool:
    """A name that an object may be given: no hook of Python's own, and none that unpicklers look up."""
    return type(key) is str and not key.startswith("__") and key not in ("append", "extend", "add")


ATTRIBUTES = Shape("dict of attributes", lambda value: type(value) is dict and all(map(is_attribute, walked(value))))
PLAIN_ATTRIBUTES = Shape(
    "dict of attributes that are numbers, strings or names",
    lambda value: ATTRIBUTES.accepts(value) and all(type(item) in SCALARS for item in walked(value).values()),
)


def with_slots(shape: Shape) -> Shape:
    """A pair of dicts, the form in which picklers give attributes in slots."""
    return shape | row(shape | NOTHING, shape | NOTHING)


@dataclass(frozen=True, slots=True)
class Rule:
    """Allowed uses of each of ``names`` of each of ``modules``, and why they run no code of the pickle."""

    modules: str
    names: str
    reason: str
    call: tuple[Shape, ...] = ()
    new: tuple[Shape, ...] = ()
    state: Shape | None = None
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


def plain(modules: str, names: str) -> Rule:
    """A class whose objects are made without arguments and given attributes."""
    return Rule(modules, names, ITS_ATTRIBUTES, new=(NO_ARGUMENTS,), state=with_slots(ATTRIBUTES))
