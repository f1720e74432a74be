"""Checks of a value after its pickle was read: it can be walked, and its records hold the right types."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NoReturn

from ckpt_tools.core.values import DefaultDict, GlobalRef, Opaque, OrderedDict, Size, StorageRef, StoredTensor, Value
from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.pickle.dcp_metadata import Record

MAX_DEPTH = 100
"""Containers inside containers. Training states nest less than 20 deep; walking 100 stays far below Python's recursion
limit of 1,000 frames."""

SPARE_NODES = 1 << 16
"""Values that need no justification by size, twice the bytes come on top."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, Size, StorageRef, GlobalRef})
_FLAT = frozenset({list, tuple, dict, OrderedDict, DefaultDict, set, frozenset})
_OPEN = -1
_SMALL = 8


class Checker:
    """Walks a loaded value once: bounds nesting and sharing, refuses containers inside themselves, checks records.

    An ``Opaque`` may contain itself, as objects do. What holds only scalars is not looked at one by one. Lists that
    share their items double with every level, and whoever compares, prints or writes them walks them all: unfolded, a
    value may have ``SPARE_NODES`` parts and two a byte of the pickle, where each takes a byte at least.
    """

    def __init__(self, num_bytes: int) -> None:
        # By id: how deep a value nests, and how many parts it unfolds to. All values live as long as the walk.
        self._heights: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._max_size = SPARE_NODES + 2 * num_bytes

    def check(self, value: Value, depth: int = 0) -> int:
        """Nesting depth of ``value``, which is ``depth`` deep itself. Raises MalformedError."""
        if type(value) in _SCALARS:
            return 0
        if type(value) is tuple and len(value) <= _SMALL and _SCALARS.issuperset(map(type, value)):
            # A DCP has a path for each tensor: what is known of each would take more room than the path.
            if depth >= MAX_DEPTH:
                self._refuse_depth()
            return 1
        height = self._heights.get(id(value))
        if height is None:
            height = self._fresh(value, depth)
        elif height == _OPEN:
            if not isinstance(value, Opaque):
                raise MalformedError("a container contains itself")
            return 0
        if depth + height > MAX_DEPTH:
            self._refuse_depth()
        return height

    def _fresh(self, value: Value, depth: int) -> int:
        if depth >= MAX_DEPTH:
            self._refuse_depth()
        self._heights[id(value)] = _OPEN
        inner, size = 0, 1
        for group in _parts(value):
            size += len(group)
            if not set(map(type, group)) <= _SCALARS:
                inner = max(inner, *(self.check(part, depth + 1) for part in group))
                size += sum(map(self._size, group))
        if size > self._max_size:
            raise MalformedError("values that share their parts many times over")
        self._heights[id(value)] = inner + 1
        if inner:
            self._sizes[id(value)] = size
        return inner + 1

    def _refuse_depth(self) -> NoReturn:
        raise MalformedError(f"values are nested more than {MAX_DEPTH} levels deep")

    def _size(self, value: Value) -> int:
        """Parts that a checked value unfolds to; those of one that holds only scalars are not kept, but counted."""
        return self._sizes.get(id(value), 0) or (len(value) + 1 if type(value) in _FLAT else 1)


def _parts(value: Value) -> Iterable[Collection[Value]]:
    """Contents of a value, in groups."""
    if isinstance(value, OrderedDict):
        return (value.keys(), value.values(), (value.attributes,))
    if isinstance(value, dict):
        return (value.keys(), value.values())
    if isinstance(value, Record):
        return (value.check(),)
    if isinstance(value, Opaque):
        return ((value.ref, value.args, value.kwargs, value.state, value.items, value.pairs),)
    if isinstance(value, StoredTensor):
        return ((value.state,),)
    return (value,)
