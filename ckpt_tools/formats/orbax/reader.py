"""Reads Orbax checkpoints: one tree, or a folder of items with trees among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tools.core.dtypes import to_numpy
from ckpt_tools.core.manifest import (
    EXTRA_SLOT,
    Kind,
    Manifest,
    ParamGroup,
    StateKey,
    TensorEntry,
    TensorRef,
    TreePath,
    join_path,
)
from ckpt_tools.core.notes import Note, Outcome, note_unrelated_files
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.errors import FormatError, IncompleteError, SeveralCheckpointsError, UnsupportedError, UsageError
from ckpt_tools.formats.orbax.arrays import FILE_PREFIX, ArrayOpener, ArrayStore, OrbaxArray, estimate_decoding_bytes
from ckpt_tools.formats.orbax.metadata import (
    MAX_JSON_BYTES,
    OrbaxTree,
    find_random_keys,
    read_custom_metadata,
    read_handlers,
    read_orbax_tree,
    read_strings,
    refuse_unfinished,
)
from ckpt_tools.formats.orbax.names import (
    CHECKPOINT_FILE,
    COMMIT_FILE,
    DATA_FOLDERS,
    HOUSEKEEPING,
    JSON_FILES,
    MSGPACK_FILE,
    OCDBT_MANIFEST,
    RANDOM_KEY_FOLDERS,
    TREE_FILE,
    VERSION_1_MARKER,
)
from ckpt_tools.formats.orbax.roles import OrbaxRoles, find_roles
from ckpt_tools.messages.wording import join_names
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.run_folders import list_other_checkpoint_files

MAX_SCALAR_BYTES = 16

_RANDOM_KEY_NOTE = "it is a random key of JAX: these are its data, as jax.random.key_data gives them"


def read(source: Source, options: ReadOptions) -> Manifest:
    return _OrbaxTrees.of(source).build_manifest(options)


def served(source: Source, manifest: Manifest) -> Source:
    """``source`` with a file for each array."""
    orbax_trees = _OrbaxTrees.of(source)
    arrays = {name: array for name, array in orbax_trees.arrays_by_file.items() if name in manifest.files}
    version_file = next(
        (path for path in source.files if path.rpartition("/")[2] in (OCDBT_MANIFEST, TREE_FILE)), TREE_FILE
    )
    store = ArrayStore(source.store, arrays, version_file)
    return replace(source, store=store, files={**source.files, **store.generated_sizes})


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    return frozenset(path for path in source.files if _is_orbax_file(path, _find_tree_folders(source)))


def _find_tree_folders(source: Source) -> list[str]:
    """The items that are trees; "" where the checkpoint is one itself. Raises FormatError."""
    tree_folders = sorted(path.rpartition("/")[0] for path in source.files if path.rpartition("/")[2] == TREE_FILE)
    nested_folders = [
        folder for folder in tree_folders if "/" in folder and folder.partition("/")[2] not in RANDOM_KEY_FOLDERS
    ]
    if nested_folders or ("" in tree_folders and len(tree_folders) > 1):
        folders = sorted({folder.partition("/")[0] for folder in tree_folders})
        raise SeveralCheckpointsError.of(join_names(folders))
    databases = [path.rpartition("/")[0] for path in source.files if path.rpartition("/")[2] == OCDBT_MANIFEST]
    # Each process leaves a database inside that of its item.
    item_databases = [folder for folder in databases if not folder.rpartition("/")[2].startswith("ocdbt.process_")]
    undescribed = [folder for folder in item_databases if tree_folders and folder not in tree_folders]
    if undescribed:
        raise IncompleteError(
            f"it has no {TREE_FILE}, the file that names its arrays", path=undescribed[0] or OCDBT_MANIFEST
        )
    if not tree_folders:
        raise IncompleteError(
            f"it looks like a checkpoint of Orbax, and has no {TREE_FILE}, the file that names its arrays; restore it "
            "with orbax-checkpoint and save it again, if an old version wrote it"
        )
    return tree_folders


def _is_orbax_file(path: str, folders: list[str]) -> bool:
    """Whether a file is Orbax's own housekeeping, or holds arrays."""
    if path in (CHECKPOINT_FILE, COMMIT_FILE, VERSION_1_MARKER):
        return True
    folder = next((each for each in folders if not each or path.startswith(f"{each}/")), None)
    if folder is None:
        parent_folder, _, name = path.rpartition("/")
        item_subfolder = parent_folder.partition("/")[2].removesuffix("_metadata")
        return (
            name in (*JSON_FILES, COMMIT_FILE)
            and bool(parent_folder)
            and (item_subfolder in RANDOM_KEY_FOLDERS or "/" not in parent_folder)
        )
    top_name, _, path_below = path.removeprefix(f"{folder}/" if folder else "").partition("/")
    if not path_below:
        return top_name in (*HOUSEKEEPING, MSGPACK_FILE)
    return (
        top_name in DATA_FOLDERS
        or top_name.startswith("ocdbt.process_")
        or path_below.startswith("c/")
        or "/" not in path_below
    )


