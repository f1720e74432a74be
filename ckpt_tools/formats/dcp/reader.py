"""Reads a DCP into a manifest.

Tensors are known from the index alone. Objects (``lr``, ``betas``, an epoch, a scheduler) are items of their own, a
kilobyte each, and are read and interpreted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core.dtypes import decode_number
from ckpt_tools.core.manifest import Manifest, StateKey, TensorEntry
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.shards import ByteRange, Framing
from ckpt_tools.errors import MalformedError, name_file_in_errors
from ckpt_tools.formats.dcp.foreign import note_other_half, refuse_megatron
from ckpt_tools.formats.dcp.index import DcpIndex, count_ranks, note_unread_files, read_index
from ckpt_tools.formats.dcp.megatron_fsdp import rename_optimizer_state
from ckpt_tools.formats.dcp.names import find_metadata_files, is_dcp_file, is_rank_index
from ckpt_tools.formats.dcp.rank_indexes import add_copy_checks, merge_rank_indexes
from ckpt_tools.serialization.torch_zip import open_archive
from ckpt_tools.serialization.zstd import decompress_all
from ckpt_tools.state_tree.leaf import TensorLeaf, find_ties
from ckpt_tools.state_tree.leaves import ArchiveLocation, LeafCollector, extract_tensors
from ckpt_tools.state_tree.parse import build_manifest
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import note_missing_optimizers
from ckpt_tools.trainers.names import find_trainer_folder


def read(source: Source, options: ReadOptions) -> Manifest:
    # 1. indexes of all folders or ranks -> one index       4. the tree -> a manifest (state_dict.parse)
    # 2. ties: names whose bytes are those of another name  5. the trainer's folder, notes on files without items
    # 3. objects are read now: a kilobyte each              6. copies of ranks -> pairs that must be equal
    metadata_paths = find_metadata_files(source.files)
    indexes = dict(zip(metadata_paths, source.map_files(read_index, metadata_paths), strict=True))
    index, rank_notes = (
        merge_rank_indexes(source, indexes) if is_rank_index(metadata_paths[0]) else (_join_indexes(indexes), ())
    )
    refuse_megatron(source, metadata_paths, index)
    ties = find_ties(index.tensors)
    tensors = {fqn: each for fqn, each in index.tensors.items() if fqn not in ties}
    literals: dict[str, bytes] = {}
    leaves = LeafCollector(tensors=tensors, unread=dict(index.unread), ties=ties)
    changed_forms: list[str] = []
    for fqn, path in index.paths.items():
        if fqn not in index.objects:
            leaves.add_path(fqn, path, metadata_paths[0])
            continue
        item_location = _open_item(source, fqn, index.objects[fqn], literals, is_compressed=fqn in index.compressed)
        if fqn in index.unflattened:
            leaves.add_tree(item_location.archive.value, path, item_location)
            changed_forms += [f"{fqn} as one entry"] if isinstance(item_location.archive.value, dict) else []
        else:
            leaves.add_leaf(fqn, path, item_location.archive.value, item_location)
    with name_file_in_errors(metadata_paths[0]):
        renamed_leaves = rename_optimizer_state(leaves, literals)
        changed_forms += ["the optimizer of Megatron-FSDP"] if renamed_leaves is not leaves else []
        leaves = renamed_leaves
        manifest = build_manifest(
            leaves.build_leaves(is_ordered=index.is_ordered),
            format_name="dcp",
            model_key=options.model_key,
            optim_key=options.optim_key,
            param_order=options.param_order,
            world_size=len(metadata_paths) if is_rank_index(metadata_paths[0]) else index.num_ranks,
            ties=leaves.ties,
            include=options.include,
            exclude=options.exclude,
            state=options.state,
        )
    top_names = {path: {str(parts[0]) for parts in each.paths.values()} for path, each in indexes.items()}
    trainer = find_trainer_folder(source.files, metadata_paths, top_names, is_dcp_file)
    used_literals = {file: data for file, data in literals.items() if file in manifest.files}
    manifest = replace(
        manifest,
        trainer=trainer,
        tree=manifest.tree and replace(manifest.tree, changed=tuple(changed_forms)),
        notes=(
            *manifest.notes,
            *rank_notes,
            *note_unread_files(source, indexes),
            *note_missing_optimizers([path.rpartition("/")[0] for path in metadata_paths]),
        ),
        literals={**manifest.literals, **used_literals},
        archives=index.archives,
    )
    return note_other_half(add_copy_checks(manifest, source, index), source, metadata_paths)


def _join_indexes(indexes: Mapping[str, DcpIndex]) -> DcpIndex:
    """The trees of several folders as one. Raises MalformedError where they share a name."""
    joined_index, *others = indexes.values()
    for path, other in zip(list(indexes)[1:], others, strict=True):
        shared_names = joined_index.paths.keys() & other.paths.keys()
        if shared_names:
            raise MalformedError(
                "another folder of the checkpoint also has an entry with this name", path=path, key=min(shared_names)
            )
        joined_index = DcpIndex(
            {**joined_index.tensors, **other.tensors},
            {**joined_index.objects, **other.objects},
            {**joined_index.paths, **other.paths},
            joined_index.compressed | other.compressed,
            unread={**joined_index.unread, **other.unread},
            unflattened=joined_index.unflattened | other.unflattened,
            num_ranks=count_ranks([joined_index, other]),
            is_ordered=joined_index.is_ordered and other.is_ordered,
        )
    return joined_index


MAX_OBJECT_BYTES = 256 << 20
"""Maximum size of a compressed object; the state of a data loader may have some megabytes."""


def read_object(source: Source, fqn: str, item_range: ByteRange, inner: dict[StateKey, TensorLeaf]) -> Any:
    """The value of an item that is not compressed; tensors inside it are added to ``inner``, and leave references."""
    item_location = _open_item(source, fqn, item_range, {}, is_compressed=False)
    return extract_tensors(item_location.archive.value, item_location, fqn, inner)


def read_number(source: Source, entry: TensorEntry) -> float:
    """The element of a tensor of one, which lies in an item or in the file itself. Raises FormatError."""
    framing, item_range, literals = entry.shards.framing, entry.shards.get_byte_range(0), dict[str, bytes]()
    if framing is not Framing.RAW:
        item_location = _open_item(
            source, item_range.file, item_range, literals, is_compressed=framing is Framing.ZSTD_ITEM
        )
        item_range = item_location.make_leaf(item_location.archive.value).shards.get_byte_range(0)
    file, start, stop = item_range.file, item_range.start, item_range.stop
    data = literals[file][start:stop] if literals else source.read(file, start, stop)
    return decode_number(data, entry.shards.dtype)


def _open_item(
    source: Source, fqn: str, item_range: ByteRange, literals: dict[str, bytes], *, is_compressed: bool
) -> ArchiveLocation:
    """The archive of an object's item; the content of a compressed one becomes a file of ``literals``."""

    def read_range(start: int, stop: int) -> bytes:
        return source.read(item_range.file, item_range.start + start, item_range.start + stop)

    size = item_range.stop - item_range.start
    if not is_compressed:
        return ArchiveLocation(
            open_archive(read_range, size, f"{item_range.file}: {fqn}"), item_range.file, item_range.start, fqn
        )
    data = decompress_all(read_range, size, item_range.file, limit_bytes=MAX_OBJECT_BYTES)
    file = f"{item_range.file}@{item_range.start}"
    literals[file] = data
    return ArchiveLocation(
        open_archive(lambda start, stop: data[start:stop], len(data), f"{file}: {fqn}"), file, 0, fqn
    )
