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
from ckpt_tools.recipes.sizes import SizeExpression, SizeValues, evaluate_size

PAD_FIELD = "pad"
"""The field that one side alone may have: cropped on the way to the other side, zeros on the way back."""

REST_FIELD = "..."
"""The field of all further axes, as many as the tensor has."""

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_INDEX = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)


@dataclass(frozen=True)
class SinglePosition:
    """One position without a field."""


@dataclass(frozen=True)
class AxisField:
    """A field of ``size`` positions. ``is_bare`` if no size was written: then it is that of the other side."""

    name: str
    size: SizeExpression
    is_bare: bool


@dataclass(frozen=True)
class AxisGroup:
    """Nodes one after the other."""

    items: tuple[AxisNode, ...]


@dataclass(frozen=True)
class AxisLoop:
    """``count`` copies of ``content`` one after the other. With ``index``, each is of another index of that name, which
    the variable of that name counts."""

    count: SizeExpression
    index: str | None
    content: AxisNode


AxisNode = SinglePosition | AxisField | AxisGroup | AxisLoop


@dataclass(frozen=True, slots=True)
class StrideStep:
    """``count`` positions ``stride`` apart; ``index`` names them if they are one index each."""

    index: str | None
    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class AxisLeaf:
    """The positions of a field: nested steps from ``base``, the outermost first. ``field`` is None for an index alone,
    or one position."""

    field: str | None
    base: int
    steps: tuple[StrideStep, ...]


def parse_axes(text: str) -> tuple[AxisNode, ...]:
    """The axes of a shape such as ``{expert} (gate:F up:F) H``.

    Raises:
        UsageError: it is not a shape, or a field or index occurs in two axes.
    """
    axes = tuple(
        AxisField(REST_FIELD, SizeExpression("1"), False) if part == REST_FIELD else _parse_product(part, text)
        for part in _split_outside_brackets(text, text)
    )
    if any(is_rest_axis(axis) for axis in axes[:-1]):
        raise UsageError(f"the shape {text!r} has {REST_FIELD} before other axes; it stands for all further ones")
    names = [name for axis in axes for name in {*list_fields(axis), *(f"{{{index}}}" for index in list_indices(axis))}]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"the shape {text!r} has {name} in two axes; give each its own name")
    for fields in map(list_fields, axes):
        repeated_field = next((name for name in fields if fields.count(name) > 1), None)
        if repeated_field is not None:
            raise UsageError(f"the shape {text!r} has the field {repeated_field} twice; give each its own name")
    return axes


def is_rest_axis(axis: AxisNode) -> bool:
    """True if the axis stands for all further ones."""
    return isinstance(axis, AxisField) and axis.name == REST_FIELD


def expand_rest(axes: tuple[AxisNode, ...], num_rest_axes: int) -> tuple[AxisNode, ...]:
    """The axes with ``num_rest_axes`` axes, each a field of its own, in place of the rest axis."""
    if not axes or not is_rest_axis(axes[-1]):
        return axes
    return (
        *axes[:-1],
        *(AxisField(f"{REST_FIELD}{axis}", SizeExpression(f"rest{axis}"), False) for axis in range(num_rest_axes)),
    )


def _split_outside_brackets(text: str, shape_text: str, separator: str = " ") -> list[str]:
    """Parts of a text between signs that lie in no parentheses."""
    parts, depth = [""], 0
    for letter in text.strip():
        depth += (letter in "({") - (letter in ")}")
        if depth < 0:
            break
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise UsageError(f"the shape {shape_text!r} has a parenthesis or brace without its other half")
    return [part for part in parts if part] if separator == " " else parts


def _parse_product(text: str, shape_text: str) -> AxisNode:
    if re.match(r"[A-Za-z_]\w*:", text, re.ASCII):
        name, _, size = text.partition(":")
        return AxisField(name, _parse_size(size, shape_text), False)
    *counts, last = _split_outside_brackets(text, shape_text, "*")
    node = _parse_content(last, shape_text)
    for count in reversed(counts):
        index = _INDEX.fullmatch(count)
        node = (
            AxisLoop(_parse_size(count, shape_text), None, node)
            if index is None
            else AxisLoop(SizeExpression(index[1]), index[1], node)
        )
    return node


def _parse_size(text: str, shape_text: str) -> SizeExpression:
    """The size in a shape. Raises UsageError."""
    try:
        return SizeExpression(text)
    except UsageError as error:
        raise UsageError(f"the shape {shape_text!r}: {error.message}") from error


def _parse_content(text: str, shape_text: str) -> AxisNode:
    if text == "1":
        return SinglePosition()
    index = _INDEX.fullmatch(text)
    if index is not None:
        return AxisLoop(SizeExpression(index[1]), index[1], SinglePosition())
    if _NAME.fullmatch(text):
        return AxisField(text, SizeExpression(text), True)
    if text.startswith("(") and text.endswith(")"):
        items = tuple(_parse_product(part, shape_text) for part in _split_outside_brackets(text[1:-1], shape_text))
        if items:
            return items[0] if len(items) == 1 else AxisGroup(items)
    raise UsageError(
        f"{text!r} in the shape {shape_text!r} is not an axis; write for example H, {{expert}}, (gate:F up:F) or "
        "G*(q:R*D k:D v:D)"
    )


