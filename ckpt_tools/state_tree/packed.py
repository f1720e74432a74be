"""A tree of state for a format that can store tensors by name and a text, and nothing else.

The text is base64 of a pickle of inert values: where each entry stood in the tree, and the entries that are not
tensors. Reading it runs nothing. A tensor inside an entry is a tensor of the file, which the pickle names as torch's
names a storage.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from ckpt_tools.core.boxes import contiguous_strides
from ckpt_tools.core.manifest import EXTRA_SLOT, Kind, Manifest, StateKey, StateTree, TensorRef, TreePath
from ckpt_tools.core.names import is_extra_state
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.value_refs import replace_stored_tensors, replace_tensor_refs
from ckpt_tools.core.values import StorageRef, StoredTensor
from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.pickle.dump import dumps_with_storages
from ckpt_tools.serialization.pickle.load import loads
from ckpt_tools.serialization.torch_archive import parse_storage_id
from ckpt_tools.state_tree.build import Entries
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.state_tree.parse import TreeLeaves, build_manifest
from ckpt_tools.state_tree.prefixes import MAX_PATH_PARTS

OPTIM = "optim"
TREE = StateTree((), (OPTIM,))
"""Where such a file keeps model and optimizer."""


@dataclass(frozen=True, slots=True)
class PackedState:
    """A tree of state: its ``text``, and by name in the file the ``tensors`` that objects hold inside."""

    text: str
    tensors: Mapping[str, StateKey]


def packed(manifest: Manifest, entries: Entries) -> PackedState:
    """All of ``entries`` but their tensors as a text, which says which tensors are the user's own."""
    names: dict[StateKey, str] = {}

    def store_tensor(ref: TensorRef) -> StoredTensor:
        if ref.key not in names:
            base, taken = str(ref.key), {*entries.paths, *names.values()}
            choices = chain([base], (f"{base}'{n}" for n in count(1)))
            names[ref.key] = next(each for each in choices if each not in taken)
        entry = manifest.tensors[ref.key]
        storage = StorageRef.of_elements(names[ref.key], entry.dtype, entry.numel)
        return StoredTensor(storage, entry.dtype, 0, entry.shape, contiguous_strides(entry.shape))

    objects = {name: replace_tensor_refs(value, store_tensor) for name, value in entries.objects.items()}
    own = [name for name, key in entries.tensors.items() if manifest.tensors[key].kind is Kind.EXTRA]
    data, _ = dumps_with_storages({"paths": dict(entries.paths), "objects": objects, "own": own})
    return PackedState(base64.b64encode(data).decode(), {name: key for key, name in names.items()})


def unpacked(
    text: str,
    tensors: Mapping[str, TensorLeaf],
    ties: Mapping[str, str],
    options: ReadOptions,
    *,
    format_name: str,
    where: str,
) -> Manifest:
    """The manifest of ``tensors`` and of the ``text`` that ``packed`` made. ``ties`` maps other names of tensors to
    their names in ``tensors``; ``where`` names the text in messages.

    Raises:
        FormatError: ``packed`` did not make this text, or it does not fit the tensors. UsageError: a key of ``options``
        leads nowhere.
    """
    paths, objects, own_names = _decode_text(text, where)
    for alias, owner in ties.items():
        if owner not in tensors or alias in tensors or alias in objects:
            raise MalformedError(f"it is tied to {owner!r}, which cannot be", key=alias)
    inner_tensors: dict[StateKey, TensorLeaf] = {}
    objects = {
        name: replace_stored_tensors(value, lambda found: _make_reference(found, tensors, inner_tensors))
        for name, value in objects.items()
    }
    tree_tensors = {name: leaf for name, leaf in tensors.items() if _make_inner_key(name) not in inner_tensors}
    names = dict.fromkeys((*tree_tensors, *ties))
    paths = {name: path for name, path in paths.items() if name in names or name in objects}
    paths |= {name: (name,) for name in names if name not in paths}
    return build_manifest(
        TreeLeaves(
            paths,
            tree_tensors,
            objects,
            inner_tensors,
            own_names=_find_own_leaves(own_names, paths, objects),
            is_ordered=False,
        ),
        format_name=format_name,
        model_key=options.model_key,
        optim_key=options.optim_key,
        ties=ties,
        param_order=options.param_order,
    )


def _find_own_leaves(
    listed: Collection[str], paths: Mapping[str, TreePath], objects: Collection[str]
) -> frozenset[str]:
    """The user's leaves: those that the text lists, and all others except the optimizer, and except weights and values
    of ``get_extra_state``, which are at the root."""
    unlisted_names = {
        name
        for name, path in paths.items()
        if path[0] != OPTIM and (len(path) > 1 or (name in objects and not is_extra_state(path[0])))
    }
    return frozenset({*listed, *unlisted_names} & paths.keys())


def _make_reference(
    stored: StoredTensor, tensors: Mapping[str, TensorLeaf], inner_tensors: dict[StateKey, TensorLeaf]
) -> TensorRef:
    """The tensor of the file that stands for one inside an object."""
    leaf = tensors.get(stored.storage.key) if stored.storage is not None else None
    if leaf is None or stored.storage is None or (leaf.shape, leaf.dtype) != (stored.shape, stored.dtype):
        raise MalformedError("an object refers to a tensor that is not in the file, or is another one")
    key = _make_inner_key(stored.storage.key)
    inner_tensors[key] = leaf
    return TensorRef(key)


def _make_inner_key(name: str) -> StateKey:
    return StateKey(name, EXTRA_SLOT)


def _decode_text(text: str, text_name: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Paths, objects and the names of the user's own tensors, which files of older versions do not list."""
    try:
        decoded = loads(base64.b64decode(text, validate=True), path=text_name, persistent_load=parse_storage_id)
    except ValueError as error:
        raise MalformedError(f"its {text_name} is not valid base64") from error
    paths, objects = [decoded.get(part) if isinstance(decoded, dict) else None for part in ("paths", "objects")]
    if not isinstance(paths, dict) or not isinstance(objects, dict) or not objects.keys() <= paths.keys():
        raise MalformedError(f"its {text_name} does not contain a state tree")
    are_tuples = all(isinstance(path, tuple) and 0 < len(path) <= MAX_PATH_PARTS for path in paths.values())
    are_paths = are_tuples and all(type(part) in (str, int) for path in paths.values() for part in path)
    if not all(type(name) is str for name in paths) or not are_paths:
        raise MalformedError(f"its {text_name} contains names or paths of the wrong type")
    own_names = decoded.get("own", [])
    if not isinstance(own_names, list) or not all(type(name) is str for name in own_names):
        raise MalformedError(f"its {text_name} does not list the names of the user's own tensors")
    return paths, objects, own_names
