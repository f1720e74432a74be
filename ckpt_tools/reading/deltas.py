"""Opens a published delta as the model that it makes: the newest full version before it, and all deltas since then.

weight_v000000 (the model that the engine started from) ◀─ weight_v000001 ◀─ weight_v000002
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.core.transforms import keep_model_only
from ckpt_tools.errors import CkptError, IncompleteError, SourceNotFoundError, UnsupportedError
from ckpt_tools.formats.safetensors.deltas import (
    Delta,
    PatchedStore,
    PatchedTensor,
    TensorChange,
    estimate_patching_bytes,
    format_version,
    read_delta,
)
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.wrappers import RedirectingStore


def open_patched_model(
    url: str, source: Source, open_source: Callable[[str], Source], open_model: Callable[[str], OpenedCheckpoint]
) -> tuple[Source, Manifest]:
    """The weights that the delta ``source``, at ``url``, makes of those before it, and a source of their files.

    Raises:
        IncompleteError: a version is missing. UnsupportedError: the base lacks a tensor, or does not hold it in one
            range of a file. CkptError: as ``read_delta`` and ``open_model``.
    """
    folder = url.rpartition("/")[0] if url.endswith(".index.json") else url.rstrip("/")
    parent, _, newest_name = folder.rpartition("/")
    deltas = _read_chain(parent, newest_name, source, open_source)
    base_name = format_version(next(iter(deltas.values())).base_version)
    base = open_model(f"{parent}/{base_name}")
    model, model_notes = keep_model_only(
        base.manifest, weight_copy="model", is_requested=False, entry_names=base.manifest.extra
    )
    tensors, patched = dict(model.tensors), dict[str, PatchedTensor]()
    for tensor, changes in _collect_changes(deltas).items():
        entry = tensors.get(StateKey(tensor))
        stored_range = None if entry is None or not entry.is_as_stored else entry.shards.whole_range
        if entry is None or stored_range is None:
            why = f"the delta changes it, and {base_name} has no such tensor in one range of a file"
            raise UnsupportedError(why, path=changes[0].frame.file, key=tensor)
        file = f".patched:{tensor}"  # hidden: any other file beside a model is copied with it
        patched[file] = PatchedTensor(tensor, entry.dtype, stored_range, changes)
        shards = ShardTable.whole(entry.shape, entry.dtype, ByteRange(file, 0, entry.num_bytes))
        tensors[StateKey(tensor)] = replace(entry, shards=shards)
    files = {
        change.frame.file: (delta.source.store, change.frame.file.removeprefix(f"{name}/"))
        for name, delta in deltas.items()
        for change in _place_changes(name, delta).values()
    }
    manifest = replace(
        model,
        tensors=tensors,
        notes=(*model.notes, *model_notes, *_note_deltas(base_name, deltas, len(patched))),
        stored_bytes=base.manifest.stored_bytes + sum(sum(each.source.files.values()) for each in deltas.values()),
        decoding_bytes=base.manifest.decoding_bytes + estimate_patching_bytes(len(deltas)),
        step=None,
        step_claims=(),
    )
    store = PatchedStore(RedirectingStore(base.source.store, files), patched)
    return Source(store, {**base.source.files, **store.generated_sizes}), manifest


def _read_chain(parent: str, name: str, source: Source, open_source: Callable[[str], Source]) -> dict[str, Delta]:
    """The delta ``source``, which is the folder ``name`` of ``parent``, and those before it until a full version, by
    the names of their folders, the oldest first."""
    deltas: dict[str, Delta] = {}
    while (delta := _read_named_delta(name, source)) is not None:
        if deltas and format_version(delta.version) != name:
            raise UnsupportedError(f"its index says that it is version {delta.version}", path=name)
        deltas = {name: delta, **deltas}
        name = format_version(delta.base_version)
        try:
            source = open_source(f"{parent}/{name}")
        except SourceNotFoundError as error:
            newer = next(iter(deltas))
            way = "" if delta.base_version else "; put the model there that the engine started from, or a link to it"
            why = f"{newer} is a delta against this version, which is missing beside it{way}"
            raise IncompleteError(why, path=f"{parent}/{name}") from error
    return deltas


def _read_named_delta(name: str, source: Source) -> Delta | None:
    try:
        return read_delta(source)
    except CkptError as error:
        error.path = f"{name}/{error.path}"
        raise


def _place_changes(name: str, delta: Delta) -> Mapping[str, TensorChange]:
    """The changes, whose files have the name of their folder in front: no file of a model has one that is read."""
    return {
        tensor: replace(change, frame=replace(change.frame, file=f"{name}/{change.frame.file}"))
        for tensor, change in delta.changes.items()
    }


def _collect_changes(deltas: Mapping[str, Delta]) -> dict[str, tuple[TensorChange, ...]]:
    """The changes of each tensor, the oldest first."""
    collected: dict[str, tuple[TensorChange, ...]] = {}
    for name, delta in deltas.items():
        for tensor, change in _place_changes(name, delta).items():
            collected[tensor] = (*collected.get(tensor, ()), change)
    return collected


def _note_deltas(base_name: str, deltas: Mapping[str, Delta], num_patched: int) -> Sequence[Note]:
    what, why = format_count(num_patched, "tensor"), f"{join_names([*deltas])} over {base_name}"
    notes = [Note(Outcome.MERGED, what, why, num_patched, asked=True)]
    others = [f"{name}/{file}" for name, delta in deltas.items() for file in delta.unread_files]
    if others:
        notes.append(
            Note(Outcome.DROPPED, join_names(others), "a delta is its index and the files that this names", len(others))
        )
    return notes
