"""JSON files of an Orbax checkpoint: its arrays with their names, and whether it is finished.

``_METADATA`` is beside the arrays of one item and lists every leaf of the tree with its path and the kind of value;
``_CHECKPOINT_METADATA`` is at the top, lists the items with their handlers, and gets its ``commit_timestamp_nsecs``
last. A folder under construction is named ``NAME.orbax-checkpoint-tmp...``, or ``NAME.partial_save`` in version 1. On
object stores, and in newer versions everywhere, ``commit_success.txt`` is written last into the checkpoint, and by most
versions into each item.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.core.manifest import TreePath, join_path
from ckpt_tools.core.values import format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.orbax.names import (
    AGGREGATE,
    ARRAY,
    ARRAY_HANDLER,
    ARRAY_METADATAS,
    CHECKPOINT,
    COMMITTED,
    DELETION,
    MANIFEST,
    MARKER,
    STRINGS,
    TREE,
    TREES,
    unfinished,
)
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import Source

MAX_JSON_BYTES = 256 << 20
"""A leaf takes about 300 bytes."""

MAX_PARTS = 100
"""Levels of a tree, as everywhere."""

_SEQUENCE, _NAME = 1, 2
"""The key types: a position in a list or tuple, and a key of a dict."""

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
    has_all_chunks: bool
    """False of older versions, which left out chunks of zeros."""
    is_array: bool
    """True if the item is one array, which has the item's name."""
    custom: Any

    @property
    def prefix(self) -> str:
        return f"{self.folder}/" if self.folder else ""

    @property
    def item(self) -> str:
        return self.folder.partition("/")[0]


def read_tree(source: Source, folder: str, handlers: Mapping[str, str]) -> Tree:
    """The tree of the item in ``folder``. Raises FormatError."""
    prefix = f"{folder}/" if folder else ""
    path = prefix + TREE
    found = _object(source, path)
    tree = found.get("tree_metadata")
    if not isinstance(tree, dict):
        raise MalformedError("it has no tree_metadata", path=path)
    leaves = tuple(leaf for entry in tree.values() if (leaf := _leaf(entry, path)) is not None)
    names = [leaf.array for leaf in leaves if leaf.array is not None]
    if len(set(names)) < len(names):
        raise MalformedError("two leaves of the tree have one name", path=path)
    paths = {leaf.path for leaf in leaves}
    both = next((each for each in paths for end in range(len(each)) if each[:end] in paths), None)
    if both is not None:
        raise MalformedError("the tree has a value and a branch of one name", path=path, key=join_path(both))
    _refuse_aggregated(source, prefix, names)
    # Versions before OCDBT have no such entry, and Orbax looks for the file.
    uses_ocdbt = _flag(found, "use_ocdbt", path, default=prefix + MANIFEST in source.files)
    if uses_ocdbt and names and prefix + MANIFEST not in source.files:
        raise IncompleteError("this file, the database of the arrays, is missing", path=prefix + MANIFEST)
    # Without handlers, Orbax too is told by the user alone that such an item is one array.
    is_array = bool(folder) and [leaf.array for leaf in leaves] == [ARRAY] and not uses_ocdbt
    is_array = is_array and handlers.get(folder, ARRAY_HANDLER) == ARRAY_HANDLER
    if is_array:
        leaves = (replace(leaves[0], path=()),)
    return Tree(
        folder,
        leaves,
        uses_ocdbt,
        _flag(found, "use_zarr3", path),
        _flag(found, "store_array_data_equal_to_fill_value", path),
        is_array,
        found.get("custom_metadata"),
    )


def _refuse_aggregated(source: Source, prefix: str, names: list[str]) -> None:
    """Raises UnsupportedError if a value of the tree is in a msgpack file, where each array has a placeholder."""
    path = prefix + AGGREGATE
    if path not in source.files:
        return
    data = source.read_all(path, limit_bytes=MAX_JSON_BYTES)
    key = next((name for name in names if _packed(f"PLACEHOLDER://{name}") not in data), None)
    if key is not None:
        raise UnsupportedError(
            "its value is in this msgpack file of older versions; restore it with orbax-checkpoint and save it again",
            path=path,
            key=key,
        )


def _packed(text: str) -> bytes:
    """``text`` in msgpack, as every packer writes it."""
    data = text.encode()
    short, long = len(data) < 32, len(data) > 255
    head = bytes([0xA0 | len(data)]) if short else b"\xda" + len(data).to_bytes(2) if long else bytes([0xD9, len(data)])
    return head + data


def read_handlers(source: Source) -> Mapping[str, str]:
    """The class of the handler of each item. Raises IncompleteError if an item is missing, as Orbax leaves it out."""
    listed = _object(source, CHECKPOINT).get("item_handlers") if CHECKPOINT in source.files else None
    handlers = {item: str(each).rpartition(".")[2] for item, each in listed.items()} if isinstance(listed, dict) else {}
    # A descriptor is listed, and only Google's own version writes it.
    for item, handler in ((each, of) for each, of in handlers.items() if of != "DescriptorHandler"):
        inside = {path.removeprefix(f"{item}/") for path in source.files if path.startswith(f"{item}/")} - {COMMITTED}
        wanted = TREES.get(handler)
        if not inside or (wanted is not None and wanted not in inside):
            path = f"{item}/{wanted}" if wanted and inside else item
            raise IncompleteError(f"it is missing, and {CHECKPOINT} lists the item", path=path)
    return handlers