@dataclass(frozen=True, slots=True)
class _OrbaxTrees:
    """The trees of a source, with every array found and opened once."""

    source: Source = field(repr=False)
    trees: tuple[OrbaxTree, ...]
    arrays: Mapping[TreePath, OrbaxArray]
    file_names: Mapping[TreePath, str]
    """The files that stand for the arrays."""

    @classmethod
    def of(cls, source: Source) -> _OrbaxTrees:
        refuse_unfinished(source)
        handlers = read_handlers(source)
        folders = _find_tree_folders(source)
        if not isinstance(source.store, LocalStore):
            raise UnsupportedError(
                "checkpoints of Orbax are read from local folders; download it first, for example with "
                "aws s3 cp --recursive"
            )
        root = str(Path(source.store.root).absolute())
        trees = tuple(read_orbax_tree(source, folder, handlers) for folder in folders)
        arrays: dict[TreePath, OrbaxArray] = {}
        names: dict[TreePath, str] = {}
        for tree in trees:
            opener = ArrayOpener(root, tree)
            if tree.uses_ocdbt and any(leaf.array_name is not None for leaf in tree.leaves):
                opener.check_database(source.files)
            for leaf in tree.leaves:
                if leaf.array_name is not None:
                    path = (*_get_item_path(tree, trees), *leaf.path)
                    arrays[path] = opener.open_array(leaf.array_name)
                    names[path] = f"{FILE_PREFIX}{tree.prefix}{leaf.array_name}"
        return cls(source, trees, arrays, names)

    @property
    def arrays_by_file(self) -> dict[str, OrbaxArray]:
        return {self.file_names[path]: array for path, array in self.arrays.items()}

    def build_manifest(self, options: ReadOptions) -> Manifest:
        if options.optim_key is not None:
            raise UsageError(
                f"{format_option('optim_key')} does not apply to orbax; optimizer state is found by its names"
            )
        shapes = {path: array.shape for path, array in self.arrays.items()}
        roles = find_roles(shapes, self._scalar_paths, options.model_key)
        if not roles.weights:
            raise UnsupportedError("none of its arrays is a weight" if self.arrays else "it holds no arrays")
        numbers = self._read_numbers(roles)
        extra, notes = self._collect_extra(roles, numbers)
        tensors = {self._make_key(path, roles): self._make_entry(path, roles) for path in shapes if path not in numbers}
        step = next((extra[name] for name in ("step", "global_step") if type(extra.get(name)) is int), None)
        trained = tuple(dict.fromkeys(name for name, _ in roles.moments.values()))
        groups = (ParamGroup(trained, {}),) if trained else ()
        manifest = Manifest("orbax", tensors, groups=groups, extra=extra, step=step, notes=notes)
        return replace(manifest, decoding_bytes=estimate_decoding_bytes(self.arrays_by_file))

    def _make_key(self, path: TreePath, roles: OrbaxRoles) -> StateKey:
        if path in roles.weights:
            return StateKey(roles.weights[path])
        return StateKey(*roles.moments.get(path, (join_path(path), EXTRA_SLOT)))

    def _make_entry(self, path: TreePath, roles: OrbaxRoles) -> TensorEntry:
        array = self.arrays[path]
        data_range = ByteRange(self.file_names[path], 0, array.num_bytes)
        table = ShardTable.whole(array.shape, array.dtype, data_range)
        kind = Kind.PARAMETER if array.dtype.is_floating else Kind.BUFFER
        if path not in roles.weights:
            kind = Kind.STATE if path in roles.moments else Kind.EXTRA
        return TensorEntry(array.shape, array.dtype, kind, table)

    @property
    def _scalar_paths(self) -> list[TreePath]:
        """The leaves that were plain numbers when they were saved."""
        leaves_by_path = [
            ((*_get_item_path(tree, self.trees), *leaf.path), leaf) for tree in self.trees for leaf in tree.leaves
        ]
        return [
            path for path, leaf in leaves_by_path if leaf.is_scalar and self.arrays[path].num_bytes <= MAX_SCALAR_BYTES
        ]

    def _read_numbers(self, roles: OrbaxRoles) -> dict[TreePath, bool | int | float]:
        """The numbers that are not weights, which are read now as values."""
        store = ArrayStore(self.source.store, self.arrays_by_file, TREE_FILE)
        numbers: dict[TreePath, bool | int | float] = {}
        for path in self._scalar_paths:
            if path not in roles.weights and path not in roles.moments:
                data = bytearray(self.arrays[path].num_bytes)
                store.read_into(self.file_names[path], 0, memoryview(data))
                numbers[path] = np.frombuffer(data, to_numpy(self.arrays[path].dtype)).reshape(-1)[0].item()
        return numbers

    def _collect_extra(
        self, roles: OrbaxRoles, numbers: Mapping[TreePath, Any]
    ) -> tuple[dict[str, Any], tuple[Note, ...]]:
        extra, notes = _read_json_items(self.source, [tree.folder for tree in self.trees])
        values: list[tuple[TreePath, Any]] = [(("custom_metadata",), read_custom_metadata(self.source))]
        for tree in self.trees:
            item = _get_item_path(tree, self.trees)
            values.append(((*item, "custom_metadata"), tree.custom_metadata))
            values += [((*item, *path), text) for path, text in read_strings(self.source, tree).items()]
            random_key_names = find_random_keys(self.source, tree)
            for path in ((*item, *leaf.path) for leaf in tree.leaves if leaf.array_name in random_key_names):
                notes.append(Note(Outcome.KEPT, self._make_key(path, roles).fqn, _RANDOM_KEY_NOTE))
        values += numbers.items()
        user_paths = (path for path in self.arrays if path not in roles.weights and path not in roles.moments)
        values += [(path, TensorRef(self._make_key(path, roles))) for path in user_paths if path not in numbers]
        for path, value in values:
            if value not in (None, {}):
                _insert_value(extra, path, value)
        return extra, tuple(notes)


