"""The modules of a model with their sizes, as the dots in the names of its tensors tell them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ckpt_tools.core.collapsing import Names, joined
from ckpt_tools.core.showing import Jsonable

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


def modules(tensors: Iterable[TensorSummary], depth: int | None = None) -> tuple[ModuleSummary, ...]:
    """The modules above ``tensors`` down to ``depth`` levels (default: all), each before those in it. Tensors of other
    kinds than the model's and the optimizer's are in no module."""
    root = _Node("")
    for tensor in tensors:
        if tensor.kind != "extra":
            node = root
            for part in tensor.name.split(".", MAX_LEVELS)[:-1]:
                node = node.children.setdefault(part, _Node(part))
            node.tensors.append(tensor)
    return tuple(_rows(root, "", 0, 1, MAX_LEVELS if depth is None else depth))


@dataclass(eq=False)
class _Node:
    name: str
    children: dict[str, _Node] = field(default_factory=dict)
    tensors: list[TensorSummary] = field(default_factory=list)

    @cached_property
    def form(self) -> object:
        """Content of the module, without its own name: equal for equal modules."""
        own = frozenset((t.name.rpartition(".")[2], t.slot, t.kind, t.shape, t.dtype) for t in self.tensors)
        return own, frozenset((name, child.form) for name, child in self.children.items())

    def all_tensors(self) -> Iterator[TensorSummary]:
        yield from self.tensors
        for child in self.children.values():
            yield from child.all_tensors()


def _rows(node: _Node, name: str, depth: int, count: int, levels: int) -> Iterator[ModuleSummary]:
    tensors = list(node.all_tensors())
    weights = [tensor for tensor in tensors if tensor.kind != "state"]
    numel = sum(_numel(tensor) for tensor in weights if tensor.kind == "parameter")
    held = sum(tensor.num_bytes for tensor in weights)
    state = sum(tensor.num_bytes for tensor in tensors) - held
    dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in weights))
    yield ModuleSummary(name, depth, count, count * numel, count * held, count * state, dtypes)
    if depth < levels:
        for names, child in _siblings(node):
            yield from _rows(child, f"{name}.{names}" if name else str(names), depth + 1, count * len(names), levels)


def _numel(tensor: TensorSummary) -> int:
    numel = 1
    for extent in tensor.shape:
        numel *= extent
    return numel


def _siblings(node: _Node) -> list[tuple[Names, _Node]]:
    """The children in order; equal ones with consecutive numbers in their names together, each with the first of
    them."""
    groups: dict[object, dict[tuple[range, ...], _Node]] = {}
    for child in node.children.values():
        names = Names.of(child.name)
        groups.setdefault((names.texts, child.form), {})[names.ranges] = child
    order = {name: position for position, name in enumerate(node.children)}
    found = []
    for members in groups.values():
        texts = Names.of(next(iter(members.values())).name).texts
        for ranges in joined(members):
            names = Names(texts, ranges)
            found.append((names, node.children[next(iter(names))]))
    return sorted(found, key=lambda each: order[each[1].name])
