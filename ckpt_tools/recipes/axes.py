"""Axes of tensors as records of fields: ``G*(q:R*D k:D v:D)``. Pure.

An axis is a tree. Its leaves are fields; each is a set of positions of the axis: nested steps from a base. A field is
numbered in the order of its positions, so that the same field of another axis, in another record, holds the same
elements in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tools.errors import UsageError
from ckpt_tools.recipes.sizes import Env, Size, checked

PAD = "pad"
"""The field that one side alone may have: cropped on the way to the other side, zeros on the way back."""

REST = "..."
"""The field of all further axes, as many as the tensor has."""

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_INDEX = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)


@dataclass(frozen=True)
class One:
    """One position without a field."""


@dataclass(frozen=True)
class Field:
    """A field of ``size`` positions. ``is_bare`` if no size was written: then it is that of the other side."""

    name: str
    size: Size
    is_bare: bool


@dataclass(frozen=True)
class Group:
    """Nodes one after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Loop:
    """``count`` copies of ``content`` one after the other. With ``index``, each is of another index of that name, which
    the variable of that name counts."""

    count: Size
    index: str | None
    content: Node


Node = One | Field | Group | Loop


@dataclass(frozen=True, slots=True)
class Step:
    """``count`` positions ``stride`` apart; ``index`` names them if they are one index each."""

    index: str | None
    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """The positions of a field: nested steps from ``base``, the outermost first. ``field`` is None for an index alone,
    or one position."""

    field: str | None
    base: int
    steps: tuple[Step, ...]


def parse_axes(text: str) -> tuple[Node, ...]:
    """The axes of a shape such as ``{expert} (gate:F up:F) H``.

    Raises:
        UsageError: it is not a shape, or a field or index occurs in two axes.
    """
    axes = tuple(Field(REST, Size("1"), False) if part == REST else _product(part, text) for part in _split(text, text))
    if any(is_rest(axis) for axis in axes[:-1]):
        raise UsageError(f"the shape {text!r} has {REST} before other axes; it stands for all further ones")
    names = [name for axis in axes for name in {*fields_of(axis), *(f"{{{index}}}" for index in indices_of(axis))}]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"the shape {text!r} has {name} in two axes; give each its own name")
    for fields in map(fields_of, axes):
        again = next((name for name in fields if fields.count(name) > 1), None)
        if again is not None:
            raise UsageError(f"the shape {text!r} has the field {again} twice; give each its own name")
    return axes


def is_rest(axis: Node) -> bool:
    """True if the axis stands for all further ones."""
    return isinstance(axis, Field) and axis.name == REST


def with_rest(axes: tuple[Node, ...], number: int) -> tuple[Node, ...]:
    """The axes with ``number`` ones, each a field of its own, in place of the rest."""
    if not axes or not is_rest(axes[-1]):
        return axes
    return (*axes[:-1], *(Field(f"{REST}{axis}", Size(f"rest{axis}"), False) for axis in range(number)))


def _split(text: str, whole: str, sign: str = " ") -> list[str]:
    """Parts of a text between signs that lie in no parentheses."""
    parts, depth = [""], 0
    for letter in text.strip():
        depth += (letter in "({") - (letter in ")}")
        if depth < 0:
            break
        if letter == sign and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise UsageError(f"the shape {whole!r} has a parenthesis or brace without its other half")
    return [part for part in parts if part] if sign == " " else parts


def _product(text: str, whole: str) -> Node:
    if re.match(r"[A-Za-z_]\w*:", text, re.ASCII):
        name, _, size = text.partition(":")
        return Field(name, _size(size, whole), False)
    *counts, last = _split(text, whole, "*")
    node = _content(last, whole)
    for count in reversed(counts):
        index = _INDEX.fullmatch(count)
        node = Loop(_size(count, whole), None, node) if index is None else Loop(Size(index[1]), index[1], node)
    return node


def _size(text: str, whole: str) -> Size:
    """The size in a shape. Raises UsageError."""
    try:
        return Size(text)
    except UsageError as error:
        raise UsageError(f"the shape {whole!r}: {error.message}") from error


