"""The leaves of the tree in a torch file, or in an item of a DCP, and the tensors in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.core.manifest import StateKey, TensorRef, TreePath
from ckpt_tools.core.names import is_extra_state
from ckpt_tools.core.value_refs import has_tensors, is_tree, replace_stored_tensors
from ckpt_tools.core.values import StoredTensor
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.messages.wording import format_count
from ckpt_tools.serialization.pickle.sharded_tensors import PartReader, ShardedTensorPart, TensorPart
from ckpt_tools.serialization.torch_archive import TorchArchive
from ckpt_tools.serialization.unread_tensors import explain_unreadable
from ckpt_tools.state_tree.incomplete_state import has_bare_storage, iter_opaque_objects
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.state_tree.parse import TreeLeaves

MAX_TREE_DEPTH = 100
"""Dicts in dicts; recursion must end."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


@dataclass(frozen=True, slots=True)
class ArchiveLocation:
    """Place of a torch archive: byte ``start`` of ``file``. ``item`` is its name in a DCP."""

    archive: TorchArchive
    file: str
    start: int = 0
    item: str = ""

    def make_leaf(self, tensor: StoredTensor) -> TensorLeaf:
        """Raises UnsupportedError if it is not a plain tensor."""
        reason = explain_unreadable(tensor)
        if reason is not None or tensor.storage is None:
            raise UnsupportedError(reason or "it has no elements")
        start, _ = self.archive.locate_storage(tensor.storage.key)
        return TensorLeaf.of(tensor, self.file, self.start + start)


def extract_tensors(value: Any, location: ArchiveLocation, name: str, inner: dict[StateKey, TensorLeaf]) -> Any:
    """An object whose tensors are added to ``inner`` and leave references.

    Raises:
        UnsupportedError: one of them cannot be read, or the object has a storage without a tensor.
    """
    if type(value) in _PLAIN:
        return value
    new_tensors: dict[StateKey, TensorLeaf] = {}

    def make_reference(tensor: StoredTensor) -> Any:
        if tensor.storage is None:
            return tensor
        key = TreeLeaves.make_inner_key(name, len(inner) + len(new_tensors))
        new_tensors[key] = location.make_leaf(tensor)
        return TensorRef(key)

    try:
        if has_bare_storage(value):
            reasons = (explain_unreadable(each) for each in iter_opaque_objects(value) if has_bare_storage(each.args))
            bare_storage_reason = "it is a storage without a tensor, which cannot be read"
            raise UnsupportedError(next(filter(None, reasons), bare_storage_reason))
        value_with_refs = replace_stored_tensors(value, make_reference)
    except UnsupportedError as error:
        raise UnsupportedError(
            explain_unreadable(value) or f"it holds {error.message.removeprefix('it is ')}"
        ) from error
    inner |= new_tensors
    return value_with_refs


def iter_tree_leaves(
    value: Any, path: TreePath, file: str, *, whole_values: bool = False
) -> Iterator[tuple[TreePath, Any]]:
    """The leaves of a tree of dicts and of the lists that hold dicts or tensors; other lists are leaves whole, as dicts
    are that are options, or have other keys than texts, and hold no tensors; but not the state of an optimizer.

    ``whole_values`` keeps each value of a parameter's optimizer state, and of ``get_extra_state``, as one leaf: taken
    apart, a list could not be told from a dict of numbers, and an empty dict would be lost.
    """
    # What is taken apart here must be what ``build.iter_leaves`` takes apart, or a round trip would change the tree.
    if len(path) > MAX_TREE_DEPTH:
        raise MalformedError("its dicts are nested too deeply", path=file)
    if whole_values and path and is_extra_state(path[-1]):
        yield path, value
    elif isinstance(value, dict) and (not path or (value and not _is_whole_object(value, path))):
        for key, child in value.items():
            child_path = (*path, key if type(key) is int else str(key))
            if whole_values and key == "state" and "param_groups" in value and isinstance(child, dict):
                yield from _iter_state_leaves(child, child_path, file)
            else:
                yield from iter_tree_leaves(child, child_path, file, whole_values=whole_values)
    elif isinstance(value, list) and any(isinstance(inner, dict | StoredTensor) for inner in value):
        for position, child in enumerate(value):
            yield from iter_tree_leaves(child, (*path, position), file, whole_values=whole_values)
    else:
        yield path, value


def _is_whole_object(value: dict[Any, Any], path: TreePath) -> bool:
    is_option = path[-3:-2] == ("param_groups",)
    return path[-1] != "state" and (is_option or not is_tree(value)) and not has_tensors(value)


