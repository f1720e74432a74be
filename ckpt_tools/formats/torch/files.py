"""Full state dicts of ``torch.save``: ``.pt``, ``.pth``, ``.bin``, and Hugging Face shards of them with their index.

A file is a tree of state, like a DCP, whose tensors are views of storages in the same zip. Two names that show the
same view are tied. Views of one storage that differ each read their own part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from ckpt_tools.core.boxes import Box, contiguous_strides
from ckpt_tools.core.layout import FileLayout, Layout, Payload, Segment
from ckpt_tools.core.manifest import WEIGHT, Manifest, StateKey, StateTree, TensorEntry
from ckpt_tools.core.notes import Note
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.value_refs import replace_tensor_refs
from ckpt_tools.core.values import OrderedDict, StorageRef, StoredTensor
from ckpt_tools.core.wording import escape_unprintable, join_names
from ckpt_tools.errors import CkptError, MalformedError, SeveralCheckpointsError, UnsupportedError
from ckpt_tools.formats.foreign import pieces_in, rank_in_name, refuse_deepspeed, refuse_pieces, refuse_ranks
from ckpt_tools.formats.safetensors.hf_index import (
    are_shards,
    check_promises,
    index_layout,
    index_of,
    read_weight_map,
    shards,
)
from ckpt_tools.formats.state_dict.build import Entries, is_model_only
from ckpt_tools.formats.state_dict.leaves import FoundLeaves, Place
from ckpt_tools.formats.state_dict.parse import Leaves, TreePath, manifest_of
from ckpt_tools.formats.state_dict.read_back import entries_for
from ckpt_tools.serialization.pickle.load import refuse_call
from ckpt_tools.serialization.torch_zip import make_archive_segments, open_archive
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.lightning import rename_average, rename_scheduler
from ckpt_tools.trainers.names import is_companion_file

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
INDEX_NAME = "pytorch_model.bin.index.json"
MAX_LOOKS = 4
"""Files of a folder that are opened to say what they are."""


def read(source: Source, options: ReadOptions) -> Manifest:
    weight_map, files, notes = _files(source)
    trees = {file: read_tree(source, file) for file in files}
    for file, tree in trees.items():
        if not (tree.tensors or tree.unread):
            raise UnsupportedError("it contains no tensors in dicts, so it is not a state dict", path=file)
        check_promises(weight_map, INDEX_NAME, file, tree.paths)
    manifest = manifest_of(
        _merged(trees),
        format_name="torch",
        model_key=options.model_key,
        optim_key=options.optim_key,
        param_order=options.param_order,
        ties={alias: owner for tree in trees.values() for alias, owner in tree.ties.items()},
        include=options.include,
        exclude=options.exclude,
        state=options.state,
    )
    return rename_average(rename_scheduler(replace(manifest, notes=(*manifest.notes, *notes))))


def own_files(source: Source) -> frozenset[str]:
    return frozenset(filter(None, [*_files(source)[1], index_of(source.files, INDEX_NAME)]))


def is_own(path: str) -> bool:
    return "/" not in path and path.endswith((*SUFFIXES, ".bin.index.json"))


def _files(source: Source) -> tuple[Mapping[str, str], list[str], list[Note]]:
    """The index's map, empty where there is none, the files that make up the state, and notes on the index."""
    index = index_of(source.files, INDEX_NAME)
    if index is not None:
        weight_map, notes = read_weight_map(source, index)
        files = list(dict.fromkeys(weight_map.values())) or [index.removesuffix(".index.json")]
        return weight_map, files, notes
    files = _model_files(source)
    _check_shards(source, files)
    return {}, files, []


def _model_files(source: Source) -> list[str]:
    """Files of the format without those that trainers write beside a model; a single file is taken in any case.

    Raises UnsupportedError where nothing is left.
    """
    found = [path for path in source.files if is_own(path)]
    if len(found) < 2:
        return found or list(source.files)
    files = [path for path in found if rank_in_name(path) is not None or not is_companion_file(path.rpartition("/")[2])]
    if not files:
        raise UnsupportedError(
            f"there is no model here, only what a trainer lays beside it ({join_names(found)}); name the folder of "
            f"both, "
            "or the model's file"
        )
    return files


