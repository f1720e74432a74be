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
    ARRAY_HANDLER,
    ARRAY_METADATAS,
    CHECKPOINT_FILE,
    COMMIT_FILE,
    DELETION_MARKER,
    FILE_OF_HANDLER,
    MSGPACK_FILE,
    OCDBT_MANIFEST,
    SINGLE_ARRAY_NAME,
    STRINGS_FILE,
    TREE_FILE,
    VERSION_1_MARKER,
    find_unfinished,
)
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import Source

MAX_JSON_BYTES = 256 << 20
"""A leaf takes about 300 bytes."""

MAX_DEPTH = 100
"""Levels of a tree, as everywhere."""

_SEQUENCE_KEY, _DICT_KEY = 1, 2
"""The key types: a position in a list or tuple, and a key of a dict."""

_ARRAY_TYPES = ("jax.Array", "np.ndarray", "scalar")
_EMPTY_TYPES = ("None", "Dict", "List", "Tuple", "NamedTuple")


@dataclass(frozen=True, slots=True)
class OrbaxLeaf:
    """One entry of a tree. ``array_name`` is the name under which its array is stored, None for a string."""

    path: TreePath
    array_name: str | None
    is_scalar: bool


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    """Content of ``_METADATA`` of the item in ``folder`` ("" for the checkpoint itself)."""

    folder: str
    leaves: tuple[OrbaxLeaf, ...]
    uses_ocdbt: bool
    uses_zarr3: bool
    has_all_chunks: bool
    """False of older versions, which left out chunks of zeros."""
    is_array: bool
    """True if the item is one array, which has the item's name."""
    custom_metadata: Any

    @property
    def prefix(self) -> str:
        return f"{self.folder}/" if self.folder else ""

    @property
    def item(self) -> str:
        return self.folder.partition("/")[0]


def read_orbax_tree(source: Source, folder: str, handlers: Mapping[str, str]) -> OrbaxTree:
    """The tree of the item in ``folder``. Raises FormatError."""
    prefix = f"{folder}/" if folder else ""
    path = prefix + TREE_FILE
    metadata = _read_json_object(source, path)
    tree_metadata = metadata.get("tree_metadata")
    if not isinstance(tree_metadata, dict):
        raise MalformedError("it has no tree_metadata", path=path)
    leaves = tuple(leaf for entry in tree_metadata.values() if (leaf := _parse_leaf(entry, path)) is not None)
    names = [leaf.array_name for leaf in leaves if leaf.array_name is not None]
    if len(set(names)) < len(names):
        raise MalformedError("two leaves of the tree have one name", path=path)
    paths = {leaf.path for leaf in leaves}
    conflicting_path = next((each for each in paths for end in range(len(each)) if each[:end] in paths), None)
    if conflicting_path is not None:
        raise MalformedError(
            "the tree has a value and a branch of one name", path=path, key=join_path(conflicting_path)
        )
    _refuse_msgpack_values(source, prefix, names)
    # Versions before OCDBT have no such entry, and Orbax looks for the file.
    uses_ocdbt = _read_flag(metadata, "use_ocdbt", path, default=prefix + OCDBT_MANIFEST in source.files)
    if uses_ocdbt and names and prefix + OCDBT_MANIFEST not in source.files:
        raise IncompleteError("this file, the database of the arrays, is missing", path=prefix + OCDBT_MANIFEST)
    # Without handlers, Orbax too is told by the user alone that such an item is one array.
    is_array = bool(folder) and [leaf.array_name for leaf in leaves] == [SINGLE_ARRAY_NAME] and not uses_ocdbt
    is_array = is_array and handlers.get(folder, ARRAY_HANDLER) == ARRAY_HANDLER
    if is_array:
        leaves = (replace(leaves[0], path=()),)
    return OrbaxTree(
        folder,
        leaves,
        uses_ocdbt,
        _read_flag(metadata, "use_zarr3", path),
        _read_flag(metadata, "store_array_data_equal_to_fill_value", path),
        is_array,
        metadata.get("custom_metadata"),
    )


