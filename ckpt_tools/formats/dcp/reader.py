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
from ckpt_tools.formats.dcp.folders import metadata_files
from ckpt_tools.formats.dcp.foreign import refuse_megatron, with_other_half
from ckpt_tools.formats.dcp.index import Index, most_ranks, notes_on_files, read_index
from ckpt_tools.formats.dcp.megatron_fsdp import of_weights
from ckpt_tools.formats.dcp.names import is_of_dcp, is_of_one_rank
from ckpt_tools.formats.dcp.rank_indexes import merged, with_copies_compared
from ckpt_tools.formats.state_dict.leaf import TensorLeaf, ties_among
from ckpt_tools.formats.state_dict.leaves import FoundLeaves, Place, with_references
from ckpt_tools.formats.state_dict.parse import manifest_of
from ckpt_tools.serialization.torch_zip import open_archive
from ckpt_tools.serialization.zstd import decompress_all
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.accelerate import note_missing_optimizers
from ckpt_tools.trainers.folders import find_trainer_folder


def read(source: Source, options: ReadOptions) -> Manifest:
    paths = metadata_files(source.files)
    indexes = {path: read_index(source, path) for path in paths}
    index, of_ranks = merged(source, indexes) if is_of_one_rank(paths[0]) else (_joined(indexes), ())
    refuse_megatron(source, paths, index)
    ties = ties_among(index.tensors)
    tensors = {fqn: each for fqn, each in index.tensors.items() if fqn not in ties}
    literals: dict[str, bytes] = {}
    found = FoundLeaves(tensors=tensors, unread=dict(index.unread), ties=ties)
    changed: list[str] = []
    for fqn, path in index.paths.items():
        if fqn not in index.objects:
            found.put(fqn, path, paths[0])
            continue
        place = _place(source, fqn, index.objects[fqn], literals, is_compressed=fqn in index.compressed)
        if fqn in index.unflattened:
            found.add_tree(place.archive.value, path, place)
            changed += [f"{fqn} as one entry"] if isinstance(place.archive.value, dict) else []
        else:
            found.add(fqn, path, place.archive.value, place)
    with name_file_in_errors(paths[0]):
        read = of_weights(found, literals)
        changed += ["the optimizer of Megatron-FSDP"] if read is not found else []
        found = read
        manifest = manifest_of(
            found.leaves(is_ordered=index.is_ordered),
            format_name="dcp",
            model_key=options.model_key,
            optim_key=options.optim_key,
            param_order=options.param_order,
            world_size=len(paths) if is_of_one_rank(paths[0]) else index.num_ranks,
            ties=found.ties,
            include=options.include,
            exclude=options.exclude,
            state=options.state,
        )
    tops = {path: {str(parts[0]) for parts in each.paths.values()} for path, each in indexes.items()}
    trainer = find_trainer_folder(source.files, paths, tops, is_of_dcp)
    used = {file: data for file, data in literals.items() if file in manifest.files}
    manifest = replace(
        manifest,
        trainer=trainer,
        tree=manifest.tree and replace(manifest.tree, changed=tuple(changed)),
        notes=(
            *manifest.notes,
            *of_ranks,
            *notes_on_files(source, indexes),
            *note_missing_optimizers([path.rpartition("/")[0] for path in paths]),
        ),
        literals={**manifest.literals, **used},
        archives=index.archives,
    )
    return with_other_half(with_copies_compared(manifest, source, index), source, paths)


def _joined(indexes: Mapping[str, Index]) -> Index:
    """The trees of several folders as one. Raises MalformedError where they share a name."""
    first, *others = indexes.values()
    for path, other in zip(list(indexes)[1:], others, strict=True):
        twice = first.paths.keys() & other.paths.keys()
        if twice:
            raise MalformedError(
                "another folder of the checkpoint also has an entry with this name", path=path, key=min(twice)
            )
        first = Index(
            {**first.tensors, **other.tensors},
            {**first.objects, **other.objects},
            {**first.paths, **other.paths},
            first.compressed | other.compressed,
            unread={**first.unread, **other.unread},
            unflattened=first.unflattened | other.unflattened,
            num_ranks=most_ranks([first, other]),
            is_ordered=first.is_ordered and other.is_ordered,
        )
    return first


MAX_OBJECT_BYTES = 256 << 20
"""Maximum size of a compressed object; the state of a data loader may have some megabytes."""


def read_object(source: Source, fqn: str, at: ByteRange, inner: dict[StateKey, TensorLeaf]) -> Any:
    """The value of an item that is not compressed; tensors inside it are added to ``inner``, and leave references."""
    place = _place(source, fqn, at, {}, is_compressed=False)
    return with_references(place.archive.value, place, fqn, inner)


def read_number(source: Source, entry: TensorEntry) -> float:
    """The element of a tensor of one, which lies in an item or in the file itself. Raises FormatError."""
    framing, at, literals = entry.shards.framing, entry.shards.get_byte_range(0), dict[str, bytes]()
    if framing is not Framing.RAW:
        place = _place(source, at.file, at, literals, is_compressed=framing is Framing.ZSTD_ITEM)
        at = place.leaf(place.archive.value).shards.get_byte_range(0)
    data = literals[at.file][at.start : at.stop] if literals else source.read(at.file, at.start, at.stop)
    return decode_number(data, entry.shards.dtype)


def _place(source: Source, fqn: str, at: ByteRange, literals: dict[str, bytes], *, is_compressed: bool) -> Place:
    """The archive of an object's item; the content of a compressed one becomes a file of ``literals``."""

    def read(start: int, stop: int) -> bytes:
        return source.read(at.file, at.start + start, at.start + stop)

    size = at.stop - at.start
    if not is_compressed:
        return Place(open_archive(read, size, f"{at.file}: {fqn}"), at.file, at.start, fqn)
    data = decompress_all(read, size, at.file, limit_bytes=MAX_OBJECT_BYTES)
    file = f"{at.file}@{at.start}"
    literals[file] = data
    return Place(open_archive(lambda start, stop: data[start:stop], len(data), f"{file}: {fqn}"), file, 0, fqn)