def _content(text: str, whole: str) -> Node:
    if text == "1":
        return One()
    index = _INDEX.fullmatch(text)
    if index is not None:
        return Loop(Size(index[1]), index[1], One())
    if _NAME.fullmatch(text):
        return Field(text, Size(text), True)
    if text.startswith("(") and text.endswith(")"):
        items = tuple(_product(part, whole) for part in _split(text[1:-1], whole))
        if items:
            return items[0] if len(items) == 1 else Group(items)
    raise UsageError(
        f"{text!r} in the shape {whole!r} is not an axis; write for example H, {{expert}}, (gate:F up:F) or "
        "G*(q:R*D k:D v:D)"
    )


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for inner in node.items if isinstance(node, Group) else (node.content,) if isinstance(node, Loop) else ():
        yield from _nodes(inner)


def fields_of(node: Node) -> list[str]:
    return [each.name for each in _nodes(node) if isinstance(each, Field)]


def indices_of(node: Node) -> list[str]:
    return [each.index for each in _nodes(node) if isinstance(each, Loop) and each.index is not None]


def leaf_fields(node: Node) -> list[str | None]:
    """The field of each leaf, in the order of ``leaves``."""
    match node:
        case One():
            return [None]
        case Field():
            return [node.name]
        case Group():
            return [name for item in node.items for name in leaf_fields(item)]
        case Loop():
            return leaf_fields(node.content)


def total(node: Node, name: str) -> Size | None:
    """All elements of a field in an axis, those of each index alone; None if the axis does not have it."""
    match node:
        case Field():
            return node.size if node.name == name else None
        case Group():
            return next((found for item in node.items if (found := total(item, name)) is not None), None)
        case Loop():
            inner = total(node.content, name)
            if inner is None or node.index is not None:
                return inner
            return Size(f"({node.count.text})*({inner.text})")
        case One():
            return None


def is_bare(node: Node, name: str) -> bool:
    """True if the axis has the field once, and no size is written for it."""
    match node:
        case Field():
            return node.name == name and node.is_bare
        case Group():
            return any(is_bare(item, name) for item in node.items)
        case Loop():
            return node.index is not None and is_bare(node.content, name)
        case One():
            return False


def with_size(node: Node, name: str, whole: Size) -> Node:
    """The axis whose field ``name`` has ``whole`` elements, with each index."""
    match node:
        case Field():
            return Field(name, whole, False) if node.name == name else node
        case Group():
            return Group(tuple(with_size(item, name, whole) for item in node.items))
        case Loop():
            part = whole if node.index is not None else Size(f"({whole.text})/({node.count.text})")
            return Loop(node.count, node.index, with_size(node.content, name, part))
        case One():
            return node


def extent_size(node: Node) -> Size:
    """The extent of an axis as an expression."""
    match node:
        case One():
            return Size("1")
        case Field():
            return node.size
        case Group():
            return Size(" + ".join(extent_size(item).text for item in node.items))
        case Loop():
            return Size(f"{_factor(node.count)}*{_factor(extent_size(node.content))}")


def _factor(size: Size) -> str:
    return size.text if size.text.isalnum() else f"({size.text})"


def extent(node: Node, env: Env, what: str) -> int:
    """The extent of an axis. Raises UsageError."""
    match node:
        case One():
            return 1
        case Field():
            return checked(node.size, env, what)
        case Group():
            return sum(extent(item, env, what) for item in node.items)
        case Loop():
            return checked(node.count, env, what) * extent(node.content, env, what)


def leaves(node: Node, env: Env, what: str, base: int = 0) -> list[Leaf]:
    """The leaves of an axis, with the sizes of ``env``. Raises UsageError."""
    match node:
        case One():
            return [Leaf(None, base, ())]
        case Field():
            return [Leaf(node.name, base, (Step(None, extent(node, env, what), 1),))]
        case Group():
            found = []
            for item in node.items:
                found += leaves(item, env, what, base)
                base += extent(item, env, what)
            return found
        case Loop():
            step = Step(node.index, checked(node.count, env, what), extent(node.content, env, what))
            return [Leaf(leaf.field, leaf.base, (step, *leaf.steps)) for leaf in leaves(node.content, env, what, base)]


def record_extent(node: Node, env: Env, what: str) -> int:
    """The extent of the innermost record; the outer loops repeat it."""
    while isinstance(node, Loop):
        node = node.content
    return extent(node, env, what)
