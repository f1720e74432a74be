"""Axes of tensors as records of fields: ``G*(q:R*D k:D v:D)``. Pure.

An axis is a tree. Its leaves are fields; each is a set of positions of the axis: nested steps from a base. A field is
numbered in the order of its positions, so that the same field of another axis, in another record, holds the same
elements in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from ckpt_tools.errors import UsageError
from ckpt_tools.recipes.sizes import SizeExpression, SizeValues, evaluate_size

PAD_FIELD = "pad"
"""The field that one side alone may have: cropped on the way to the other side, zeros on the way back."""

REST_FIELD = "..."
"""The field of all further axes, as many as the tensor has."""

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_INDEX = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)


_ONE = SizeExpression("1")


@dataclass(frozen=True)
class AxisField:
    """A field of ``size`` positions; without ``name`` it is one position that holds no field. ``is_bare`` if no size
    was written: then it is that of the other side."""

    name: str | None
    size: SizeExpression
    is_bare: bool = False


@dataclass(frozen=True)
class AxisRecord:
    """``items`` one after the other, and ``count`` copies of that one after the other. With ``index``, each copy is of
    another index of that name, which the variable of that name counts."""

    items: tuple[AxisNode, ...]
    count: SizeExpression = _ONE
    index: str | None = None

    @property
    def is_one_copy(self) -> bool:
        return self.index is None and self.count == _ONE

    @property
    def is_plain_loop(self) -> bool:
        """True if the copies are not indices, but parts of the same fields."""
        return self.index is None and self.count != _ONE


AxisNode = AxisField | AxisRecord


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


@cache
def parse_axes(text: str) -> tuple[AxisNode, ...]:
    """The axes of a shape such as ``{expert} (gate:F up:F) H``.

    Raises:
        UsageError: it is not a shape, or a field or index occurs in two axes.
    """
    axes = tuple(
        AxisField(REST_FIELD, _ONE) if part == REST_FIELD else _parse_product(part, text)
        for part in _split_outside_brackets(text, text)
    )
    if any(is_rest_axis(axis) for axis in axes[:-1]):
        raise UsageError(f"the shape {text!r} has {REST_FIELD} before other axes; it stands for all further ones")
    fields_by_axis = list(map(list_fields, axes))
    names = [
        name
        for axis, fields in zip(axes, fields_by_axis, strict=True)
        for name in {*fields, *(f"{{{index}}}" for index in list_indices(axis))}
    ]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"the shape {text!r} has {name} in two axes; give each its own name")
    for fields in fields_by_axis:
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
        *(AxisField(f"{REST_FIELD}{axis}", SizeExpression(f"rest{axis}")) for axis in range(num_rest_axes)),
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
        return AxisField(name, _parse_size(size, shape_text))
    *counts, last = _split_outside_brackets(text, shape_text, "*")
    node = _parse_content(last, shape_text)
    for count in reversed(counts):
        index = _INDEX.fullmatch(count)
        node = AxisRecord((node,), _parse_size(count, shape_text)) if index is None else _make_index(index[1], node)
    return node


def _make_index(name: str, item: AxisNode) -> AxisRecord:
    return AxisRecord((item,), SizeExpression(name), name)


def _parse_size(text: str, shape_text: str) -> SizeExpression:
    """The size in a shape. Raises UsageError."""
    try:
        return SizeExpression(text)
    except UsageError as error:
        raise UsageError(f"the shape {shape_text!r}: {error.message}") from error


def _parse_content(text: str, shape_text: str) -> AxisNode:
    if text == "1":
        return AxisField(None, _ONE)
    index = _INDEX.fullmatch(text)
    if index is not None:
        return _make_index(index[1], AxisField(None, _ONE))
    if _NAME.fullmatch(text):
        return AxisField(text, SizeExpression(text), is_bare=True)
    if text.startswith("(") and text.endswith(")"):
        items = tuple(_parse_product(part, shape_text) for part in _split_outside_brackets(text[1:-1], shape_text))
        if items:
            return items[0] if len(items) == 1 else AxisRecord(items)
    raise UsageError(
        f"{text!r} in the shape {shape_text!r} is not an axis; write for example H, {{expert}}, (gate:F up:F) or "
        "G*(q:R*D k:D v:D)"
    )


def _iter_fields(node: AxisNode, *records: AxisRecord) -> Iterator[tuple[AxisField, tuple[AxisRecord, ...]]]:
    """Each field with the records around it, the outermost first."""
    if isinstance(node, AxisField):
        yield node, records
    else:
        for item in node.items:
            yield from _iter_fields(item, *records, node)


def list_leaf_fields(node: AxisNode) -> list[str | None]:
    """The field of each leaf, in the order of ``list_leaves``."""
    return [field.name for field, _ in _iter_fields(node)]


def list_fields(node: AxisNode) -> list[str]:
    return [name for name in list_leaf_fields(node) if name is not None]


def list_indices(node: AxisNode) -> set[str]:
    return {each.index for _, records in _iter_fields(node) for each in records if each.index is not None}


def find_field_sizes(axes: Iterable[AxisNode]) -> dict[str, SizeExpression]:
    """All elements of each field whose size is written, those of each index alone."""
    sizes: dict[str, SizeExpression] = {}
    for field, records in (each for axis in axes for each in _iter_fields(axis)):
        loops = [record for record in records if record.is_plain_loop]
        if field.name is None or (field.is_bare and not loops):
            continue
        size = field.size
        for loop in reversed(loops):
            size = SizeExpression(f"({loop.count.text})*({size.text})")
        sizes.setdefault(field.name, size)
    return sizes


def fill_bare_sizes(node: AxisNode, sizes: Mapping[str, SizeExpression]) -> AxisNode:
    """The axis whose bare fields have ``sizes``. In a loop without an index a bare field stays a variable."""
    if isinstance(node, AxisField):
        size = sizes.get(node.name or "") if node.is_bare else None
        return node if size is None else AxisField(node.name, size)
    if node.is_plain_loop:
        return node
    return replace(node, items=tuple(fill_bare_sizes(item, sizes) for item in node.items))


def build_extent_expression(node: AxisNode) -> SizeExpression:
    """The extent of an axis as an expression."""
    if isinstance(node, AxisField):
        return node.size
    record = SizeExpression(" + ".join(build_extent_expression(item).text for item in node.items))
    return record if node.is_one_copy else SizeExpression(f"{_parenthesize(node.count)}*{_parenthesize(record)}")


def _parenthesize(size: SizeExpression) -> str:
    return size.text if size.text.isalnum() else f"({size.text})"


def compute_extent(node: AxisNode, env: SizeValues, context: str) -> int:
    """The extent of an axis. Raises UsageError."""
    if isinstance(node, AxisField):
        return evaluate_size(node.size, env, context)
    return evaluate_size(node.count, env, context) * sum(compute_extent(item, env, context) for item in node.items)


def compute_record_extent(node: AxisNode, env: SizeValues, context: str) -> int:
    """The extent of the innermost record; the outer loops repeat it."""
    while isinstance(node, AxisRecord) and len(node.items) == 1:
        (node,) = node.items
    return compute_extent(node, env, context)


def list_leaves(node: AxisNode, env: SizeValues, context: str, base: int = 0) -> list[AxisLeaf]:
    """The leaves of an axis, with the sizes of ``env``. Raises UsageError."""
    # `G*(q:R*D k:D)` is a record of (R+1)*D positions, G times:
    #     q: base 0,    steps (G, stride (R+1)*D), (R*D, stride 1)
    #     k: base R*D,  steps (G, stride (R+1)*D), (D,   stride 1)
    # Each item moves `base` by its extent; copies put one step in front of those of all that is in them.
    if isinstance(node, AxisField):
        steps = () if node.name is None else (StrideStep(None, compute_extent(node, env, context), 1),)
        return [AxisLeaf(node.name, base, steps)]
    leaves, start = list[AxisLeaf](), base
    for item in node.items:
        leaves += list_leaves(item, env, context, base)
        base += compute_extent(item, env, context)
    if node.is_one_copy:
        return leaves
    step = StrideStep(node.index, evaluate_size(node.count, env, context), base - start)
    return [AxisLeaf(leaf.field, leaf.base, (step, *leaf.steps)) for leaf in leaves]