def _check_shards(source: Source, files: list[str]) -> None:
    if not are_shards(source, files, ".bin") and len(files) > 1:
        refuse_ranks({file: found for file in files[:MAX_LOOKS] if (found := _rank_of(source, file)) is not None})
        apart = f"name the one you mean; the file of its optimizer goes with {format_option('optimizer_file')}"
        raise SeveralCheckpointsError(f"there are several files here ({join_names(files)}); {apart}")


def _rank_of(source: Source, file: str) -> str | None:
    """Whose part of a sharded state a file holds; None where it holds another thing, or cannot be read."""
    try:
        archive = open_archive(lambda start, stop: source.read(file, start, stop), source.size(file), file)
    except CkptError:
        return rank_in_name(file)
    kind = pieces_in(archive.value)
    return rank_in_name(file) if kind is None else f"{kind} of one rank"


def read_tree(source: Source, file: str, *, is_of_rank: bool = False) -> FoundLeaves:
    """The leaves of a file. Raises FormatError."""
    archive = open_archive(lambda start, stop: source.read(file, start, stop), source.size(file), file)
    if is_of_rank:
        archive.check_rank()
    refuse_call(archive.value, file)
    refuse_pieces(archive.value, file)
    refuse_deepspeed(archive.value, file)
    found = FoundLeaves()
    found.add_tree(archive.value, (), Place(archive, file))
    return found


def _merged(trees: Mapping[str, FoundLeaves]) -> Leaves:
    found = FoundLeaves()
    for file, tree in trees.items():
        twice = next((name for name in tree.paths if name in found.paths), None)
        if twice is not None:
            raise MalformedError("this entry is in two files", path=file, key=twice)
        for name in ("paths", "tensors", "objects", "inner", "unread"):
            getattr(found, name).update(getattr(tree, name))
    # Shards are filled by size, and a tensor that is larger than one comes first.
    return found.leaves(is_ordered=len(trees) == 1)


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    if is_model_only(manifest):
        weights = {key.fqn: entry for key, entry in manifest.tensors.items() if key.slot == WEIGHT}
        parts = shards(weights, options, "pytorch_model.bin")
        values = {key.fqn: value for key, value in manifest.values.items()}
        files = [
            _file_layout(name, part, manifest, values if n == 0 else {}) for n, (name, part) in enumerate(parts.items())
        ]
        index = [index_layout(INDEX_NAME, parts, manifest.aliases)] if len(parts) > 1 else []
        return Layout((*files, *index))
    if options.max_shard_bytes is not None:
        raise UnsupportedError(
            f"a whole state is one file; remove {format_option('max_shard_size')}, or use "
            f"{format_option('state', 'model')}"
        )
    own = manifest.tree if manifest.format == "torch" else None
    entries, notes = entries_for(
        manifest, own or StateTree(("model",), ("optim",)), is_own=own is not None, whole_values=True
    )
    return Layout((_tree_layout(options.file_name or "checkpoint.pt", manifest, entries),), (*entries.notes, *notes))


