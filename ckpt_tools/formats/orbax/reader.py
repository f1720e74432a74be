"""Reads Orbax checkpoints: one tree, or a folder of items with trees among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tools.core.dtypes import to_numpy
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorEntry, TensorRef, TreePath, join_path
from ckpt_tools.core.notes import Note, Outcome, note_unrelated_files
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.core.wording import join_names
from ckpt_tools.errors import FormatError, IncompleteError, SeveralCheckpointsError, UnsupportedError, UsageError
from ckpt_tools.formats.orbax.arrays import FILE_PREFIX, Array, ArrayStore, Drivers, decoding_bytes
from ckpt_tools.formats.orbax.metadata import (
    MAX_JSON_BYTES,
    Tree,
    custom_metadata,
    random_keys,
    read_handlers,
    read_strings,
    read_tree,
    refuse_unfinished,
)
from ckpt_tools.formats.orbax.names import (
    AGGREGATE,
    CHECKPOINT,
    COMMITTED,
    FOLDERS,
    HOUSEKEEPING,
    JSON_FILES,
    MANIFEST,
    MARKER,
    RANDOM_KEYS,
    TREE,
)
from ckpt_tools.formats.orbax.roles import Roles, find_roles
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.run_folders import list_other_checkpoint_files

MAX_SCALAR_BYTES = 16

_DATA_OF_KEY = "it is a random key of JAX: these are its data, as jax.random.key_data gives them"


def read(source: Source, options: ReadOptions) -> Manifest:
    return _Reading.of(source).manifest(options)


def served(source: Source, manifest: Manifest) -> Source:
    """``source`` with a file for each array."""
    reading = _Reading.of(source)
    arrays = {name: array for name, array in reading.files.items() if name in manifest.files}
    version_file = next((path for path in source.files if path.rpartition("/")[2] in (MANIFEST, TREE)), TREE)
    store = ArrayStore(source.store, arrays, version_file)
    return replace(source, store=store, files={**source.files, **store.generated_sizes})


def own_files(source: Source) -> frozenset[str]:
    return frozenset(path for path in source.files if _is_own(path, _folders(source)))


def _folders(source: Source) -> list[str]:
    """The items that are trees; "" where the checkpoint is one itself. Raises FormatError."""
    found = sorted(path.rpartition("/")[0] for path in source.files if path.rpartition("/")[2] == TREE)
    deep = [folder for folder in found if "/" in folder and folder.partition("/")[2] not in RANDOM_KEYS]
    if deep or ("" in found and len(found) > 1):
        folders = sorted({folder.partition("/")[0] for folder in found})
        raise SeveralCheckpointsError(
            f"there are several checkpoints here ({join_names(folders)}); name the folder of one"
        )
    databases = [path.rpartition("/")[0] for path in source.files if path.rpartition("/")[2] == MANIFEST]
    # Each process leaves a database inside that of its item.
    items = [folder for folder in databases if not folder.rpartition("/")[2].startswith("ocdbt.process_")]
    nameless = [folder for folder in items if found and folder not in found]
    if nameless:
        raise IncompleteError(f"it has no {TREE}, the file that names its arrays", path=nameless[0] or MANIFEST)
    if not found:
        raise IncompleteError(
            f"it looks like a checkpoint of Orbax, and has no {TREE}, the file that names its arrays; restore it with "
            "orbax-checkpoint and save it again, if an old version wrote it"
        )
    return found


def _is_own(path: str, folders: list[str]) -> bool:
    """Whether a file is Orbax's own housekeeping, or holds arrays."""
    if path in (CHECKPOINT, COMMITTED, MARKER):
        return True
    folder = next((each for each in folders if not each or path.startswith(f"{each}/")), None)
    if folder is None:
        above, _, name = path.rpartition("/")
        inner = above.partition("/")[2].removesuffix("_metadata")
        return name in (*JSON_FILES, COMMITTED) and bool(above) and (inner in RANDOM_KEYS or "/" not in above)
    first, _, rest = path.removeprefix(f"{folder}/" if folder else "").partition("/")
    if not rest:
        return first in (*HOUSEKEEPING, AGGREGATE)
    return first in FOLDERS or first.startswith("ocdbt.process_") or rest.startswith("c/") or "/" not in rest


