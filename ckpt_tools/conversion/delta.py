"""Writes the changes from one version of a model's weights to the next (``formats.safetensors.deltas``).

The size of a compressed tensor is known only when it is compressed. Workers append their frames to one temporary file,
a MiB at a time and in any order; the file of the output is made of it once all sizes are known. So memory does not
depend on the sizes of tensors, and the folder for temporary files (``TMPDIR``) needs room for the delta.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO, ClassVar, NamedTuple

import numpy as np

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, TensorEntry
from ckpt_tools.core.notes import Note, Outcome, merge_notes
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.core.shards import ByteRange, ShardTable
from ckpt_tools.errors import DestinationExistsError, UsageError
from ckpt_tools.formats.safetensors.deltas import format_version, make_hasher
from ckpt_tools.formats.safetensors.files import INDEX_NAME, encode_header
from ckpt_tools.messages.progress import ProgressCallback, ProgressMeter
from ckpt_tools.messages.showing import DisplayableResult
from ckpt_tools.messages.wording import format_count, join_names
from ckpt_tools.process.signals import defer_signals
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.runs.weight_source import WeightSource, match_weights
from ckpt_tools.serialization.zstd import make_compressor
from ckpt_tools.stores.destination import Destination
from ckpt_tools.stores.output_names import OutputForm
from ckpt_tools.stores.urls import StorageOptions, check_not_nested, open_output_location
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.transfer.tensor_checks import check_required_equal
from ckpt_tools.transfer.tensor_reader import TensorReader
from ckpt_tools.transfer.workers import choose_num_workers
from ckpt_tools.verification.digest_files import write_small_file

ZSTD_LEVEL = 1
CHECKSUM_FORMAT = "xxh3-128"
DELTA_METADATA = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": CHECKSUM_FORMAT}
"""As slime writes them by default."""

BLOCK_BYTES = 1 << 20
"""Of each version, read, compared and compressed at a time by each worker."""

FILE_NAME = "model-00000-of-00001.safetensors"
"""One file: SGLang has all files of a delta in memory, however many there are."""

_FOLDER_NAME = re.compile(r"weight_v(\d{6})")


@dataclass(frozen=True, slots=True, repr=False)
class DeltaReport(DisplayableResult):
    """Result of ``delta``. ``num_bytes`` are those of the model, ``bytes_written`` those of the files."""

    SHOWN: ClassVar[tuple[str, ...]] = ("destination", "num_changed_elements", "changed_ratio", "bytes_written")
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("changed_ratio", "size_ratio")

    destination: str
    version: int
    base_version: int
    num_tensors: int
    num_changed_tensors: int
    num_elements: int
    num_changed_elements: int
    num_bytes: int
    bytes_written: int
    seconds: float
    notes: tuple[Note, ...]

    @property
    def changed_ratio(self) -> float:
        """The part of all elements that changed."""
        return self.num_changed_elements / max(1, self.num_elements)

    @property
    def size_ratio(self) -> float:
        """The size of the delta beside that of the model."""
        return self.bytes_written / max(1, self.num_bytes)


class _Pair(NamedTuple):
    """A tensor of both versions."""

    name: str
    old: TensorEntry
    new: TensorEntry


class _Frame(NamedTuple):
    """The compressed change of a tensor: ``parts`` of the temporary file, from the first to the last byte."""

    parts: Sequence[tuple[int, int]]
    num_changed: int
    digest: str

    @property
    def num_bytes(self) -> int:
        return sum(stop - start for start, stop in self.parts)


def write_delta(
    old: str | Path,
    new: str | Path,
    out: str | Path,
    *,
    workers: int | None,
    fsync: bool,
    storage_options: StorageOptions,
    on_progress: ProgressCallback,
) -> DeltaReport:
    """Write to ``out`` what turns the weights of ``old`` into those of ``new``: whole, or not at all.

    Raises:
        UsageError: ``out`` has no name of a version, or the two do not hold the same tensors. DestinationExistsError:
            something is at ``out``. CkptError: as ``open_checkpoint``; as the stores say.
    """
    start_seconds = time.perf_counter()
    place = open_output_location(out, storage_options).with_form(OutputForm())
    match = _FOLDER_NAME.fullmatch(place.name)
    if match is None or not int(match[1]):
        raise UsageError(f"{out}: name a folder as engines look for it, {format_version(1)} or that of a later version")
    version = int(match[1])
    if place.list_contents() is not None:
        raise DestinationExistsError(f"{place.url} exists, and a published version is not replaced; write the next one")
    options = ReadOptions(state="model")
    versions = [open_checkpoint(url, options, storage_options=storage_options) for url in (old, new)]
    for opened in versions:
        check_not_nested(opened.url, out, storage_options)
    old_match = _FOLDER_NAME.fullmatch(str(versions[0].url).rstrip("/").rpartition("/")[2])
    if old_match is not None and int(old_match[1]) != version - 1:
        raise UsageError(f"{out} is a delta against version {version - 1}, and {old} is version {int(old_match[1])}")
    pairs, notes = _pair_tensors(*versions)
    num_bytes = sum(pair.old.num_bytes for pair in pairs)
    readers = [TensorReader(opened.source.store, BLOCK_BYTES) for opened in versions]
    with tempfile.TemporaryFile() as spool_file, place.claim(overwrite=False, resume=False, fsync=fsync) as claim:
        encoder = _Encoder(readers, spool_file, ProgressMeter(on_progress, num_bytes))
        frames = dict(ThreadRunner(choose_num_workers(workers, old, new, out)).run(encoder.compress_change, pairs))
        for reader in readers:
            reader.check_remaining_records()
        changed = {pair.name: frames[pair.name] for pair in pairs if frames[pair.name].num_changed}
        metadata = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}", **DELTA_METADATA}
        index = {"metadata": metadata, "weight_map": dict.fromkeys(changed, FILE_NAME)}
        index_text = json.dumps(index, indent=2, ensure_ascii=False).encode()
        file_bytes = _write_frame_file(claim.destination, changed, spool_file) if changed else 0
        write_small_file(claim.destination, INDEX_NAME, index_text)
        with defer_signals():  # publishing is the one step that a signal must not tear apart
            claim.publish_files([*([FILE_NAME] if changed else []), INDEX_NAME])
    return DeltaReport(
        destination=place.url,
        version=version,
        base_version=version - 1,
        num_tensors=len(pairs),
        num_changed_tensors=len(changed),
        num_elements=sum(pair.old.numel for pair in pairs),
        num_changed_elements=sum(frame.num_changed for frame in changed.values()),
        num_bytes=num_bytes,
        bytes_written=file_bytes + len(index_text),
        seconds=time.perf_counter() - start_seconds,
        notes=notes,
    )


def _pair_tensors(old: OpenedCheckpoint, new: OpenedCheckpoint) -> tuple[list[_Pair], tuple[Note, ...]]:
    """Each tensor that the old version stores with the new one of this name, in the dtype of the old; and the notes of
    both. Raises UsageError where names, shapes or types differ: a delta has bytes of tensors that are there."""
    base, other = (WeightSource.of(opened, ConvertOptions(), drops_entries=True) for opened in (old, new))
    found, equal_pairs = match_weights([other], base, base.list_names(), lambda _: True)
    if new_aliases := other.manifest.aliases.keys() - base.manifest.weights - base.manifest.aliases.keys():
        raise UsageError(f"{base.label} lacks {join_names(sorted(new_aliases))}, and a delta adds no names")
    check_required_equal(base.manifest, old.source.store)
    must_equal = (*other.manifest.must_equal, *equal_pairs)
    check_required_equal(replace(other.manifest, must_equal=must_equal), new.source.store)
    pairs, num_cast, notes = list[_Pair](), 0, [*base.notes, *other.notes]
    for name, entry in base.manifest.weights.items():
        num_cast += found[name][0].dtype is not entry.dtype
        pairs.append(_Pair(name, entry, found[name][0].cast_to(entry.dtype)))
    if num_cast:
        notes.append(Note(Outcome.CAST, format_count(num_cast, "tensor"), f"to the dtypes in {base.label}", num_cast))
    return pairs, merge_notes(notes)


@dataclass(slots=True)
class _Encoder:
    """Compresses changes into ``spool_file``. ``readers`` are of the old and the new version. Threads may share it."""

    readers: Sequence[TensorReader]
    spool_file: IO[bytes]
    meter: ProgressMeter
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def compress_change(self, pair: _Pair) -> tuple[str, _Frame]:
        """The name of a tensor and the compressed ``old ^ new``, with the checksum of the new one. Raises CkptError."""
        item_bytes, numel = pair.old.dtype.item_bytes, pair.old.numel
        compressor, hasher = make_compressor(ZSTD_LEVEL, pair.old.num_bytes), make_hasher(CHECKSUM_FORMAT)
        num_changed, compressed, parts = 0, bytearray(), list[tuple[int, int]]()
        block_numel = BLOCK_BYTES // item_bytes
        buffers = np.empty((2, min(numel, block_numel) * item_bytes), np.uint8)
        for start in range(0, numel, block_numel):
            stop = min(start + block_numel, numel)
            old, new = buffers[:, : (stop - start) * item_bytes]
            for reader, entry, block in zip(self.readers, (pair.old, pair.new), (old, new), strict=True):
                reader.read(entry, Box.whole(entry.shape), entry.shape, start, stop, block.data)
            hasher.update(new)
            old ^= new
            is_number = item_bytes in (1, 2, 4, 8)
            elements = old.view(f"u{item_bytes}") if is_number else old.reshape(-1, item_bytes).any(axis=1)
            num_changed += int(np.count_nonzero(elements))
            compressed += compressor.compress(old)
            if len(compressed) >= BLOCK_BYTES:
                parts.append(self._spool_part(compressed))
                compressed.clear()
            with self._lock:
                self.meter.add_bytes(len(new))
        compressed += compressor.flush()
        parts.append(self._spool_part(compressed))
        return pair.name, _Frame(parts, num_changed, hasher.hexdigest())

    def _spool_part(self, data: bytearray) -> tuple[int, int]:
        with self._lock:
            start = self.spool_file.seek(0, os.SEEK_END)
            self.spool_file.write(data)
            return start, start + len(data)


def _write_frame_file(destination: Destination, frames: Mapping[str, _Frame], spool_file: IO[bytes]) -> int:
    """The file of the frames and their checksums; its size in bytes. Raises StoreError."""
    entries = {}
    for name, frame in frames.items():
        shape = (frame.num_bytes,)
        table = ShardTable.whole(shape, DType.UINT8, ByteRange(FILE_NAME, 0, frame.num_bytes))
        entries[name] = TensorEntry(shape, DType.UINT8, Kind.BUFFER, table)
    pending = bytearray(encode_header(entries, {name: frame.digest for name, frame in frames.items()}))
    size = len(pending) + sum(frame.num_bytes for frame in frames.values())
    handle, tags, offset = destination.begin_file(FILE_NAME, size), list[str](), 0
    part_bytes = max(4 * BLOCK_BYTES, destination.part_rules.required_task_bytes(size))
    for start, stop in chain.from_iterable(frame.parts for frame in frames.values()):
        spool_file.seek(start)
        pending += spool_file.read(stop - start)
        while len(pending) >= part_bytes or (pending and offset + len(pending) == size):
            data = bytes(pending[:part_bytes])
            tags.append(destination.write_part(FILE_NAME, handle, len(tags), offset, data))
            offset += len(data)
            del pending[:part_bytes]
    destination.finish_file(FILE_NAME, handle, tags)
    return size
