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
from ckpt_tools.core.manifest import WEIGHT, Manifest, StateKey, StateTree, TensorEntry, TreePath
from ckpt_tools.core.notes import Note
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.value_refs import replace_tensor_refs
from ckpt_tools.core.values import OrderedDict, StorageRef, StoredTensor
from ckpt_tools.errors import CkptError, MalformedError, SeveralCheckpointsError, UnsupportedError
from ckpt_tools.formats.safetensors.hf_index import (
    are_numbered_shards,
    build_index_layout,
    check_indexed_names,
    find_index,
    read_weight_map,
    split_into_shards,
)
from ckpt_tools.messages.wording import escape_unprintable, join_names
from ckpt_tools.serialization.pickle.load import refuse_call
from ckpt_tools.serialization.torch_zip import make_archive_segments, open_torch_file
from ckpt_tools.state_tree.build import Entries, is_model_only
from ckpt_tools.state_tree.incomplete_state import (
    describe_rank_in_name,
    find_sharded_class,
    refuse_rank_files,
    refuse_rank_part,
    refuse_single_deepspeed_file,
)
from ckpt_tools.state_tree.leaves import ArchiveLocation, LeafCollector
from ckpt_tools.state_tree.parse import TreeLeaves, build_manifest
from ckpt_tools.state_tree.read_back import build_checked_entries
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.lightning import rename_average, rename_scheduler
from ckpt_tools.trainers.names import are_rank_files, is_companion_file

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
INDEX_NAME = "pytorch_model.bin.index.json"
MAX_INSPECTED_FILES = 4
"""Files of a folder that are opened to say what they are."""


def detect(source: Source) -> bool:
    from ckpt_tools.formats.meta.names import find_consolidated_files

    are_others = are_rank_files(source.files) or bool(find_consolidated_files(source.files))
    return any(map(is_torch_file, source.files)) and not are_others


def read(source: Source, options: ReadOptions) -> Manifest:
    weight_map, files, notes = _find_files(source)
    leaves_by_file = dict(zip(files, source.map_files(read_torch_tree, files), strict=True))
    for file, tree in leaves_by_file.items():
        if not (tree.tensors or tree.unread):
            raise UnsupportedError("it contains no tensors in dicts, so it is not a state dict", path=file)
        check_indexed_names(weight_map, INDEX_NAME, file, tree.paths)
    manifest = build_manifest(
        _merge_trees(leaves_by_file),
        format_name="torch",
        model_key=options.model_key,
        optim_key=options.optim_key,
        param_order=options.param_order,
        ties={alias: owner for tree in leaves_by_file.values() for alias, owner in tree.ties.items()},
        include=options.include,
        exclude=options.exclude,
        state=options.state,
    )
    return rename_average(rename_scheduler(replace(manifest, notes=(*manifest.notes, *notes))))


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    return frozenset(filter(None, [*_find_files(source)[1], find_index(source.files, INDEX_NAME)]))


def is_torch_file(path: str) -> bool:
    return "/" not in path and path.endswith((*SUFFIXES, ".bin.index.json"))


def _find_files(source: Source) -> tuple[Mapping[str, str], list[str], list[Note]]:
    """The index's map, empty where there is none, the files that make up the state, and notes on the index."""
    index = find_index(source.files, INDEX_NAME)
    if index is not None:
        weight_map, notes = read_weight_map(source, index)
        files = list(dict.fromkeys(weight_map.values())) or [index.removesuffix(".index.json")]
        return weight_map, files, notes
    files = _select_model_files(source)
    if not are_numbered_shards(source, files, ".bin") and len(files) > 1:
        rank_parts = {file: _describe_rank_part(source, file) for file in files[:MAX_INSPECTED_FILES]}
        refuse_rank_files({file: part for file, part in rank_parts.items() if part is not None})
        advice = f"name the one you mean; the file of its optimizer goes with {format_option('optimizer_file')}"
        raise SeveralCheckpointsError(f"there are several files here ({join_names(files)}); {advice}")
    return {}, files, []


