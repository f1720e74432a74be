"""The modules of a model with their sizes, as the dots in the names of its tensors tell them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from ckpt_tools.core.collapsing import NumberedNames, merge_number_ranges
from ckpt_tools.messages.showing import Jsonable

if TYPE_CHECKING:
    from ckpt_tools.core.collapsing import TensorSummary

MAX_LEVELS = 50
"""A checkpoint chooses names. What is deeper counts to the module at this level."""


@dataclass(frozen=True, slots=True)
class ModuleSummary(Jsonable):
    """One module, or ``count`` equal ones whose names differ in a number: ``layers.0-31``. The figures are those of all
    of them, with all that is in them.

    ``name`` is empty for the whole model, whose ``depth`` is 0. ``weight_bytes`` is the size of parameters and buffers,
    ``state_bytes`` that of the optimizer's state, ``dtypes`` are those of the parameters and buffers.
    """

    name: str
    depth: int
    count: int
    num_parameters: int
    weight_bytes: int
    state_bytes: int
    dtypes: tuple[str, ...]


def summarize_modules(tensors: Iterable[TensorSummary], depth: int | None = None) -> tuple[ModuleSummary, ...]:
    """The modules above ``tensors`` down to ``depth`` levels (default: all), each before those in it. Tensors of other
    kinds than the model's and the optimizer's are in no module."""
    root = _ModuleNode("")
    for tensor in tensors:
        if tensor.kind != "extra":
            node = root
            for part in tensor.name.split(".", MAX_LEVELS)[:-1]:
                node = node.children.setdefault(part, _ModuleNode(part))
            node.tensors.append(tensor)
    return tuple(_iter_summaries(root, "", 0, 1, MAX_LEVELS if depth is None else depth))


@dataclass(eq=False)
class _ModuleNode:
    name: str
    children: dict[str, _ModuleNode] = field(default_factory=dict)
    tensors: list[TensorSummary] = field(default_factory=list)

    @cached_property
    def structure(self) -> object:
        """Content of the module, without its own name: equal for equal modules."""
        own = frozenset((t.name.rpartition(".")[2], t.slot, t.kind, t.shape, t.dtype) for t in self.tensors)
        return own, frozenset((name, child.structure) for name, child in self.children.items())

    def iter_all_tensors(self) -> Iterator[TensorSummary]:
        yield from self.tensors
        for child in self.children.values():
            yield from child.iter_all_tensors()


def _iter_summaries(node: _ModuleNode, name: str, depth: int, count: int, max_depth: int) -> Iterator[ModuleSummary]:
    tensors = list(node.iter_all_tensors())
    weights = [tensor for tensor in tensors if tensor.kind != "state"]
    numel = sum(prod(tensor.shape) for tensor in weights if tensor.kind == "parameter")
    weight_bytes = sum(tensor.num_bytes for tensor in weights)
    state_bytes = sum(tensor.num_bytes for tensor in tensors) - weight_bytes
    dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in weights))
    yield ModuleSummary(name, depth, count, count * numel, count * weight_bytes, count * state_bytes, dtypes)
    if depth < max_depth:
        for names, child in _group_equal_children(node):
            child_name = f"{name}.{names}" if name else str(names)
            yield from _iter_summaries(child, child_name, depth + 1, count * len(names), max_depth)


def _group_equal_children(node: _ModuleNode) -> list[tuple[NumberedNames, _ModuleNode]]:
    """The children in order; equal ones with consecutive numbers in their names together, each with the first of
    them."""
    children_by_structure: dict[object, dict[tuple[range, ...], _ModuleNode]] = {}
    for child in node.children.values():
        names = NumberedNames.of(child.name)
        children_by_structure.setdefault((names.texts, child.structure), {})[names.ranges] = child
    position_by_name = {name: position for position, name in enumerate(node.children)}
    grouped_children = []
    for members in children_by_structure.values():
        texts = NumberedNames.of(next(iter(members.values())).name).texts
        for ranges in merge_number_ranges(members):
            names = NumberedNames(texts, ranges)
            grouped_children.append((names, node.children[next(iter(names))]))
    return sorted(grouped_children, key=lambda each: position_by_name[each[1].name])
