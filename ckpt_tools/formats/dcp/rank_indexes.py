"""Merges the indexes of ranks that saved by themselves, ``dcp.save(use_collectives=False)``.

Each ``__<rank>.metadata`` describes the files of its rank: its own chunks of cut tensors, and a copy of everything
else. torch gives each rank its own copy back. A checkpoint for other ranks has one of them, that of the lowest rank,
which is the one that torch keeps when it saves with collectives. Objects that differ are noted; weights and optimizer
state that differ are not copies, such as other experts under the same names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckpt_tools.core.manifest import EqualPair, Kind, Manifest, TensorEntry, TreePath
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.shards import ByteRange, RowTable, ShardTable
from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.dcp.index import ChunkCopy, DcpIndex, count_ranks
from ckpt_tools.messages.wording import format_count
from ckpt_tools.state_tree.leaf import TensorLeaf
from ckpt_tools.state_tree.param_numbers import PER_RANK_BUFFERS
from ckpt_tools.stores.source import Source


def merge_rank_indexes(source: Source, indexes: Mapping[str, DcpIndex]) -> tuple[DcpIndex, tuple[Note, ...]]:
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
        for name, tree_path in index.paths.items():
            if paths.setdefault(name, tree_path) != tree_path:
                raise MalformedError("another rank has this entry elsewhere in its tree", path=path, key=name)
    if conflicting_names := tensors.keys() & objects.keys():
        raise MalformedError("it is a tensor of one rank and an object of another", key=min(conflicting_names))
    unread = {name: reason for index in indexes.values() for name, reason in index.unread.items()}
    copies: dict[str, list[ChunkCopy]] = {}
    index = DcpIndex(
        {name: _merge_leaves(name, leaves, copies) for name, leaves in tensors.items() if name not in unread},
        {name: found[0] for name, found in objects.items()},
        paths,
        frozenset(name for index in indexes.values() for name in index.compressed),
        next((index.mcore_data for index in indexes.values() if index.mcore_data is not None), None),
        unread,
        frozenset(name for index in indexes.values() for name in index.unflattened),
        count_ranks(indexes.values()),
        all(index.is_ordered for index in indexes.values()),
        copies,
    )
    return index, tuple(note for name, found in objects.items() for note in _note_differing_values(source, name, found))


def add_copy_checks(manifest: Manifest, source: Source, index: DcpIndex) -> Manifest:
    """``manifest`` with the copies of weights and optimizer state to be compared, and notes on others that differ."""
    key_by_table = {id(entry.shards): (key, entry) for key, entry in manifest.tensors.items()}
    notes, equal_pairs = list[Note](), list[EqualPair]()
    for name, chunk_copies in index.copies.items():
        key, entry = key_by_table.get(id(index.tensors[name].shards), (None, None))
        if key is None or entry is None:
            continue
        if entry.kind is Kind.EXTRA or name.rpartition(".")[2] in PER_RANK_BUFFERS:
            chunks: defaultdict[ByteRange, list[ByteRange]] = defaultdict(list)
            for kept, copy in chunk_copies:
                chunks[kept.get_byte_range(0)].append(copy.get_byte_range(0))
            notes += (
                note for at, others in chunks.items() for note in _note_differing_values(source, name, [at, *others])
            )
            continue
        for pair in chunk_copies:
            files = [table.files[0] for table in pair]
            one, other = (TensorEntry(table.shape, table.dtype, entry.kind, table) for table in pair)
            equal_pairs.append(EqualPair(f"{key} in {files[0]} and in {files[1]}", one, other))
    return replace(manifest, notes=(*manifest.notes, *notes), must_equal=(*manifest.must_equal, *equal_pairs))


def _merge_leaves(name: str, leaves: Sequence[TensorLeaf], copies: dict[str, list[ChunkCopy]]) -> TensorLeaf:
    first = leaves[0]
    if any(leaf.shape != first.shape or leaf.dtype is not first.dtype for leaf in leaves):
        raise MalformedError("ranks saved tensors of different shapes or dtypes under this name", key=name)
    if len(leaves) == 1:
        return first
    table, duplicates = _merge_tables([leaf.shards for leaf in leaves])
    if duplicates:
        copies[name] = duplicates
    return TensorLeaf(first.shape, first.dtype, table)


def _merge_tables(tables: Sequence[ShardTable]) -> tuple[ShardTable, list[ChunkCopy]]:
    """A table of the shards of all ranks, each box once, and the copies: pairs of the shard that is read and another
    of the same box."""
    files = list(dict.fromkeys(file for table in tables for file in table.files))
    file_number = {file: position for position, file in enumerate(files)}
    ids = np.concatenate(
        [np.array([file_number[file] for file in table.files], np.int64)[table.file_ids] for table in tables]
    )
    starts, stops, byte_starts, byte_stops = (
        np.concatenate([getattr(table, name) for table in tables])
        for name in ("starts", "stops", "byte_starts", "byte_stops")
    )
    # A row for each shard of each rank: (starts, stops, 0). The constant column gives a 0-d tensor, whose boxes have no
    # columns, one to compare. ``firsts[k]`` is the first row with box k, ``numbers[row]`` the k of a row: so
    # ``kept_rows[row]`` is the row that is read in place of ``row``, and a row with another kept row is a copy.
    boxes = np.concatenate([starts, stops, np.zeros((len(ids), 1), np.int64)], axis=1)
    _, firsts, numbers = np.unique(boxes, axis=0, return_index=True, return_inverse=True)
    first, rows = tables[0], np.sort(firsts)

    def make_item_table(row: int) -> ShardTable:
        at = ByteRange(files[ids[row]], int(byte_starts[row]), int(byte_stops[row]))
        return ShardTable.whole(tuple((stops - starts)[row].tolist()), first.dtype, at, framing=first.framing)

    kept_rows = firsts[numbers.reshape(-1)]
    table = RowTable(
        shape=first.shape,
        dtype=first.dtype,
        starts=starts[rows],
        stops=stops[rows],
        files=files,
        file_ids=ids[rows],
        byte_starts=byte_starts[rows],
        byte_stops=byte_stops[rows],
        framing=first.framing,
    )
    copies = [(kept, row) for row, kept in enumerate(kept_rows) if kept != row]
    return table, [(make_item_table(kept), make_item_table(row)) for kept, row in copies]


def _note_differing_values(source: Source, name: str, item_ranges: Sequence[ByteRange]) -> list[Note]:
    def read_content(at: ByteRange) -> bytes:
        return source.read(at.file, at.start, at.stop)

    first_content = read_content(item_ranges[0])
    num_different = sum(
        len(first_content) != at.stop - at.start or read_content(at) != first_content for at in item_ranges[1:]
    )
    if not num_different:
        return []
    why = (
        f"{format_count(num_different, 'rank')} saved another value; that of rank 0 is taken, as torch does with "
        f"collectives"
    )
    return [Note(Outcome.DROPPED, f"other values of {name}", why, num_different)]