def _select_model_files(source: Source) -> list[str]:
    """Files of the format without those that trainers write beside a model; a single file is taken in any case.

    Raises UnsupportedError where nothing is left.
    """
    torch_files = [path for path in source.files if is_torch_file(path)]
    if len(torch_files) < 2:
        return torch_files or list(source.files)
    files = [
        path
        for path in torch_files
        if describe_rank_in_name(path) is not None or not is_companion_file(path.rpartition("/")[2])
    ]
    if not files:
        raise UnsupportedError(
            f"there is no model here, only what a trainer lays beside it ({join_names(torch_files)}); name the folder "
            "of both, or the model's file"
        )
    return files


def _describe_rank_part(source: Source, file: str) -> str | None:
    """Whose part of a sharded state a file holds; None where it holds another thing, or cannot be read."""
    try:
        archive = open_torch_file(source, file)
    except CkptError:
        return describe_rank_in_name(file)
    sharded_class = find_sharded_class(archive.value)
    return describe_rank_in_name(file) if sharded_class is None else f"{sharded_class} of one rank"


def read_torch_tree(source: Source, file: str, *, is_of_rank: bool = False) -> LeafCollector:
    """The leaves of a file. Raises FormatError."""
    archive = open_torch_file(source, file)
    if is_of_rank:
        archive.check_rank()
    refuse_call(archive.value, file)
    refuse_rank_part(archive.value, file)
    refuse_single_deepspeed_file(archive.value, file)
    leaves = LeafCollector()
    leaves.add_tree(archive.value, (), ArchiveLocation(archive, file))
    return leaves


def _merge_trees(leaves_by_file: Mapping[str, LeafCollector]) -> TreeLeaves:
    merged_leaves = LeafCollector()
    for file, tree in leaves_by_file.items():
        duplicate_name = next((name for name in tree.paths if name in merged_leaves.paths), None)
        if duplicate_name is not None:
            raise MalformedError("this entry is in two files", path=file, key=duplicate_name)
        for name in ("paths", "tensors", "objects", "inner", "unread"):
            getattr(merged_leaves, name).update(getattr(tree, name))
    # Shards are filled by size, and a tensor that is larger than one comes first.
    return merged_leaves.build_leaves(is_ordered=len(leaves_by_file) == 1)


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    if is_model_only(manifest):
        weights = {key.fqn: entry for key, entry in manifest.tensors.items() if key.slot == WEIGHT}
        tensors_by_file = split_into_shards(weights, options, "pytorch_model.bin")
        values = {key.fqn: value for key, value in manifest.values.items()}
        files = [
            _layout_weights_file(name, part, manifest, values if n == 0 else {})
            for n, (name, part) in enumerate(tensors_by_file.items())
        ]
        index = [build_index_layout(INDEX_NAME, tensors_by_file, manifest.aliases)] if len(tensors_by_file) > 1 else []
        return Layout((*files, *index))
    if options.max_shard_bytes is not None:
        raise UnsupportedError(
            f"a whole state is one file; remove {format_option('max_shard_size')}, or use "
            f"{format_option('state', 'model')}"
        )
    source_tree = manifest.tree if manifest.format == "torch" else None
    entries, notes = build_checked_entries(
        manifest,
        source_tree or StateTree(("model",), ("optim",)),
        is_source_tree=source_tree is not None,
        whole_values=True,
    )
    return Layout(
        (_layout_tree_file(options.file_name or "checkpoint.pt", manifest, entries),), (*entries.notes, *notes)
    )