def _refuse_msgpack_values(source: Source, prefix: str, names: list[str]) -> None:
    """Raises UnsupportedError if a value of the tree is in a msgpack file, where each array has a placeholder."""
    path = prefix + MSGPACK_FILE
    if path not in source.files:
        return
    data = source.read_all(path, limit_bytes=MAX_JSON_BYTES)
    key = next((name for name in names if _encode_msgpack_text(f"PLACEHOLDER://{name}") not in data), None)
    if key is not None:
        raise UnsupportedError(
            "its value is in this msgpack file of older versions; restore it with orbax-checkpoint and save it again",
            path=path,
            key=key,
        )


def _encode_msgpack_text(text: str) -> bytes:
    """``text`` in msgpack, as every packer writes it."""
    data = text.encode()
    short, long = len(data) < 32, len(data) > 255
    head = bytes([0xA0 | len(data)]) if short else b"\xda" + len(data).to_bytes(2) if long else bytes([0xD9, len(data)])
    return head + data


def read_handlers(source: Source) -> Mapping[str, str]:
    """The class of the handler of each item. Raises IncompleteError if an item is missing, as Orbax leaves it out."""
    item_handlers = None
    if CHECKPOINT_FILE in source.files:
        item_handlers = _read_json_object(source, CHECKPOINT_FILE).get("item_handlers")
    if not isinstance(item_handlers, dict):
        return {}
    handlers = {item: str(each).rpartition(".")[2] for item, each in item_handlers.items()}
    for item, handler in handlers.items():
        if handler == "DescriptorHandler":  # listed, and only Google's own version writes it
            continue
        item_files = {path.removeprefix(f"{item}/") for path in source.files if path.startswith(f"{item}/")}
        item_files.discard(COMMIT_FILE)
        required_file = FILE_OF_HANDLER.get(handler)
        if not item_files or (required_file is not None and required_file not in item_files):
            path = f"{item}/{required_file}" if required_file and item_files else item
            raise IncompleteError(f"it is missing, and {CHECKPOINT_FILE} lists the item", path=path)
    return handlers


