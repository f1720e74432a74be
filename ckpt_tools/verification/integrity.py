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
from ckpt_tools.core.manifest import Manifest, StateKey, count_tensors_by_role
from ckpt_tools.core.shards import ByteRange, Framing
from ckpt_tools.errors import FormatError, UnsafeError
from ckpt_tools.messages.progress import ProgressCallback
from ckpt_tools.serialization.zip_archive import read_directory
from ckpt_tools.stores.local.direct import bypass_cache_if_large
from ckpt_tools.stores.source import Source
from ckpt_tools.transfer.inflating import MAX_OVERHEAD_BYTES, InflatedReader, inflated_name
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.verification.compare import BLOCK_BYTES
from ckpt_tools.verification.report import Aspect, Difference, VerifyReport

DIRECTORY_TAIL_BYTES = 1 << 16
"""One read from the end of a file that usually holds the whole zip directory."""

ZIP_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class StoredArchive:
    """A stored zip in a file of the checkpoint, with the first of the tensors in it, for messages."""

    at: ByteRange
    key: StateKey
    limit_bytes: int | None = None
    """The most that it may decompress to, where it is compressed."""
    index_entry: tuple[DType, Shape] | None = None
    """What the index states of the one tensor that is the archive."""


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """The result for one archive or range: the bytes read, and the records whose checksum does not match."""

    num_bytes: int
    differences: tuple[Difference, ...]


def check_integrity(
    source: Source, manifest: Manifest, *, num_workers: int, on_progress: ProgressCallback
) -> VerifyReport:
    """Read every file with tensors once and report the records whose stored checksum does not match.

    Raises:
        CkptError: bytes cannot be read.
    """
    archives = list(_list_archives(source, manifest))
    total, num_bytes_done = sum(archive.at.stop - archive.at.start for archive in archives), 0
    bypass_cache_if_large(source.store, total)
    differences: list[Difference] = []
    for result in ThreadRunner(num_workers).run(_ArchiveChecker(source), archives):
        num_bytes_done += result.num_bytes
        on_progress(num_bytes_done, total)
        differences += result.differences
    num_bytes = sum(entry.num_bytes for entry in manifest.tensors.values())
    return VerifyReport(count_tensors_by_role(manifest.tensors), num_bytes, tuple(differences))


def _list_archives(source: Source, manifest: Manifest) -> Iterator[StoredArchive]:
    """The pieces that are read once: the items of a DCP, and its objects that hold tensors; elsewhere, whole files."""
    # An item is one archive, whose pickle must state the dtype and shape of the index. An object of a DCP is an archive
    # that the manifest lists. Any other file is read whole; if it begins as a zip, its records have CRC-32s.
    archives: defaultdict[str, list[ByteRange]] = defaultdict(list)
    for byte_range in manifest.archives:
        archives[byte_range.file].append(byte_range)
    keys: dict[str, StateKey] = {}
    for key, entry in manifest.tensors.items():
        table = entry.shards
        if table.framing is not Framing.RAW:
            for row in range(len(table)):
                limit_bytes = None
                if table.framing is Framing.ZSTD_ITEM:
                    limit_bytes = int(table.numels[row]) * table.dtype.item_bytes + MAX_OVERHEAD_BYTES
                expected_content = table.dtype, table.get_box(row).shape
                yield StoredArchive(table.get_byte_range(row), key, limit_bytes, expected_content)
        else:
            files = {table.files[number] for number in table.file_ids.tolist()}
            keys |= {file: key for file in sorted(files) if file not in keys and file not in manifest.literals}
    for file, key in keys.items():
        yield from (StoredArchive(at, key) for at in archives.get(file) or [ByteRange(file, 0, source.size(file))])


@dataclass(frozen=True, slots=True)
class _InflatedSource:
    inflating: InflatedReader

    def read(self, path: str, start: int, stop: int) -> bytes:
        buffer = bytearray(stop - start)
        self.inflating.read_into(path, start, memoryview(buffer))
        return bytes(buffer)


@dataclass(frozen=True, slots=True)
class _ArchiveChecker:
    source: Source | _InflatedSource

    def __call__(self, archive: StoredArchive) -> ArchiveResult:
        byte_range, messages = archive.at, list[str]()
        if archive.limit_bytes is not None:
            messages = self._find_broken_in_compressed(archive, archive.limit_bytes)
        elif archive.index_entry is not None or (
            byte_range.stop - byte_range.start >= 4 and self._read_range(byte_range, 0, 4) == ZIP_MAGIC
        ):
            messages = self._find_broken_records(archive)
        else:
            self._compute_crc32(byte_range, 0, byte_range.stop - byte_range.start)  # reads every byte
        return ArchiveResult(
            byte_range.stop - byte_range.start,
            tuple(Difference(archive.key, Aspect.CHECKSUM, what) for what in messages),
        )

    def _read_range(self, byte_range: ByteRange, start: int, stop: int) -> bytes:
        return self.source.read(byte_range.file, byte_range.start + start, byte_range.start + stop)

    def _find_broken_in_compressed(self, archive: StoredArchive, limit_bytes: int) -> list[str]:
        """Broken records in a compressed range, which has to be a zip."""
        byte_range = archive.at
        inflating, inflated_file = InflatedReader(self.source.read), inflated_name(byte_range)
        try:
            inflated = ByteRange(inflated_file, 0, inflating.inflated_size(byte_range, limit_bytes=limit_bytes))
            messages = _ArchiveChecker(_InflatedSource(inflating))._find_broken_records(replace(archive, at=inflated))
        except (FormatError, UnsafeError) as error:
            messages = [str(error)]
        return [what.replace(inflated_file, byte_range.file) for what in messages]

    def _find_broken_records(self, archive: StoredArchive) -> list[str]:
        span = archive.at
        read_range = partial(self._read_range, span)
        directory = read_directory(read_range, span.stop - span.start, span.file, tail_bytes=DIRECTORY_TAIL_BYTES)
        if directory is None:
            return [f"{span.file}: the zip archive at byte {span.start:,} has no end"]
        ranges = directory.locate_payloads(read_range, directory.records)
        messages = [
            f"{span.file}: the record {name} at byte {span.start + start:,} does not have its stored CRC-32"
            for name, (start, stop) in ranges.items()
            if self._compute_crc32(span, start, stop) != directory.records[name].crc32
            and directory.records[name].states_checksum
        ]
        if messages or archive.index_entry is None:
            return messages
        return self._find_misstatement(span, *archive.index_entry)

    def _find_misstatement(self, span: ByteRange, dtype: DType, shape: Shape) -> list[str]:
        """The index may give a piece of another number of dims, as the interval of a flat tensor."""
        from ckpt_tools.serialization.torch_zip import locate_item

        item = locate_item(partial(self.source.read, span.file), span.start, span.stop, span.file)
        is_flat = len(item.shape) != len(shape) and prod(item.shape) == prod(shape)
        if item.dtype is dtype and (is_flat or item.shape == shape):
            return []
        actual = f"{list(item.shape)} of {item.dtype.value}"
        return [
            f"{span.file}: the item at byte {span.start:,} holds {actual}, its index states "
            f"{list(shape)} of {dtype.value}"
        ]

    def _compute_crc32(self, byte_range: ByteRange, start: int, stop: int) -> int:
        crc32 = 0
        for first in range(start, stop, BLOCK_BYTES):
            crc32 = isal_zlib.crc32(self._read_range(byte_range, first, min(first + BLOCK_BYTES, stop)), crc32)
        return crc32
