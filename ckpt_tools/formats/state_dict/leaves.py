"""The leaves of the tree in a torch file, or in an item of a DCP, and the tensors in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.core.manifest import StateKey, TensorRef
from ckpt_tools.core.names import is_extra_state
from ckpt_tools.core.value_refs import has_tensors, is_tree, replace_stored_tensors
from ckpt_tools.core.values import StoredTensor
from ckpt_tools.core.wording import format_count
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.formats.foreign import holds_storage, objects_in
from ckpt_tools.formats.state_dict.leaf import TensorLeaf
from ckpt_tools.formats.state_dict.parse import Leaves, TreePath
from ckpt_tools.serialization.pickle.sharded_tensors import PartReader, ShardedTensorPart, TensorPart
from ckpt_tools.serialization.torch_archive import TorchArchive
from ckpt_tools.serialization.unread_tensors import explain_unreadable

MAX_TREE_DEPTH = 100
"""Dicts in dicts; recursion must end."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a torch archive: byte ``start`` of ``file``. ``item`` is its name in a DCP."""

    archive: TorchArchive
    file: str
    start: int = 0
    item: str = ""

    def leaf(self, tensor: StoredTensor) -> TensorLeaf:
        """Raises UnsupportedError if it is not a plain tensor."""
        reason = explain_unreadable(tensor)
        if reason is not None or tensor.storage is None:
            raise UnsupportedError(reason or "it has no elements")
        start, _ = self.archive.locate_storage(tensor.storage.key)
        return TensorLeaf.of(tensor, self.file, self.start + start)


def with_references(value: Any, place: Place, name: str, inner: dict[StateKey, TensorLeaf]) -> Any:
    """An object whose tensors are added to ``inner`` and leave references.

    Raises:
        UnsupportedError: one of them cannot be read, or the object has a storage without a tensor.
    """
    if type(value) in _PLAIN:
        return value
    found: dict[StateKey, TensorLeaf] = {}

    def refer(tensor: StoredTensor) -> Any:
        if tensor.storage is None:
            return tensor
        key = Leaves.inner_key(name, len(inner) + len(found))
        found[key] = place.leaf(tensor)
        return TensorRef(key)

    try:
        if holds_storage(value):
            reasons = (explain_unreadable(each) for each in objects_in(value) if holds_storage(each.args))
            alone = "it is a storage without a tensor, which cannot be read"
            raise UnsupportedError(next(filter(None, reasons), alone))
        referring = replace_stored_tensors(value, refer)
    except UnsupportedError as error:
        raise UnsupportedError(
            explain_unreadable(value) or f"it holds {error.message.removeprefix('it is ')}"
        ) from error
    inner |= found
    return referring


def tree_leaves(value: Any, path: TreePath, file: str, *, whole_values: bool = False) -> Iterator[tuple[TreePath, Any]]:
    """The leaves of a tree of dicts and of the lists that hold dicts or tensors; other lists are leaves whole, as dicts
    are that are options, or have other keys than texts, and hold no tensors; but not the state of an optimizer.

    ``whole_values`` keeps each value of a parameter's optimizer state, and of ``get_extra_state``, as one leaf: taken
    apart, a list could not be told from a dict of numbers, and an empty dict would be lost.
    """
    if len(path) > MAX_TREE_DEPTH:
        raise MalformedError("its dicts are nested too deeply", path=file)
    if whole_values and path and is_extra_state(path[-1]):
        yield path, value
    elif isinstance(value, dict) and (not path or (value and not _is_object(value, path))):
        for key, inner in value.items():
            below = (*path, key if type(key) is int else str(key))
            if whole_values and key == "state" and "param_groups" in value and isinstance(inner, dict):
                yield from _state_leaves(inner, below, file)
            else:
                yield from tree_leaves(inner, below, file, whole_values=whole_values)
    elif isinstance(value, list) and any(isinstance(inner, dict | StoredTensor) for inner in value):
        for position, inner in enumerate(value):
            yield from tree_leaves(inner, (*path, position), file, whole_values=whole_values)
    else:
        yield path, value


def _is_object(value: dict[Any, Any], path: TreePath) -> bool:
    is_option = path[-3:-2] == ("param_groups",)
    return path[-1] != "state" and (is_option or not is_tree(value)) and not has_tensors(value)


