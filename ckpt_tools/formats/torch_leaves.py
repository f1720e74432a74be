"""The leaves of the tree in a torch file, and the tensors in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt_tools.core.manifest import StateKey, TensorRef
from ckpt_tools.core.value_refs import extracted
from ckpt_tools.core.values import PARAMETER, GlobalRef, StoredTensor
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.formats.state_dict.parse import Leaves, TensorLeaf, TreePath
from ckpt_tools.serialization.torch_archive import TorchArchive

MAX_TREE_DEPTH = 100
"""Dicts in dicts; no state is nested so deeply, and recursion must end."""


_WRAPPERS = (None, PARAMETER)
"""Classes around a tensor whose elements are the tensor's own; others (DTensor, quantized ones) mean more than they
hold."""


_TENSOR = GlobalRef("torch", "Tensor")
"""The class of a tensor that has attributes: FSDP1 sets ``_has_been_cloned`` on every parameter that it gathers."""


def with_references(value: Any, archive: TorchArchive, file: str, name: str, inner: dict[StateKey, TensorLeaf]) -> Any:
    """An object whose tensors are added to ``inner`` and leave references."""

    def refer(tensor: StoredTensor) -> Any:
        if tensor.storage is None:
            return tensor
        key = Leaves.inner_key(name, len(inner))
        inner[key] = tensor_leaf(archive, tensor, file, str(key))
        return TensorRef(key)

    return extracted(value, refer)


def tree_leaves(value: Any, path: TreePath, file: str) -> Iterator[tuple[TreePath, Any]]:
    """The leaves of a tree of dicts and of the lists that hold dicts or tensors; other lists are leaves whole."""
    if len(path) > MAX_TREE_DEPTH:
        raise MalformedError("its dicts are nested too deeply", path=file)
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from tree_leaves(inner, (*path, key if type(key) is int else str(key)), file)
    elif isinstance(value, list) and any(isinstance(inner, dict | StoredTensor) for inner in value):
        for position, inner in enumerate(value):
            yield from tree_leaves(inner, (*path, position), file)
    else:
        yield path, value


def tensor_leaf(archive: TorchArchive, tensor: StoredTensor, file: str, name: str) -> TensorLeaf:
    if tensor.storage is None:
        raise UnsupportedError("this tensor is on the meta device and has no elements", path=file, key=name)
    if tensor.wrapper not in _WRAPPERS and not _has_plain_attributes(tensor):
        raise UnsupportedError(f"a {tensor.wrapper} cannot be read; save plain tensors", path=file, key=name)
    start, _ = archive.storage_range(tensor.storage.key)
    return TensorLeaf.of(tensor, file, start)


def _has_plain_attributes(tensor: StoredTensor) -> bool:
    """Whether it is a torch.Tensor whose attributes cannot change what its elements mean; they are left behind."""
    state = tensor.state if isinstance(tensor.state, tuple) else (tensor.state,)
    return tensor.wrapper == _TENSOR and all(part is None or _is_plain_dict(part) for part in state)


def _is_plain_dict(attributes: Any) -> bool:
    return isinstance(attributes, dict) and all(
        value is None or type(value) in (bool, int, float, str) for value in attributes.values()
    )