def loading(path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
    """``from_pretrained`` of a folder with ``config.json``, else ``torch.load(weights_only=True)``, or ``load_into`` if
    that refuses an entry: no code that is printed executes a pickle."""
    from ckpt_tools.core.loading import (
        make_from_pretrained_snippet,
        make_joined_files_snippet,
        make_load_into_snippet,
        quote_literal,
    )
    from ckpt_tools.serialization.loadable import find_refused_classes

    if (found := make_from_pretrained_snippet(layout.config, path)) is not None:
        return found
    files = [file.path for file in layout.files if not file.path.endswith(".json")]
    if is_model_only(manifest) and len(files) > 1:
        return make_joined_files_snippet(path, "*.bin", "import torch", "torch.load(file, weights_only=True)")
    name = quote_literal(path if options.file_name else f"{path}/{files[-1]}")
    if is_model_only(manifest):
        return f"import torch\nstate_dict = torch.load({name}, weights_only=True)"
    groups = [dict(group.options) for group in manifest.groups]
    entries = [dict(manifest.extra), *groups, *manifest.values.values()]
    refused = find_refused_classes(replace_tensor_refs(entries, lambda _: None))
    if refused:
        why = f"torch.load(weights_only=True) refuses {escape_unprintable(join_names(refused))}"
        return f"# {why}; ckpt-tools make-loadable rewrites such a file\n{make_load_into_snippet(path)}"
    return f"import torch\nstate = torch.load({name}, weights_only=True)"


def _file_layout(
    path: str, part: Mapping[str, TensorEntry], manifest: Manifest, values: Mapping[str, Any]
) -> FileLayout:
    storages = _Storages(manifest.tensors)
    value = {name: storages.tensor(StateKey(name)) for name in part}
    value |= {alias: value[owner] for alias, owner in manifest.aliases.items() if owner in value}
    value |= {name: replace_tensor_refs(found, lambda ref: storages.tensor(ref.key)) for name, found in values.items()}
    return FileLayout(path, tuple(make_archive_segments(OrderedDict(value), storages.segments)))


def _tree_layout(path: str, manifest: Manifest, entries: Entries) -> FileLayout:
    storages = _Storages(manifest.tensors)
    root: dict[str | int, Any] = {}
    for name, where in entries.paths.items():
        if name in entries.objects:
            value = replace_tensor_refs(entries.objects[name], lambda ref: storages.tensor(ref.key))
        else:
            value = storages.tensor(entries.tensors[entries.aliases.get(name, name)])
        put_leaf(root, where, value)
    if manifest.groups:  # load_state_dict asks for the state of an optimizer that has none, too
        assert entries.tree is not None and entries.tree.optim is not None, "a tree with groups has a place for them"
        reduce(lambda branch, part: branch[part], entries.tree.optim, root).setdefault("state", Branch())
    return FileLayout(path, tuple(make_archive_segments(as_lists(root), storages.segments)))


def put_leaf(root: dict[str | int, Any], path: TreePath, value: Any) -> None:
    for part in path[:-1]:
        root = root.setdefault(part, Branch())
    root[path[-1]] = value


class Branch(dict[Any, Any]):
    """A dict that the tree is made of, as opposed to one that is a value in it."""


def as_lists(value: Any) -> Any:
    """The tree with branches of positions as the lists that they were."""
    if not isinstance(value, Branch) and type(value) is not dict:
        return value
    inner = {key: as_lists(item) for key, item in value.items()}
    if "param_groups" in value and isinstance(value.get("state"), Branch):
        # An optimizer's own state dict: by number, of which entries make text, and no list.
        state = value["state"].items()
        inner["state"] = {int(key) if str(key).isdecimal() else key: as_lists(item) for key, item in state}
    is_list = isinstance(value, Branch) and list(inner) == list(range(len(inner)))
    return list(inner.values()) if is_list else inner


class _Storages:
    """The storages of a file, one for each tensor, numbered as they are asked for."""

    def __init__(self, tensors: Mapping[StateKey, TensorEntry]) -> None:
        self._tensors = tensors
        self._made: dict[StateKey, StoredTensor] = {}
        self.segments: dict[str, list[Segment]] = {}

    def tensor(self, key: StateKey) -> StoredTensor:
        """The tensor as torch pickles it; the same one for the same key, so that ties share their storage."""
        if key not in self._made:
            entry, number = self._tensors[key], str(len(self.segments))
            storage = StorageRef.of_elements(number, entry.dtype, entry.numel)
            strides = contiguous_strides(entry.shape)
            self._made[key] = StoredTensor(storage, entry.dtype, 0, entry.shape, strides)
            self.segments[number] = [Payload(key, Box.whole(entry.shape), entry.shape, entry.dtype)]
        return self._made[key]