def _state_leaves(state: dict[Any, Any], path: TreePath, file: str) -> Iterator[tuple[TreePath, Any]]:
    """The values of each parameter in an optimizer's state."""
    for owner, slots in state.items():
        below = (*path, owner if type(owner) is int else str(owner))
        if isinstance(slots, dict):
            yield from (((*below, str(slot)), value) for slot, value in slots.items())
        else:
            yield from tree_leaves(slots, below, file)


@dataclass(frozen=True, slots=True)
class FoundLeaves:
    """The leaves of archives as they are added; ``ties`` maps leaves that show the same view as an earlier one to that
    one."""

    paths: dict[str, TreePath] = field(default_factory=dict)
    tensors: dict[str, TensorLeaf] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    inner: dict[StateKey, TensorLeaf] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    _views: dict[tuple[object, ...], str] = field(default_factory=dict)
    _parts: PartReader = field(default_factory=PartReader)

    def add_tree(self, value: Any, path: TreePath, place: Place) -> None:
        """Add the leaves of the tree ``value``, which lies at ``path`` of the whole. Raises FormatError."""
        for each, inner in tree_leaves(value, path, place.file, whole_values=True):
            if not each:
                raise UnsupportedError("it does not contain a dict, so it is not a state dict", path=place.file)
            self.add(".".join(map(str, each)), each, inner, place)

    def add(self, name: str, path: TreePath, value: Any, place: Place) -> None:
        """Add one leaf. Raises MalformedError where another has its name."""
        self.put(name, path, place.file)
        try:
            tensor = self._tensor(value, place.item)
            if tensor is not None:
                self._add_tensor(name, tensor, place)
            else:
                self.objects[name] = with_references(value, place, name, self.inner)
        except UnsupportedError as error:
            self.unread[name] = error.message

    def put(self, name: str, path: TreePath, file: str) -> None:
        """Add the path of a leaf that ``file`` names. Raises MalformedError where another has its name."""
        if name in self.paths:
            raise MalformedError("two entries of the tree have this name", path=file, key=name)
        self.paths[name] = path

    def leaves(self, *, is_ordered: bool = True) -> Leaves:
        """The leaves that were added, in order."""
        return Leaves(self.paths, self.tensors, self.objects, self.inner, is_ordered=is_ordered, unread=self.unread)

    def _add_tensor(self, name: str, tensor: StoredTensor, place: Place) -> None:
        leaf = place.leaf(tensor)
        shown = (tensor.storage, tensor.storage_offset, tensor.shape, tensor.strides, tensor.dtype)
        view = (place.file, place.start, *shown)
        if tensor.numel and view in self._views:
            self.ties[name] = self._views[view]
        else:
            self.tensors[name] = leaf
            self._views[view] = name

    def _tensor(self, value: Any, item: str) -> StoredTensor | None:
        """The tensor that a leaf of ``item`` is; None for an object. Raises UnsupportedError for a part of a tensor."""
        if isinstance(value, StoredTensor) or type(value) in _PLAIN:
            return value if isinstance(value, StoredTensor) else None
        part = self._parts.read_part(value)
        whole = None if part is None else _whole(part)
        parts = (part,) if part is not None else map(self._parts.read_part, objects_in(value))
        cut = next((each for each in parts if each is not None and _whole(each) is None), None)
        if cut is not None:
            kind = "ShardedTensor" if isinstance(cut, ShardedTensorPart) else "DTensor"
            what = "it is" if cut is part else "it holds"
            raise UnsupportedError(
                f"{what} the part of rank {cut.rank} of a {kind} of {format_count(len(cut.ranks), 'rank')}, and its "
                f"item "
                f"{item!r} holds what one rank pickled, without the other parts; save it as an entry of a dict, with "
                "flatten_state_dict=True (the default)"
            )
        return whole


def _whole(part: TensorPart) -> StoredTensor | None:
    """The local tensor if it is the whole one, as on a mesh of one rank, or if it is replicated."""
    if isinstance(part, ShardedTensorPart):
        offsets, local = part.locals[0] if len(part.locals) == 1 else ((1,), None)
        return local if local is not None and local.shape == part.shape and not any(offsets) else None
    return part.local if part.local.shape == part.shape else None
