"""JSON files of an Orbax checkpoint: its arrays with their names, and whether it is finished.

``_METADATA`` is beside the arrays of one item and lists every leaf of the tree with its path and the kind of value;
``_CHECKPOINT_METADATA`` is at the top and gets its ``commit_timestamp_nsecs`` last. A folder under construction is
named ``NAME.orbax-checkpoint-tmp...``. On object stores, and in newer versions everywhere, ``commit_success.txt`` is
written last into the checkpoint, and by most versions into each item.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.manifest import TreePath, dotted
from ckpt_tools.core.values import brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.orbax.names import CHECKPOINT, COMMITTED, STRINGS, TREE, UNFINISHED
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import Source

MAX_JSON_BYTES = 256 << 20
"""A leaf takes about 300 bytes."""

MAX_PARTS = 100
"""Levels of a tree, as everywhere."""

_SEQUENCE = 1
"""The key type of a position in a list or tuple; all others are names."""

_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One entry of a tree. ``array`` is the name under which its array is stored, None for a string."""

    path: TreePath
    array: str | None
    is_scalar: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """Content of ``_METADATA`` of the item in ``folder`` ("" for the checkpoint itself)."""

    folder: str
    leaves: tuple[Leaf, ...]
    uses_ocdbt: bool
    uses_zarr3: bool

    @property
    def prefix(self) -> str:
        return f"{self.folder}/" if self.folder else ""


def read_tree(source: Source, folder: str) -> Tree:
    """The tree of the item in ``folder``. Raises FormatError."""
    path = f"{folder}/{TREE}" if folder else TREE
    found = _object(source, path)
    tree = found.get("tree_metadata")
    if not isinstance(tree, dict):
        raise MalformedError("it has no tree_metadata", path=path)
    leaves = tuple(leaf for entry in tree.values() if (leaf := _leaf(entry, path)) is not None)
    names = [leaf.array for leaf in leaves if leaf.array is not None]
    if len(set(names)) < len(names):
        raise MalformedError("two leaves of the tree have one name", path=path)
    # Before OCDBT there was no such entry.
    return Tree(folder, leaves, _flag(found, "use_ocdbt", path), _flag(found, "use_zarr3", path))


def _object(source: Source, path: str) -> dict[str, Any]:
    found = parse_json(source.read_all(path, limit_bytes=MAX_JSON_BYTES), path)
    if not isinstance(found, dict):
        raise MalformedError("it is not a JSON object", path=path)
    return found


def _flag(found: Mapping[str, Any], name: str, path: str) -> bool:
    value = found.get(name, False)
    if type(value) is not bool:
        raise MalformedError(f"its {name} is neither true nor false", path=path)
    return value


def _leaf(entry: Any, file: str) -> Leaf | None:
    """An entry of the tree; None for an empty dict or the like, which holds nothing."""
    try:
        keys = [(each["key"], each["key_type"]) for each in entry["key_metadata"]]
        kind = entry["value_metadata"]["value_type"]
    except (TypeError, KeyError) as error:
        raise MalformedError("an entry of its tree has no path or no kind of value", path=file) from error
    if not 0 < len(keys) <= MAX_PARTS or not all(isinstance(key, str) for key, _ in keys):
        raise MalformedError("an entry of its tree has no path of names", path=file)
    name = ".".join(key for key, _ in keys)
    if kind in _EMPTY:
        return None
    path = tuple(int(key) if number == _SEQUENCE and key.isdecimal() and len(key) < 10 else key for key, number in keys)
    if kind not in (*_ARRAYS, "string"):
        raise UnsupportedError(f"it is a {brief(kind)}, a kind of value that is not supported", path=file, key=name)
    return Leaf(path, None if kind == "string" else name, kind == "scalar")


def read_strings(source: Source, tree: Tree) -> Mapping[TreePath, str]:
    """The strings of ``tree`` by path. Raises FormatError."""
    wanted = [leaf.path for leaf in tree.leaves if leaf.array is None]
    if not wanted:
        return {}
    file = tree.prefix + STRINGS
    found = _object(source, file)
    missing = next((dotted(path) for path in wanted if not isinstance(found.get(dotted(path)), str)), None)
    if missing is not None:
        raise IncompleteError("this string of the tree is not in the file", path=file, key=missing)
    return {path: found[dotted(path)] for path in wanted}


def refuse_unfinished(source: Source) -> None:
    """Raises IncompleteError for a checkpoint that was not written to its end."""
    marked = next((path for path in (*source.store.url.split("/")[-1:], *source.files) if UNFINISHED in path), None)
    if marked is not None:
        raise IncompleteError(
            "it is unfinished: Orbax gives the folder its name without .orbax-checkpoint-tmp last; take an earlier one",
            path=marked,
        )
    if CHECKPOINT in source.files:
        times = _object(source, CHECKPOINT)
        if times.get("init_timestamp_nsecs") is not None and times.get("commit_timestamp_nsecs") is None:
            raise IncompleteError("it says that the checkpoint was begun and never finished", path=CHECKPOINT)
        if COMMITTED not in source.files and any(path.endswith(f"/{COMMITTED}") for path in source.files):
            raise IncompleteError("this marker of a finished checkpoint is missing", path=COMMITTED)
