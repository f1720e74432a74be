"""All ``consolidated.NN.pth`` of a folder as one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.manifest import WEIGHT, EqualPair, Manifest, StateKey, TensorEntry
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.shards import Shard, ShardTable
from ckpt_tools.errors import IncompleteError, MalformedError, SourceNotFoundError, UnsupportedError
from ckpt_tools.formats.meta.names import (
    LAST_NORM,
    PARAMS_FILE,
    check_all_ranks,
    find_consolidated_files,
    find_cut_axis,
    make_file_name,
)
from ckpt_tools.formats.meta.params import read_params
from ckpt_tools.formats.torch.files import read_torch_tree
from ckpt_tools.state_tree.parse import build_manifest
from ckpt_tools.stores.source import Source


def read(source: Source, options: ReadOptions) -> Manifest:
    files = find_consolidated_files(source.files)
    if not files:
        raise SourceNotFoundError(f"there is no {make_file_name(0)} in {source.store.url}")
    check_all_ranks(files)
    manifests = source.map_files(lambda source, file: _read_rank_file(source, file, options), files)
    manifest_by_file = dict(zip(files, manifests, strict=True))
    first = manifest_by_file[files[0]]
    manifest = first if len(manifest_by_file) == 1 else _join_ranks(manifest_by_file)
    _check_heads(manifest, read_params(source), len(files))
    return manifest


def own_files(source: Source, manifest: Manifest) -> frozenset[str]:
    return frozenset([*find_consolidated_files(source.files), *({PARAMS_FILE} & {*source.files})])


def _read_rank_file(source: Source, file: str, options: ReadOptions) -> Manifest:
    leaves = read_torch_tree(source, file, is_of_rank=True)
    if not (leaves.tensors or leaves.unread):
        raise UnsupportedError("it contains no tensors in a dict, so it is not a file of a model", path=file)
    return build_manifest(
        leaves.build_leaves(),
        format_name="meta",
        model_key=None,
        optim_key=None,
        ties=leaves.ties,
        include=options.include,
        exclude=options.exclude,
    )


def _join_ranks(manifest_by_file: Mapping[str, Manifest]) -> Manifest:
    (first_file, first), *_ = manifest_by_file.items()
    for file, part in manifest_by_file.items():
        unexpected_key = next((key for key in part.tensors if key.slot != WEIGHT), None)
        if unexpected_key is not None or part.extra or part.aliases:
            what = str(unexpected_key or next(iter((*part.extra, *part.aliases))))
            raise UnsupportedError("a file of one of several ranks holds weights alone", path=file, key=what)
        if part.tensors.keys() != first.tensors.keys():
            differing_key = next(iter(part.tensors.keys() ^ first.tensors.keys()))
            raise MalformedError(f"it and {first_file} do not hold the same tensors", path=file, key=str(differing_key))
    # wq, wk, wv, w1, w3, output (column parallel):  files hold rows     -> concatenated along axis 0
    # wo, w2 (row parallel):                         files hold columns  -> along axis 1
    # norms, rope:                                   each has the whole  -> the first is read, the others must equal it
    last_norm = first.tensors.get(StateKey(LAST_NORM))
    width = last_norm.shape[0] if last_norm is not None and last_norm.shape else None
    tensors, equal_pairs = dict[StateKey, TensorEntry](), list[EqualPair]()
    for key in first.tensors:
        entries = {file: part.tensors[key] for file, part in manifest_by_file.items()}
        axis = find_cut_axis(key.fqn, entries[first_file].shape, width)
        first_entry = entries[first_file]
        for file, entry in entries.items():
            if (entry.shape, entry.dtype) != (first_entry.shape, first_entry.dtype):
                why = "the files of ranks hold it in different shapes or dtypes"
                raise MalformedError(why, path=file, key=key.fqn)
        if axis is None:
            tensors[key] = entries[first_file]
            equal_pairs += [
                EqualPair(f"{key.fqn} of {first_file} and of {file}", tensors[key], entry)
                for file, entry in entries.items()
                if file != first_file
            ]
        else:
            tensors[key] = _concatenate_entries(list(entries.values()), axis)
    return replace(first, tensors=tensors, must_equal=tuple(equal_pairs))


def _concatenate_entries(entries: Sequence[TensorEntry], axis: int) -> TensorEntry:
    """The parts of a tensor one behind the other along ``axis``."""
    first = entries[0]
    shape = tuple(size * (len(entries) if each == axis else 1) for each, size in enumerate(first.shape))
    shards = [
        Shard(_shift_box(shard.box, axis, rank * first.shape[axis]), shard.at, shard.strides)
        for rank, entry in enumerate(entries)
        for shard in entry.shards
    ]
    table = ShardTable.build(shape, first.shards.dtype, shards, framing=first.shards.framing)
    return replace(first, shape=shape, shards=table)


def _shift_box(box: Box, axis: int, offset: int) -> Box:
    start, stop = (
        tuple(place + (offset if each == axis else 0) for each, place in enumerate(corner))
        for corner in (box.start, box.stop)
    )
    return Box(start, stop)


def _check_heads(manifest: Manifest, params: Mapping[str, Any], num_files: int) -> None:
    """Raises IncompleteError if the rows of queries are not those of all heads: a rank's file may be missing."""
    query = next((key for key in manifest.tensors if key.fqn.endswith(".attention.wq.weight")), None)
    last_norm = manifest.tensors.get(StateKey(LAST_NORM))
    if query is None or last_norm is None or not last_norm.shape:
        return
    heads, head_dim = params.get("n_heads"), params.get("head_dim")
    expected_rows = heads * head_dim if type(heads) is int and type(head_dim) is int else last_norm.shape[0]
    rows = manifest.tensors[query].shape[0]
    if rows != expected_rows:
        raise IncompleteError(
            f"it has {rows} rows in {num_files} {'file' if num_files == 1 else 'files'}, and all heads have "
            f"{expected_rows}: the files of some ranks are missing, or params.json is not beside them",
            key=query.fqn,
        )