def random_keys(source: Source, tree: Tree) -> frozenset[str]:
    """The arrays of ``tree`` that are typed random keys of JAX. Raises MalformedError."""
    if tree.is_array and "/" in tree.folder:
        return frozenset(leaf.array for leaf in tree.leaves if leaf.array is not None)
    path = min((each for each in source.files if each.startswith(f"{tree.prefix}{ARRAY_METADATAS}/")), default=None)
    if path is None:
        return frozenset()
    try:
        every = [each["array_metadata"] for each in _object(source, path)["array_metadatas"]]
        return frozenset(each["param_name"] for each in every if "random_key_impl" in (each.get("ext_metadata") or ()))
    except (TypeError, KeyError, AttributeError) as error:
        raise MalformedError("it does not list arrays with their metadata", path=path) from error


def _object(source: Source, path: str) -> dict[str, Any]:
    found = parse_json(source.read_all(path, limit_bytes=MAX_JSON_BYTES), path)
    if not isinstance(found, dict):
        raise MalformedError("it is not a JSON object", path=path)
    return found


def _flag(found: Mapping[str, Any], name: str, path: str, *, default: bool = False) -> bool:
    value = found.get(name)
    value = default if value is None else value
    if type(value) is not bool:
        raise MalformedError(f"its {name} is neither true nor false", path=path)
    return value


def _leaf(entry: Any, file: str) -> Leaf | None:
    """An entry of the tree; None for an empty dict or the like, which holds nothing."""
    try:
        keys = [(each["key"], each["key_type"]) for each in entry["key_metadata"]]
        kind, is_elsewhere = entry["value_metadata"]["value_type"], entry["value_metadata"].get("skip_deserialize")
    except (TypeError, KeyError, AttributeError) as error:
        raise MalformedError("an entry of its tree has no path or no kind of value", path=file) from error
    if not keys and kind not in _EMPTY:
        raise UnsupportedError("its tree is a single value without a name; save it in a dict", path=file)
    if not len(keys) <= MAX_PARTS or not all(isinstance(key, str) for key, _ in keys):
        raise MalformedError("an entry of its tree has no path of names", path=file)
    name = ".".join(key for key, _ in keys)
    if kind in _EMPTY:
        return None
    if not all(number == _NAME or (number == _SEQUENCE and _is_position(key)) for key, number in keys):
        raise MalformedError("a key on its path is neither a name nor a position", path=file, key=name)
    path = tuple(int(key) if number == _SEQUENCE else key for key, number in keys)
    if kind not in (*_ARRAYS, "string"):
        raise UnsupportedError(
            f"it is a {format_brief(kind)}, a kind of value that is not supported", path=file, key=name
        )
    if is_elsewhere:
        raise UnsupportedError("its value is not among the arrays (skip_deserialize)", path=file, key=name)
    return Leaf(path, None if kind == "string" else name, kind == "scalar")


def _is_position(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 10


def read_strings(source: Source, tree: Tree) -> Mapping[TreePath, str]:
    """The strings of ``tree`` by path. Raises FormatError."""
    wanted = [leaf.path for leaf in tree.leaves if leaf.array is None]
    if not wanted:
        return {}
    file = tree.prefix + STRINGS
    found = _object(source, file)
    texts = {path: _at_pointer(found, join_path(path)) for path in wanted}
    missing = next((join_path(path) for path, text in texts.items() if not isinstance(text, str)), None)
    if missing is not None:
        raise IncompleteError("this string of the tree is not in the file", path=file, key=missing)
    return texts


def _at_pointer(found: Any, name: str) -> Any:
    """The value at the JSON pointer ``/name``, as Orbax writes it: a slash in a name makes an object."""
    for part in name.split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def refuse_unfinished(source: Source) -> None:
    """Raises IncompleteError for a checkpoint that was not written, or not deleted, to its end."""
    marked = unfinished((source.store.url.rpartition("/")[2], *source.files))
    if marked is not None:
        path, mark = marked
        raise IncompleteError(
            f"it is unfinished: Orbax gives the folder its name without {mark} last; take an earlier one", path=path
        )
    if DELETION in source.files:
        raise IncompleteError("the deletion of an item was begun and never finished; delete it again", path=DELETION)
    if CHECKPOINT in source.files:
        times = _object(source, CHECKPOINT)
        if times.get("init_timestamp_nsecs") is not None and times.get("commit_timestamp_nsecs") is None:
            raise IncompleteError("it says that the checkpoint was begun and never finished", path=CHECKPOINT)
        if COMMITTED not in source.files and any(path.endswith(f"/{COMMITTED}") for path in source.files):
            raise IncompleteError("this marker of a finished checkpoint is missing", path=COMMITTED)
    elif MARKER in source.files:
        raise IncompleteError("this file, which is in each checkpoint of version 1, is missing", path=CHECKPOINT)


def custom_metadata(source: Source) -> Any:
    """The user's own values in ``_CHECKPOINT_METADATA``."""
    return _object(source, CHECKPOINT).get("custom_metadata") if CHECKPOINT in source.files else None
