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
from ckpt_tools.formats.meta.names import LAST_NORM, axis_of, check_ranks, file_name, files_of
from ckpt_tools.formats.meta.params import own_params
from ckpt_tools.formats.state_dict.parse import manifest_of
from ckpt_tools.formats.torch.files import read_tree
from ckpt_tools.stores.source import Source


def read(source: Source, options: ReadOptions) -> Manifest:
    files = files_of(source.files)
    if not files:
        raise SourceNotFoundError(f"there is no {file_name(0)} in {source.store.url}")
    check_ranks(files)
    parts = {file: _part(source, file, options) for file in files}
    first = parts[files[0]]
    made = first if len(parts) == 1 else _joined(parts)
    _check_heads(made, own_params(source), len(files))
    return made


def _part(source: Source, file: str, options: ReadOptions) -> Manifest:
    tree = read_tree(source, file, is_of_rank=True)
    if not (tree.tensors or tree.unread):
        raise UnsupportedError("it contains no tensors in a dict, so it is not a file of a model", path=file)
    return manifest_of(
        tree.leaves(),
        format_name="meta",
        model_key=None,
        optim_key=None,
        ties=tree.ties,
        include=options.include,
        exclude=options.exclude,
    )


def _joined(parts: Mapping[str, Manifest]) -> Manifest:
    (first_file, first), *_ = parts.items()
    for file, part in parts.items():
        more = next((key for key in part.tensors if key.slot != WEIGHT), None)
        if more is not None or part.extra or part.aliases:
            what = str(more or next(iter((*part.extra, *part.aliases))))
            raise UnsupportedError("a file of one of several ranks holds weights alone", path=file, key=what)
        if part.tensors.keys() != first.tensors.keys():
            odd = next(iter(part.tensors.keys() ^ first.tensors.keys()))
            raise MalformedError(f"it and {first_file} do not hold the same tensors", path=file, key=str(odd))
    last = first.tensors.get(StateKey(LAST_NORM))
    width = last.shape[0] if last is not None and last.shape else None
    tensors, equal = dict[StateKey, TensorEntry](), list[EqualPair]()
    for key in first.tensors:
        entries = {file: part.tensors[key] for file, part in parts.items()}
        axis = axis_of(key.fqn, entries[first_file].shape, width)
        first_entry = entries[first_file]
        for file, entry in entries.items():
            if (entry.shape, entry.dtype) != (first_entry.shape, first_entry.dtype):
                why = "the files of ranks hold it in different shapes or dtypes"
                raise MalformedError(why, path=file, key=key.fqn)
        if axis is None:
            tensors[key] = entries[first_file]
            equal += [
                EqualPair(f"{key.fqn} of {first_file} and of {file}", tensors[key], entry)
                for file, entry in entries.items()
                if file != first_file
            ]
        else:
            tensors[key] = _concatenated(list(entries.values()), axis)
    return replace(first, tensors=tensors, must_equal=tuple(equal))


def _concatenated(entries: Sequence[TensorEntry], axis: int) -> TensorEntry:
    """The parts of a tensor one behind the other along ``axis``."""
    first = entries[0]
    shape = tuple(size * (len(entries) if each == axis else 1) for each, size in enumerate(first.shape))
    shards = [
        Shard(_moved(shard.box, axis, rank * first.shape[axis]), shard.at, shard.strides)
        for rank, entry in enumerate(entries)
        for shard in entry.shards
    ]
    table = ShardTable.build(shape, first.shards.dtype, shards, framing=first.shards.framing)
    return replace(first, shape=shape, shards=table)


def _moved(box: Box, axis: int, by: int) -> Box:
    start, stop = (
        tuple(place + (by if each == axis else 0) for each, place in enumerate(corner))
        for corner in (box.start, box.stop)
    )
    return Box(start, stop)


def _check_heads(made: Manifest, params: Mapping[str, Any], num_files: int) -> None:
    """Raises IncompleteError if the rows of queries are not those of all heads: a rank's file may be missing."""
    query = next((key for key in made.tensors if key.fqn.endswith(".attention.wq.weight")), None)
    last = made.tensors.get(StateKey(LAST_NORM))
    if query is None or last is None or not last.shape:
        return
    heads, size = params.get("n_heads"), params.get("head_dim")
    wanted = heads * size if type(heads) is int and type(size) is int else last.shape[0]
    rows = made.tensors[query].shape[0]
    if rows != wanted:
        raise IncompleteError(
            f"it has {rows} rows in {num_files} {'file' if num_files == 1 else 'files'}, and all heads have {wanted}: "
            "the files of some ranks are missing, or params.json is not beside them",
            key=query.fqn,
        )