def _get_item_path(tree: OrbaxTree, trees: tuple[OrbaxTree, ...]) -> TreePath:
    """The item's name, if there are several trees."""
    return (tree.item,) if len(trees) > 1 or tree.is_array else ()


def _insert_value(extra: dict[str, Any], path: TreePath, value: Any) -> None:
    *parents, entry_name = map(str, path)
    for part in parents:
        inner = extra.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UnsupportedError("the tree has a value and a branch of one name", key=join_path(path))
        extra = inner
    if entry_name in extra:
        raise UnsupportedError("two values of the checkpoint have one name", key=join_path(path))
    extra[entry_name] = value


def _read_json_items(source: Source, folders: list[str]) -> tuple[dict[str, Any], list[Note]]:
    """The JSON items, and a note for each file that is not read."""
    items: dict[str, Any] = {}
    notes: list[Note] = []
    other_checkpoint_files = list_other_checkpoint_files(
        source, [f"{folder}/{TREE_FILE}" if folder else TREE_FILE for folder in folders]
    )
    for path in (each for each in source.files if each not in other_checkpoint_files):
        folder, _, name = path.rpartition("/")
        is_item = folder and folder not in folders and "/" not in folder and "" not in folders
        if is_item and name in JSON_FILES and folder not in items:
            try:
                items[folder] = parse_json(source.read_all(path, limit_bytes=MAX_JSON_BYTES), path)
            except FormatError as error:
                notes.append(Note(Outcome.DROPPED, path, f"it cannot be read: {error.message}"))
        elif not _is_orbax_file(path, folders):
            notes.append(note_unrelated_files(path))
    return items, notes
