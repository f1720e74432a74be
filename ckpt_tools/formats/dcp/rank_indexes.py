"""Merges the indexes of ranks that saved by themselves, ``dcp.save(use_collectives=False)``.

Each ``__<rank>.metadata`` describes the files of its rank: its own chunks of cut tensors, and a copy of everything
else. torch gives each rank its own copy back. A checkpoint for other ranks has one of them, that of the lowest rank,
which is the one that torch keeps when it saves with collectives. Objects that differ are noted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.shards import ByteRange, RowTable, ShardTable
from ckpt_tools.core.wording import count
from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.dcp.index import Index, most_ranks
from ckpt_tools.formats.state_dict.leaf import TensorLeaf
from ckpt_tools.formats.state_dict.parse import TreePath
from ckpt_tools.stores.source import Source


def merged(source: Source, indexes: Mapping[str, Index]) -> tuple[Index, tuple[Note, ...]]:
    """One index of all ranks, given from rank 0 on by their files, and notes on copies that were dropped.

    Raises:
        MalformedError: two ranks say different things of an entry. StoreError: an object cannot be read.
    """
    tensors: defaultdict[str, list[TensorLeaf]] = defaultdict(list)
    objects: defaultdict[str, list[ByteRange]] = defaultdict(list)
    paths: dict[str, TreePath] = {}
    for path, index in indexes.items():
        for name, at in index.objects.items():
            objects[name].append(at)
        for name, leaf in index.tensors.items():
            tensors[name].append(leaf)
        for name, place in index.paths.items():
            if paths.setdefault(name, place) != place:
                raise MalformedError("another rank has this entry elsewhere in its tree", path=path, key=name)
    if both := tensors.keys() & objects.keys():
        raise MalformedError("it is a tensor of one rank and an object of another", key=min(both))
    unread = {name: reason for index in indexes.values() for name, reason in index.unread.items()}
    index = Index(
        {name: _united(name, leaves) for name, leaves in tensors.items() if name not in unread},
        {name: found[0] for name, found in objects.items()},
        paths,
        frozenset(name for index in indexes.values() for name in index.compressed),
        next((index.mcore_data for index in indexes.values() if index.mcore_data is not None), None),
        unread,
        frozenset(name for index in indexes.values() for name in index.unflattened),
        most_ranks(indexes.values()),
        all(index.is_ordered for index in indexes.values()),
    )
    return index, tuple(note for name, found in objects.items() for note in _differing(source, name, found))


def _united(name: str, leaves: Sequence[TensorLeaf]) -> TensorLeaf:
    first = leaves[0]
    if any(leaf.shape != first.shape or leaf.dtype is not first.dtype for leaf in leaves):
        raise MalformedError("ranks saved tensors of different shapes or dtypes under this name", key=name)
    return first if len(leaves) == 1 else TensorLeaf(first.shape, first.dtype, _table([leaf.shards for leaf in leaves]))


def _table(tables: Sequence[ShardTable]) -> ShardTable:
    files = list(dict.fromkeys(file for table in tables for file in table.files))
    number = {file: position for position, file in enumerate(files)}
    ids = [np.array([number[file] for file in table.files], np.int64)[table.file_ids] for table in tables]
    starts, stops = (np.concatenate([getattr(table, name) for table in tables]) for name in ("starts", "stops"))
    boxes = np.concatenate([starts, stops], axis=1)
    # Each box once; all those of a 0-d tensor are the same.
    rows = np.sort(np.unique(boxes, axis=0, return_index=True)[1]) if boxes.shape[1] else np.arange(min(1, len(boxes)))
    first = tables[0]
    return RowTable(
        shape=first.shape,
        dtype=first.dtype,
        starts=starts[rows],
        stops=stops[rows],
        files=files,
        file_ids=np.concatenate(ids)[rows],
        byte_starts=np.concatenate([table.byte_starts for table in tables])[rows],
        byte_stops=np.concatenate([table.byte_stops for table in tables])[rows],
        framing=first.framing,
    )


def _differing(source: Source, name: str, found: Sequence[ByteRange]) -> list[Note]:
    def content(at: ByteRange) -> bytes:
        return source.read(at.file, at.start, at.stop)

    first = content(found[0])
    others = sum(len(first) != at.stop - at.start or content(at) != first for at in found[1:])
    if not others:
        return []
    why = f"{count(others, 'rank')} saved another value; that of rank 0 is taken, as torch does with collectives"
    return [Note(Outcome.DROPPED, f"other values of {name}", why, others)]