def _iter_state_leaves(state: dict[Any, Any], path: TreePath, file: str) -> Iterator[tuple[TreePath, Any]]:
    """The values of each parameter in an optimizer's state."""
    for owner, slots in state.items():
        parameter_path = (*path, owner if type(owner) is int else str(owner))
        if isinstance(slots, dict):
            yield from (((*parameter_path, str(slot)), value) for slot, value in slots.items())
        else:
            yield from iter_tree_leaves(slots, parameter_path, file)


@dataclass(frozen=True, slots=True)
class LeafCollector:
    """The leaves of archives as they are added; ``ties`` maps leaves that show the same view as an earlier one to that
    one."""

    paths: dict[str, TreePath] = field(default_factory=dict)
    tensors: dict[str, TensorLeaf] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    inner: dict[StateKey, TensorLeaf] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    _views: dict[tuple[object, ...], str] = field(default_factory=dict)
    _part_reader: PartReader = field(default_factory=PartReader)

    def add_tree(self, value: Any, path: TreePath, location: ArchiveLocation) -> None:
        """Add the leaves of the tree ``value``, which lies at ``path`` of the whole. Raises FormatError."""
        for leaf_path, inner in iter_tree_leaves(value, path, location.file, whole_values=True):
            if not leaf_path:
                raise UnsupportedError("it does not contain a dict, so it is not a state dict", path=location.file)
            self.add_leaf(".".join(map(str, leaf_path)), leaf_path, inner, location)

    def add_leaf(self, name: str, path: TreePath, value: Any, location: ArchiveLocation) -> None:
        """Add one leaf. Raises MalformedError where another has its name."""
        self.add_path(name, path, location.file)
        try:
            tensor = self._find_tensor(value, location.item)
            if tensor is not None:
                self._add_tensor(name, tensor, location)
            else:
                self.objects[name] = extract_tensors(value, location, name, self.inner)
        except UnsupportedError as error:
            self.unread[name] = error.message

    def add_path(self, name: str, path: TreePath, file: str) -> None:
        """Add the path of a leaf that ``file`` names. Raises MalformedError where another has its name."""
        if name in self.paths:
            raise MalformedError("two entries of the tree have this name", path=file, key=name)
        self.paths[name] = path

    def build_leaves(self, *, is_ordered: bool = True) -> TreeLeaves:
        """The leaves that were added, in order."""
        return TreeLeaves(self.paths, self.tensors, self.objects, self.inner, is_ordered=is_ordered, unread=self.unread)

    def _add_tensor(self, name: str, tensor: StoredTensor, location: ArchiveLocation) -> None:
        leaf = location.make_leaf(tensor)
        storage_view = (tensor.storage, tensor.storage_offset, tensor.shape, tensor.strides, tensor.dtype)
        view = (location.file, location.start, *storage_view)
        if tensor.numel and view in self._views:
            self.ties[name] = self._views[view]
        else:
            self.tensors[name] = leaf
            self._views[view] = name

    def _find_tensor(self, value: Any, item: str) -> StoredTensor | None:
        """The tensor that a leaf of ``item`` is; None for an object. Raises UnsupportedError for a part of a tensor."""
        if isinstance(value, StoredTensor) or type(value) in _PLAIN:
            return value if isinstance(value, StoredTensor) else None
        part = self._part_reader.read_part(value)
        whole_tensor = None if part is None else _find_whole_tensor(part)
        parts = (part,) if part is not None else map(self._part_reader.read_part, iter_opaque_objects(value))
        sharded_part = next((each for each in parts if each is not None and _find_whole_tensor(each) is None), None)
        if sharded_part is not None:
            kind = "ShardedTensor" if isinstance(sharded_part, ShardedTensorPart) else "DTensor"
            subject = "it is" if sharded_part is part else "it holds"
            raise UnsupportedError(
                f"{subject} the part of rank {sharded_part.rank} of a {kind} of "
                f"{format_count(len(sharded_part.ranks), 'rank')}, and its item {item!r} holds what one rank pickled, "
                "without the other parts; save it as an entry of a dict, with flatten_state_dict=True (the default)"
            )
        return whole_tensor


def _find_whole_tensor(part: TensorPart) -> StoredTensor | None:
    """The local tensor if it is the whole one, as on a mesh of one rank, or if it is replicated."""
    if isinstance(part, ShardedTensorPart):
        offsets, local_tensor = part.locals[0] if len(part.locals) == 1 else ((1,), None)
        return (
            local_tensor if local_tensor is not None and local_tensor.shape == part.shape and not any(offsets) else None
        )
    return part.local if part.local.shape == part.shape else None