def loading(path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
    """``from_pretrained`` of a folder with ``config.json``, else ``torch.load(weights_only=True)``, or ``load_into`` if
    that refuses an entry: no code that is printed executes a pickle."""
    from ckpt_tools.messages.loading_code import (
        make_from_pretrained_snippet,
        make_joined_files_snippet,
        make_load_into_snippet,
        quote_literal,
    )
    from ckpt_tools.serialization.loadable import find_refused_classes

    if (pretrained_code := make_from_pretrained_snippet(layout.config, path)) is not None:
        return pretrained_code
    files = [file.path for file in layout.files if not file.path.endswith(".json")]
    if is_model_only(manifest) and len(files) > 1:
        return make_joined_files_snippet(path, "*.bin", "import torch", "torch.load(file, weights_only=True)")
    name = quote_literal(path if options.file_name else f"{path}/{files[-1]}")
    if is_model_only(manifest):
        return f"import torch\nstate_dict = torch.load({name}, weights_only=True)"
    groups = [dict(group.options) for group in manifest.groups]
    entries = [dict(manifest.extra), *groups, *manifest.values.values()]
    refused_values = find_refused_classes(replace_tensor_refs(entries, lambda _: None))
    if refused_values:
        why = f"torch.load(weights_only=True) refuses {escape_unprintable(join_names(refused_values))}"
        return f"# {why}; ckpt-tools make-loadable rewrites such a file\n{make_load_into_snippet(path)}"
    return f"import torch\nstate = torch.load({name}, weights_only=True)"


def _layout_weights_file(
    path: str, tensors: Mapping[str, TensorEntry], manifest: Manifest, values: Mapping[str, Any]
) -> FileLayout:
    storages = _StorageTable(manifest.tensors)
    value = {name: storages.get_tensor(StateKey(name)) for name in tensors}
    value |= {alias: value[owner] for alias, owner in manifest.aliases.items() if owner in value}
    value |= {
        name: replace_tensor_refs(found, lambda ref: storages.get_tensor(ref.key)) for name, found in values.items()
    }
    return FileLayout(path, tuple(make_archive_segments(OrderedDict(value), storages.segments)))


def _layout_tree_file(path: str, manifest: Manifest, entries: Entries) -> FileLayout:
    storages = _StorageTable(manifest.tensors)
    root: dict[str | int, Any] = {}
    for name, tree_path in entries.paths.items():
        if name in entries.objects:
            value = replace_tensor_refs(entries.objects[name], lambda ref: storages.get_tensor(ref.key))
        else:
            value = storages.get_tensor(entries.tensors[entries.aliases.get(name, name)])
        insert_leaf(root, tree_path, value)
    if manifest.groups:  # load_state_dict asks for the state of an optimizer that has none, too
        assert entries.tree is not None and entries.tree.optim is not None, "a tree with groups has a place for them"
        reduce(lambda branch, part: branch[part], entries.tree.optim, root).setdefault("state", Branch())
    return FileLayout(path, tuple(make_archive_segments(restore_lists(root), storages.segments)))


def insert_leaf(root: dict[str | int, Any], path: TreePath, value: Any) -> None:
    for part in path[:-1]:
        root = root.setdefault(part, Branch())
    root[path[-1]] = value


class Branch(dict[Any, Any]):
    """A dict that is a level of the tree, as opposed to one that is a value in it: only levels become lists again.
    Reading tells them apart by ``_TreeLevel`` of ``state_dict.parse``."""


def restore_lists(value: Any) -> Any:
    """The tree with branches of positions as the lists that they were."""
    if not isinstance(value, Branch) and type(value) is not dict:
        return value
    inner = {key: restore_lists(item) for key, item in value.items()}
    if "param_groups" in value and isinstance(value.get("state"), Branch):
        # An optimizer's own state dict has numbers as keys, which entries spell as text; it is not a list.
        state = value["state"].items()
        inner["state"] = {int(key) if str(key).isdecimal() else key: restore_lists(item) for key, item in state}
    is_list = isinstance(value, Branch) and list(inner) == list(range(len(inner)))
    return list(inner.values()) if is_list else inner


class _StorageTable:
    """The storages of a file, one for each tensor, numbered as they are asked for."""

    def __init__(self, tensors: Mapping[StateKey, TensorEntry]) -> None:
        self._tensors = tensors
        self._stored_tensors: dict[StateKey, StoredTensor] = {}
        self.segments: dict[str, list[Segment]] = {}

    def get_tensor(self, key: StateKey) -> StoredTensor:
        """The tensor as torch pickles it; the same one for the same key, so that ties share their storage."""
        if key not in self._stored_tensors:
            entry, number = self._tensors[key], str(len(self.segments))
            storage = StorageRef.of_elements(number, entry.dtype, entry.numel)
            strides = contiguous_strides(entry.shape)
            self._stored_tensors[key] = StoredTensor(storage, entry.dtype, 0, entry.shape, strides)
            self.segments[number] = [Payload(key, Box.whole(entry.shape), entry.shape, entry.dtype)]
        return self._stored_tensors[key]