@dataclass(frozen=True, slots=True)
class _Reading:
    """The trees of a source, with every array found and opened once."""

    source: Source = field(repr=False)
    trees: tuple[Tree, ...]
    arrays: Mapping[TreePath, Array]
    names: Mapping[TreePath, str]
    """The files that stand for the arrays."""

    @classmethod
    def of(cls, source: Source) -> _Reading:
        refuse_unfinished(source)
        handlers = read_handlers(source)
        folders = _folders(source)
        if not isinstance(source.store, LocalStore):
            raise UnsupportedError(
                "checkpoints of Orbax are read from local folders; download it first, for example with "
                "aws s3 cp --recursive"
            )
        root = str(Path(source.store.root).absolute())
        trees = tuple(read_tree(source, folder, handlers) for folder in folders)
        arrays: dict[TreePath, Array] = {}
        names: dict[TreePath, str] = {}
        for tree in trees:
            drivers = Drivers(root, tree)
            if tree.uses_ocdbt and any(leaf.array is not None for leaf in tree.leaves):
                drivers.check_database(source.files)
            for leaf in tree.leaves:
                if leaf.array is not None:
                    path = (*_item(tree, trees), *leaf.path)
                    arrays[path] = drivers.array(leaf.array)
                    names[path] = f"{FILE_PREFIX}{tree.prefix}{leaf.array}"
        return cls(source, trees, arrays, names)

    @property
    def files(self) -> dict[str, Array]:
        return {self.names[path]: array for path, array in self.arrays.items()}

    def manifest(self, options: ReadOptions) -> Manifest:
        if options.optim_key is not None:
            raise UsageError(
                f"{format_option('optim_key')} does not apply to orbax; optimizer state is found by its names"
            )
        shapes = {path: array.shape for path, array in self.arrays.items()}
        roles = find_roles(shapes, self._scalars, options.model_key)
        if not roles.weights:
            raise UnsupportedError("none of its arrays is a weight" if self.arrays else "it holds no arrays")
        numbers = self._numbers(roles)
        extra, notes = self._extra(roles, numbers)
        tensors = {self._key(path, roles): self._entry(path, roles) for path in shapes if path not in numbers}
        step = next((extra[name] for name in ("step", "global_step") if type(extra.get(name)) is int), None)
        trained = tuple(dict.fromkeys(name for name, _ in roles.moments.values()))
        groups = (ParamGroup(trained, {}),) if trained else ()
        manifest = Manifest("orbax", tensors, groups=groups, extra=extra, step=step, notes=notes)
        return replace(manifest, decoding_bytes=decoding_bytes(self.files))

    def _key(self, path: TreePath, roles: Roles) -> StateKey:
        if path in roles.weights:
            return StateKey(roles.weights[path])
        return StateKey(*roles.moments.get(path, (join_path(path), "extra")))

    def _entry(self, path: TreePath, roles: Roles) -> TensorEntry:
        array = self.arrays[path]
        at = ByteRange(self.names[path], 0, array.num_bytes)
        table = ShardTable.whole(array.shape, array.dtype, at)
        kind = Kind.PARAMETER if array.dtype.is_floating else Kind.BUFFER
        if path not in roles.weights:
            kind = Kind.STATE if path in roles.moments else Kind.EXTRA
        return TensorEntry(array.shape, array.dtype, kind, table)

    @property
    def _scalars(self) -> list[TreePath]:
        """The leaves that were plain numbers when they were saved."""
        found = [((*_item(tree, self.trees), *leaf.path), leaf) for tree in self.trees for leaf in tree.leaves]
        return [path for path, leaf in found if leaf.is_scalar and self.arrays[path].num_bytes <= MAX_SCALAR_BYTES]

    def _numbers(self, roles: Roles) -> dict[TreePath, bool | int | float]:
        """The numbers that are not weights, which are read now as values."""
        store = ArrayStore(self.source.store, self.files, TREE)
        found: dict[TreePath, bool | int | float] = {}
        for path in self._scalars:
            if path not in roles.weights and path not in roles.moments:
                data = bytearray(self.arrays[path].num_bytes)
                store.read_into(self.names[path], 0, memoryview(data))
                found[path] = np.frombuffer(data, to_numpy(self.arrays[path].dtype)).reshape(-1)[0].item()
        return found

    def _extra(self, roles: Roles, numbers: Mapping[TreePath, Any]) -> tuple[dict[str, Any], tuple[Note, ...]]:
        extra, notes = _beside(self.source, [tree.folder for tree in self.trees])
        found: list[tuple[TreePath, Any]] = [(("custom_metadata",), custom_metadata(self.source))]
        for tree in self.trees:
            item = _item(tree, self.trees)
            found.append(((*item, "custom_metadata"), tree.custom))
            found += [((*item, *path), text) for path, text in read_strings(self.source, tree).items()]
            keys = random_keys(self.source, tree)
            for path in ((*item, *leaf.path) for leaf in tree.leaves if leaf.array in keys):
                notes.append(Note(Outcome.KEPT, self._key(path, roles).fqn, _DATA_OF_KEY))
        found += numbers.items()
        users = (path for path in self.arrays if path not in roles.weights and path not in roles.moments)
        found += [(path, TensorRef(self._key(path, roles))) for path in users if path not in numbers]
        for path, value in found:
            if value not in (None, {}):
                _put(extra, path, value)
        return extra, tuple(notes)


def _item(tree: Tree, trees: tuple[Tree, ...]) -> TreePath:
    """The item's name, if there are several trees."""
    return (tree.item,) if len(trees) > 1 or tree.is_array else ()


def _put(extra: dict[str, Any], path: TreePath, value: Any) -> None:
    *parents, last = map(str, path)
    for part in parents:
        inner = extra.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UnsupportedError("the tree has a value and a branch of one name", key=join_path(path))
        extra = inner
    if last in extra:
        raise UnsupportedError("two values of the checkpoint have one name", key=join_path(path))
    extra[last] = value


def _beside(source: Source, folders: list[str]) -> tuple[dict[str, Any], list[Note]]:
    """The JSON items, and a note for each file that is not read."""
    found: dict[str, Any] = {}
    notes: list[Note] = []
    elsewhere = list_other_checkpoint_files(
        source.files, [f"{folder}/{TREE}" if folder else TREE for folder in folders]
    )
    for path in (each for each in source.files if each not in elsewhere):
        folder, _, name = path.rpartition("/")
        is_item = folder and folder not in folders and "/" not in folder and "" not in folders
        if is_item and name in JSON_FILES and folder not in found:
            try:
                found[folder] = parse_json(source.read_all(path, limit_bytes=MAX_JSON_BYTES), path)
            except FormatError as error:
                notes.append(Note(Outcome.DROPPED, path, f"it cannot be read: {error.message}"))
        elif not _is_own(path, folders):
            notes.append(note_unrelated_files(path))
    return found, notes
