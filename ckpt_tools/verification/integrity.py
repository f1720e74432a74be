"""Checks one checkpoint by itself: every tensor byte can be read and matches the checksum stored with it.

A torch zip states a CRC-32 for each of its records, unless torch was told to save without, and a DCP item is such a
zip, whose pickle has to state the dtype and shape that the index states. safetensors has no checksums, so the check
shows only that every tensor can be read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from isal import isal_zlib

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Manifest, StateKey, tensors_by_role
from ckpt_tools.core.progress import Progress
from ckpt_tools.core.shards import ByteRange, Framing, ShardTable
from ckpt_tools.errors import FormatError, UnsafeError
from ckpt_tools.serialization.zip_archive import read_directory
from ckpt_tools.stores.source import Source
from ckpt_tools.transfer.inflating import MAX_OVERHEAD_BYTES, Inflating, inflated_name
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.verification.compare import BLOCK_BYTES
from ckpt_tools.verification.report import Aspect, Difference, VerifyReport

DIRECTORY_TAIL_BYTES = 1 << 16
"""One read from the end of a file that usually holds the whole zip directory."""

ZIP_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Archive:
    """A stored zip in a file of the checkpoint, with the first of the tensors in it, for messages."""

    at: ByteRange
    key: StateKey
    limit_bytes: int | None = None
    """The most that it may decompress to, where it is compressed."""
    stated: tuple[DType, Shape] | None = None
    """What the index states of the one tensor that is the archive."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one archive or range: the bytes read, and the records whose checksum does not match."""

    num_bytes: int
    broken: tuple[Difference, ...]


def check_integrity(source: Source, manifest: Manifest, *, num_workers: int, on_progress: Progress) -> VerifyReport:
    """Read every file with tensors once and report the records whose stored checksum does not match.

    Raises:
        CkptError: bytes cannot be read.
    """
    archives = list(_archives(source, manifest))
    total, done = sum(archive.at.stop - archive.at.start for archive in archives), 0
    broken: list[Difference] = []
    for checked in ThreadRunner(num_workers).run(_Check(source), archives):
        done += checked.num_bytes
        on_progress(done, total)
        broken += checked.broken
    num_bytes = sum(entry.num_bytes for entry in manifest.tensors.values())
    return VerifyReport(tensors_by_role(manifest.tensors), num_bytes, tuple(broken))


def _archives(source: Source, manifest: Manifest) -> Iterator[Archive]:
    """The items of a DCP, and its objects that hold tensors; elsewhere, whole files."""
    within: defaultdict[str, list[ByteRange]] = defaultdict(list)
    for at in manifest.archives:
        within[at.file].append(at)
    whole: dict[str, StateKey] = {}
    for key, entry in manifest.tensors.items():
        table = entry.shards
        if table.framing is not Framing.RAW:
            yield from (_item(table, row, key) for row in range(len(table)))
        else:
            files = {table.files[number] for number in table.file_ids.tolist()}
            whole |= {file: key for file in sorted(files) if file not in whole and file not in manifest.literals}
    for file, key in whole.items():
        yield from (Archive(at, key) for at in within.get(file) or [ByteRange(file, 0, source.size(file))])


def _item(table: ShardTable, row: int, key: StateKey) -> Archive:
    limit = None
    if table.framing is Framing.ZSTD_ITEM:
        limit = int(table.numels[row]) * table.dtype.item_bytes + MAX_OVERHEAD_BYTES
    return Archive(table.byte_range(row), key, limit, (table.dtype, table.box(row).shape))


@dataclass(frozen=True, slots=True)
class _Inflated:
    inflating: Inflating

    def read(self, path: str, start: int, stop: int) -> bytes:
        buffer = bytearray(stop - start)
        self.inflating.read_into(path, start, memoryview(buffer))
        return bytes(buffer)


@dataclass(frozen=True, slots=True)
class _Check:
    source: Source | _Inflated

    def __call__(self, archive: Archive) -> Checked:
        at, broken = archive.at, list[str]()
        if archive.limit_bytes is not None:
            broken = self._broken_inside(archive, archive.limit_bytes)
        elif archive.stated is not None or (at.stop - at.start >= 4 and self._read(at, 0, 4) == ZIP_MAGIC):
            broken = self._broken_records(archive)
        else:
            self._crc32(at, 0, at.stop - at.start)  # reads every byte
        return Checked(at.stop - at.start, tuple(Difference(archive.key, Aspect.CHECKSUM, what) for what in broken))

    def _read(self, at: ByteRange, start: int, stop: int) -> bytes:
        return self.source.read(at.file, at.start + start, at.start + stop)

    def _broken_inside(self, archive: Archive, limit_bytes: int) -> list[str]:
        """Broken records in a compressed range, which has to be a zip."""
        at = archive.at
        inflating, name = Inflating(self.source.read), inflated_name(at)
        try:
            whole = ByteRange(name, 0, inflating.size(at, limit_bytes=limit_bytes))
            broken = _Check(_Inflated(inflating))._broken_records(replace(archive, at=whole))
        except (FormatError, UnsafeError) as error:
            broken = [str(error)]
        return [what.replace(name, at.file) for what in broken]

    def _broken_records(self, archive: Archive) -> list[str]:
        at = archive.at
        read = partial(self._read, at)
        directory = read_directory(read, at.stop - at.start, at.file, tail_bytes=DIRECTORY_TAIL_BYTES)
        if directory is None:
            return [f"{at.file}: the zip archive at byte {at.start:,} has no end"]
        ranges = directory.payload_ranges(read, directory.records)
        broken = [
            f"{at.file}: the record {name} at byte {at.start + start:,} does not have its stored CRC-32"
            for name, (start, stop) in ranges.items()
            if self._crc32(at, start, stop) != directory.records[name].crc32 and directory.records[name].states_checksum
        ]
        return broken if broken or archive.stated is None else self._misstated(at, *archive.stated)

    def _misstated(self, at: ByteRange, dtype: DType, shape: Shape) -> list[str]:
        """The index may give a piece of another number of dims, as the interval of a flat tensor."""
        from ckpt_tools.serialization.torch_zip import locate_item

        found = locate_item(partial(self.source.read, at.file), at.start, at.stop, at.file)
        is_flat = len(found.shape) != len(shape) and prod(found.shape) == prod(shape)
        if found.dtype is dtype and (is_flat or found.shape == shape):
            return []
        held = f"{list(found.shape)} of {found.dtype.value}"
        return [
            f"{at.file}: the item at byte {at.start:,} holds {held}, its index states {list(shape)} of {dtype.value}"
        ]

    def _crc32(self, at: ByteRange, start: int, stop: int) -> int:
        value = 0
        for first in range(start, stop, BLOCK_BYTES):
            value = isal_zlib.crc32(self._read(at, first, min(first + BLOCK_BYTES, stop)), value)
        return value