def _walk_nodes(node: AxisNode) -> Iterator[AxisNode]:
    yield node
    for inner in node.items if isinstance(node, AxisGroup) else (node.content,) if isinstance(node, AxisLoop) else ():
        yield from _walk_nodes(inner)


def list_fields(node: AxisNode) -> list[str]:
    return [each.name for each in _walk_nodes(node) if isinstance(each, AxisField)]


def list_indices(node: AxisNode) -> list[str]:
    return [each.index for each in _walk_nodes(node) if isinstance(each, AxisLoop) and each.index is not None]


def list_leaf_fields(node: AxisNode) -> list[str | None]:
    """The field of each leaf, in the order of ``list_leaves``."""
    match node:
        case SinglePosition():
            return [None]
        case AxisField():
            return [node.name]
        case AxisGroup():
            return [name for item in node.items for name in list_leaf_fields(item)]
        case AxisLoop():
            return list_leaf_fields(node.content)


def find_total_size(node: AxisNode, name: str) -> SizeExpression | None:
    """All elements of a field in an axis, those of each index alone; None if the axis does not have it."""
    match node:
        case AxisField():
            return node.size if node.name == name else None
        case AxisGroup():
            return next((found for item in node.items if (found := find_total_size(item, name)) is not None), None)
        case AxisLoop():
            inner = find_total_size(node.content, name)
            if inner is None or node.index is not None:
                return inner
            return SizeExpression(f"({node.count.text})*({inner.text})")
        case SinglePosition():
            return None


def is_bare_field(node: AxisNode, name: str) -> bool:
    """True if the axis has the field once, and no size is written for it."""
    match node:
        case AxisField():
            return node.name == name and node.is_bare
        case AxisGroup():
            return any(is_bare_field(item, name) for item in node.items)
        case AxisLoop():
            return node.index is not None and is_bare_field(node.content, name)
        case SinglePosition():
            return False


def set_field_size(node: AxisNode, name: str, total_size: SizeExpression) -> AxisNode:
    """The axis whose field ``name`` has ``total_size`` elements, with each index."""
    match node:
        case AxisField():
            return AxisField(name, total_size, False) if node.name == name else node
        case AxisGroup():
            return AxisGroup(tuple(set_field_size(item, name, total_size) for item in node.items))
        case AxisLoop():
            size = total_size if node.index is not None else SizeExpression(f"({total_size.text})/({node.count.text})")
            return AxisLoop(node.count, node.index, set_field_size(node.content, name, size))
        case SinglePosition():
            return node


def build_extent_expression(node: AxisNode) -> SizeExpression:
    """The extent of an axis as an expression."""
    match node:
        case SinglePosition():
            return SizeExpression("1")
        case AxisField():
            return node.size
        case AxisGroup():
            return SizeExpression(" + ".join(build_extent_expression(item).text for item in node.items))
        case AxisLoop():
            return SizeExpression(f"{_parenthesize(node.count)}*{_parenthesize(build_extent_expression(node.content))}")


def _parenthesize(size: SizeExpression) -> str:
    return size.text if size.text.isalnum() else f"({size.text})"


def compute_extent(node: AxisNode, env: SizeValues, context: str) -> int:
    """The extent of an axis. Raises UsageError."""
    match node:
        case SinglePosition():
            return 1
        case AxisField():
            return evaluate_size(node.size, env, context)
        case AxisGroup():
            return sum(compute_extent(item, env, context) for item in node.items)
        case AxisLoop():
            return evaluate_size(node.count, env, context) * compute_extent(node.content, env, context)


def list_leaves(node: AxisNode, env: SizeValues, context: str, base: int = 0) -> list[AxisLeaf]:
    """The leaves of an axis, with the sizes of ``env``. Raises UsageError."""
    # `G*(q:R*D k:D)` is a record of (R+1)*D positions, G times:
    #     q: base 0,    steps (G, stride (R+1)*D), (R*D, stride 1)
    #     k: base R*D,  steps (G, stride (R+1)*D), (D,   stride 1)
    # A group moves `base` by the extent of each item; a loop puts one step in front of those of all that is in it.
    match node:
        case SinglePosition():
            return [AxisLeaf(None, base, ())]
        case AxisField():
            return [AxisLeaf(node.name, base, (StrideStep(None, compute_extent(node, env, context), 1),))]
        case AxisGroup():
            group_leaves = []
            for item in node.items:
                group_leaves += list_leaves(item, env, context, base)
                base += compute_extent(item, env, context)
            return group_leaves
        case AxisLoop():
            step = StrideStep(
                node.index, evaluate_size(node.count, env, context), compute_extent(node.content, env, context)
            )
            leaves = list_leaves(node.content, env, context, base)
            return [AxisLeaf(leaf.field, leaf.base, (step, *leaf.steps)) for leaf in leaves]


def compute_record_extent(node: AxisNode, env: SizeValues, context: str) -> int:
    """The extent of the innermost record; the outer loops repeat it."""
    while isinstance(node, AxisLoop):
        node = node.content
    return compute_extent(node, env, context)