def find_random_keys(source: Source, tree: OrbaxTree) -> frozenset[str]:
    """The arrays of ``tree`` that are typed random keys of JAX. Raises MalformedError."""
    if tree.is_array and "/" in tree.folder:
        return frozenset(leaf.array_name for leaf in tree.leaves if leaf.array_name is not None)
    path = min((each for each in source.files if each.startswith(f"{tree.prefix}{ARRAY_METADATAS}/")), default=None)
    if path is None:
        return frozenset()
    try:
        array_metadatas = [each["array_metadata"] for each in _read_json_object(source, path)["array_metadatas"]]
        return frozenset(
            each["param_name"] for each in array_metadatas if "random_key_impl" in (each.get("ext_metadata") or ())
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise MalformedError("it does not list arrays with their metadata", path=path) from error


def _read_json_object(source: Source, path: str) -> dict[str, Any]:
    parsed = parse_json(source.read_all(path, limit_bytes=MAX_JSON_BYTES), path)
    if not isinstance(parsed, dict):
        raise MalformedError("it is not a JSON object", path=path)
    return parsed


def _read_flag(metadata: Mapping[str, Any], name: str, path: str, *, default: bool = False) -> bool:
    value = metadata.get(name)
    value = default if value is None else value
    if type(value) is not bool:
        raise MalformedError(f"its {name} is neither true nor false", path=path)
    return value


def _parse_leaf(entry: Any, file: str) -> OrbaxLeaf | None:
    """An entry of the tree; None for an empty dict or the like, which holds nothing."""
    try:
        keys = [(each["key"], each["key_type"]) for each in entry["key_metadata"]]
        value_type, is_skipped = entry["value_metadata"]["value_type"], entry["value_metadata"].get("skip_deserialize")
    except (TypeError, KeyError, AttributeError) as error:
        raise MalformedError("an entry of its tree has no path or no kind of value", path=file) from error
    if not keys and value_type not in _EMPTY_TYPES:
        raise UnsupportedError("its tree is a single value without a name; save it in a dict", path=file)
    if not len(keys) <= MAX_DEPTH or not all(isinstance(key, str) for key, _ in keys):
        raise MalformedError("an entry of its tree has no path of names", path=file)
    name = ".".join(key for key, _ in keys)
    if value_type in _EMPTY_TYPES:
        return None
    positions = [key for key, number in keys if number == _SEQUENCE_KEY]
    are_positions = all(key.isascii() and key.isdecimal() and len(key) < 10 for key in positions)
    if not are_positions or not all(number in (_DICT_KEY, _SEQUENCE_KEY) for _, number in keys):
        raise MalformedError("a key on its path is neither a name nor a position", path=file, key=name)
    path = tuple(int(key) if number == _SEQUENCE_KEY else key for key, number in keys)
    if value_type not in (*_ARRAY_TYPES, "string"):
        raise UnsupportedError(
            f"it is a {format_brief(value_type)}, a kind of value that is not supported", path=file, key=name
        )
    if is_skipped:
        raise UnsupportedError("its value is not among the arrays (skip_deserialize)", path=file, key=name)
    return OrbaxLeaf(path, None if value_type == "string" else name, value_type == "scalar")


def read_strings(source: Source, tree: OrbaxTree) -> Mapping[TreePath, str]:
    """The strings of ``tree`` by path. Raises FormatError."""
    string_paths = [leaf.path for leaf in tree.leaves if leaf.array_name is None]
    if not string_paths:
        return {}
    file = tree.prefix + STRINGS_FILE
    strings = _read_json_object(source, file)
    texts = {path: _resolve_pointer(strings, join_path(path)) for path in string_paths}
    missing_name = next((join_path(path) for path, text in texts.items() if not isinstance(text, str)), None)
    if missing_name is not None:
        raise IncompleteError("this string of the tree is not in the file", path=file, key=missing_name)
    return texts


def _resolve_pointer(node: Any, name: str) -> Any:
    """The value at the JSON pointer ``/name``, as Orbax writes it: a slash in a name makes an object."""
    for part in name.split("/"):
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node


def refuse_unfinished(source: Source) -> None:
    """Raises IncompleteError for a checkpoint that was not written, or not deleted, to its end."""
    unfinished_folder = find_unfinished((source.store.url.rpartition("/")[2], *source.files))
    if unfinished_folder is not None:
        path, mark = unfinished_folder
        raise IncompleteError(
            f"it is unfinished: Orbax gives the folder its name without {mark} last; take an earlier one", path=path
        )
    if DELETION_MARKER in source.files:
        raise IncompleteError(
            "the deletion of an item was begun and never finished; delete it again", path=DELETION_MARKER
        )
    if CHECKPOINT_FILE in source.files:
        times = _read_json_object(source, CHECKPOINT_FILE)
        if times.get("init_timestamp_nsecs") is not None and times.get("commit_timestamp_nsecs") is None:
            raise IncompleteError("it says that the checkpoint was begun and never finished", path=CHECKPOINT_FILE)
        if COMMIT_FILE not in source.files and any(path.endswith(f"/{COMMIT_FILE}") for path in source.files):
            raise IncompleteError("this marker of a finished checkpoint is missing", path=COMMIT_FILE)
    elif VERSION_1_MARKER in source.files:
        raise IncompleteError("this file, which is in each checkpoint of version 1, is missing", path=CHECKPOINT_FILE)


def read_custom_metadata(source: Source) -> Any:
    """The user's own values in ``_CHECKPOINT_METADATA``."""
    if CHECKPOINT_FILE not in source.files:
        return None
    return _read_json_object(source, CHECKPOINT_FILE).get("custom_metadata")
