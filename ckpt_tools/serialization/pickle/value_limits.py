"""A walk over a loaded value that bounds how deep it nests and how large it is with what it shares written out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NoReturn

from ckpt_tools.core.values import (
    DefaultDict,
    GlobalRef,
    Opaque,
    OrderedDict,
    Size,
    StorageRef,
    StoredTensor,
    Value,
)
from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.pickle.dcp_metadata import DcpRecord

MAX_DEPTH = 100
"""Containers inside containers. Training states nest less than 20 deep; walking 100 stays far below Python's recursion
limit of 1,000 frames."""

SPARE_NODES = 1 << 16
"""Values that need no justification by size, twice the bytes come on top."""

_SCALAR_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, Size, StorageRef, GlobalRef})
_CONTAINER_TYPES = frozenset({list, tuple, dict, OrderedDict, DefaultDict, set, frozenset})
_IN_PROGRESS = -1
_SMALL_TUPLE_ITEMS = 8


class ValueChecker:
    """Walks a loaded value once: bounds nesting and sharing, refuses containers inside themselves, checks records.

    An ``Opaque`` may contain itself, as objects do. Containers of scalars alone are not walked. Lists that share their
    items double with every level, and every comparison, print or write walks them all: unfolded, a value may have
    ``SPARE_NODES`` parts and two a byte of the pickle, where each takes a byte at least.
    """

    def __init__(self, num_bytes: int) -> None:
        # By id: how deep a value nests, _IN_PROGRESS while it is walked (met again then, it contains itself); and how
        # many parts it has if shared ones are counted each time. All values live as long as the walk.
        self._heights: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._max_size = SPARE_NODES + 2 * num_bytes

    def check_value(self, value: Value, depth: int = 0) -> int:
        """Nesting depth of ``value``, which is ``depth`` deep itself. Raises MalformedError."""
        if type(value) in _SCALAR_TYPES:
            return 0
        if type(value) is tuple and len(value) <= _SMALL_TUPLE_ITEMS and _SCALAR_TYPES.issuperset(map(type, value)):
            # A DCP has a path for each tensor: what is known of each would take more room than the path.
            if depth >= MAX_DEPTH:
                self._refuse_depth()
            return 1
        height = self._heights.get(id(value))
        if height is None:
            height = self._walk_value(value, depth)
        elif height == _IN_PROGRESS:
            if not isinstance(value, Opaque):
                raise MalformedError("a container contains itself")
            return 0
        if depth + height > MAX_DEPTH:
            self._refuse_depth()
        return height

    def _walk_value(self, value: Value, depth: int) -> int:
        if depth >= MAX_DEPTH:
            self._refuse_depth()
        self._heights[id(value)] = _IN_PROGRESS
        inner_height, size = 0, 1
        for group in _group_parts(value):
            size += len(group)
            if not set(map(type, group)) <= _SCALAR_TYPES:
                inner_height = max(inner_height, *(self.check_value(part, depth + 1) for part in group))
                size += sum(map(self._get_unfolded_size, group))
        if size > self._max_size:
            raise MalformedError("values that share their parts many times over")
        self._heights[id(value)] = inner_height + 1
        if inner_height:
            self._sizes[id(value)] = size
        return inner_height + 1

    def _refuse_depth(self) -> NoReturn:
        raise MalformedError(f"values are nested more than {MAX_DEPTH} levels deep")

    def _get_unfolded_size(self, value: Value) -> int:
        """Parts that a checked value unfolds to; those of one that holds only scalars are not kept, but counted."""
        return self._sizes.get(id(value), 0) or (len(value) + 1 if type(value) in _CONTAINER_TYPES else 1)


def _group_parts(value: Value) -> Iterable[Collection[Value]]:
    """Contents of a value, in groups."""
    if isinstance(value, OrderedDict):
        return (value.keys(), value.values(), (value.attributes,))
    if isinstance(value, dict):
        return (value.keys(), value.values())
    if isinstance(value, DcpRecord):
        return (value.check_fields(),)
    if isinstance(value, Opaque):
        return ((value.ref, value.args, value.kwargs, value.state, value.items, value.pairs),)
    if isinstance(value, StoredTensor):
        return ((value.state,),)
    return (value,)
