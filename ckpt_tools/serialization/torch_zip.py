"""The zip format of ``torch.save``: a pickle and one record per storage, stored without compression.

Facts from torch 2.15.0, torch/serialization.py ``_save`` and caffe2/serialize/inline_container.cc, checked against
files it wrote; docs/formats/torch.md has the layout. Reading takes the directory, the pickle and the local headers of
the storages; no tensor byte is touched. Writing gives segments whose bytes are all known but the elements and their
checksums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Literal, Segment
from ckpt_tools.core.values import StorageRef, StoredTensor, Value
from ckpt_tools.errors import CkptError, FormatError, IncompleteError, MalformedError, UnsafeError, UnsupportedError
from ckpt_tools.messages.wording import format_count
from ckpt_tools.serialization.pickle.dump import dumps_with_storages
from ckpt_tools.serialization.pickle.load import (
    FIRST_READ_SIZES,
    MIN_SIZE_RATIO,
    check_pickle_start,
    load_first_pickle,
    loads,
)
from ckpt_tools.serialization.torch_archive import MAX_PICKLE_BYTES, TorchArchive, parse_storage_id, register_storage
from ckpt_tools.serialization.unread_tensors import explain_unreadable
from ckpt_tools.serialization.zip_archive import (
    ALIGNMENT,
    LOCAL,
    LOCAL_MAGIC,
    TORCHSCRIPT,
    MapReads,
    ReadRange,
    ZipDirectory,
    ZipRecord,
    read_directory,
)

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Source

TAIL_BYTES: Final = 1 << 16
"""One read from the end that holds the directory of an archive of up to about 900 storages."""

ITEM_HEAD_BYTES: Final = 4096
"""One read from the start of a DCP item that covers all its headers, which are about 1,000 bytes before the
elements."""

ITEM_TAIL_BYTES: Final = 2048
"""One read from the end of a DCP item that holds its directory: about 800 bytes."""

DEFAULT_ROOT: Final = "archive"
"""The folder in a zip that torch writes to a stream without a name."""


_RESAVE_ADVICE = "open it with torch.load and save it again with torch.save"


def open_torch_file(source: Source, path: str) -> TorchArchive:
    """Open a torch file of ``source``. Raises as ``open_archive``, and IncompleteError if there is no such file."""
    size, map_reads = source.size(path), source.store.map_files
    return open_archive(lambda start, stop: source.read(path, start, stop), size, path, map_reads=map_reads)


def open_archive(read: ReadRange, size: int, path: str, *, map_reads: MapReads = map) -> TorchArchive:
    """Open the torch file of ``size`` bytes that ``read(start, stop)`` reads, of any torch from 0.1.10 on.

    Raises:
        MalformedError: it is not a torch file, or is damaged. IncompleteError: a storage is absent.
        UnsupportedError: TorchScript, the tar of torch before 0.1.10, big-endian, compressed or encrypted.
    """
    from ckpt_tools.serialization.torch_legacy import MAGIC_READ_BYTES, is_legacy, open_legacy

    def begins_as_legacy() -> bool:
        return is_legacy(read(0, min(size, MAGIC_READ_BYTES)))

    try:
        archive = _open_zip(read, size, path, TAIL_BYTES, map_reads)
    except (FormatError, UnsafeError):
        if not begins_as_legacy():
            raise
        return open_legacy(read, size, path)
    # torch goes by the first bytes, whatever the last ones look like.
    has_leading_bytes = min(record.header_offset for record in archive.records.values()) > 0
    return open_legacy(read, size, path) if has_leading_bytes and begins_as_legacy() else archive


def read_pickle(read: ReadRange, size: int, path: str) -> bytes:
    """The pickle of the torch file of ``size`` bytes, which is not interpreted. Raises as ``open_archive``."""
    directory, root, _ = _read_records(read, size, path, TAIL_BYTES)
    return directory.read_record(read, f"{root}/data.pkl")


def _open_zip(read: ReadRange, size: int, path: str, tail_bytes: int, map_reads: MapReads = map) -> TorchArchive:
    directory, root, records = _read_records(read, size, path, tail_bytes)
    value, storages = _interpret_pickle(directory.read_record(read, f"{root}/data.pkl"), path)
    _check_storage_sizes(storages, records, path)

    def locate_storages() -> Mapping[str, tuple[int, int]]:
        names = {key: f"{root}/data/{key}" for key in storages if f"data/{key}" in records}
        ranges = directory.locate_payloads(read, names.values(), map_reads=map_reads)
        return {key: ranges[name] for key, name in names.items()}

    return TorchArchive(path, value, MappingProxyType(records), storages, locate_storages, root)


def _read_records(
    read: ReadRange, size: int, path: str, tail_bytes: int
) -> tuple[ZipDirectory, str, dict[str, ZipRecord]]:
    """The directory, the name of its one folder, and the records by their name in it, one of them a pickle."""
    directory = read_directory(read, size, path, tail_bytes=tail_bytes)
    if directory is None or not directory.records:
        raise _make_not_archive_error(read, size, path)
    root = next(iter(directory.records)).partition("/")[0]
    prefix = f"{root}/"
    directory_items = directory.records.items()
    records = {name.removeprefix(prefix): record for name, record in directory_items if name.startswith(prefix)}
    if len(records) < len(directory.records):
        raise MalformedError(f"the zip archive is malformed: a record is outside its folder {root!r}", path=path)
    if "constants.pkl" in records or any(name.startswith("code/") for name in records):
        raise UnsupportedError(TORCHSCRIPT, path=path)
    if "data.pkl" not in records:
        raise MalformedError("it is a zip archive, but not of torch.save: it has no data.pkl", path=path)
    _check_byte_order(directory, root, records, read)
    if records["data.pkl"].size > MAX_PICKLE_BYTES:
        raise MalformedError(f"its pickle has {records['data.pkl'].size:,} bytes", path=path)
    _check_pickle_start(directory, f"{root}/data.pkl", read)
    return directory, root, records


def _check_pickle_start(directory: ZipDirectory, name: str, read: ReadRange) -> None:
    if directory.records[name].size >= FIRST_READ_SIZES[0] * MIN_SIZE_RATIO:
        start, stop = directory.locate_payloads(read, [name])[name]
        check_pickle_start(
            lambda first, last: read(start + first, start + last),
            stop - start,
            path=directory.path,
            persistent_load=parse_storage_id,
        )


def _make_not_archive_error(read: ReadRange, size: int, path: str) -> CkptError:
    head = read(0, min(size, 512))
    if head[257:262] == b"ustar":
        problem = "it has the tar format of torch before 0.1.10, which is not supported"
        return UnsupportedError(f"{problem}; {_RESAVE_ADVICE}", path=path)
    if head.startswith(b"PK"):
        return MalformedError("the zip archive has no end; it is truncated or damaged", path=path)
    return MalformedError("it is not a file of torch.save", path=path)


def _check_byte_order(directory: ZipDirectory, root: str, records: Mapping[str, ZipRecord], read: ReadRange) -> None:
    """torch < 2.1 writes no byteorder record, and then little-endian is assumed."""
    if "byteorder" not in records:
        return
    if records["byteorder"].size > 16:
        raise MalformedError("its byte order is unknown", path=directory.path)
    order = directory.read_record(read, f"{root}/byteorder")
    if order == b"big":
        problem = "its elements are big-endian; on a little-endian machine"
        raise UnsupportedError(f"{problem}, {_RESAVE_ADVICE}", path=directory.path)
    if order != b"little":
        raise MalformedError(f"its byte order is {order!r}", path=directory.path)


def _interpret_pickle(data: bytes, path: str) -> tuple[Value, Mapping[str, StorageRef]]:
    """The value of a ``data.pkl`` and the storages that it uses, by key."""
    storages: dict[str, StorageRef] = {}

    def resolve_storage(pid: Value) -> StorageRef:
        return register_storage(storages, parse_storage_id(pid))

    return loads(data, path=path, persistent_load=resolve_storage), MappingProxyType(storages)


def _check_storage_sizes(storages: Mapping[str, StorageRef], records: Mapping[str, ZipRecord], path: str) -> None:
    """Check that every storage has a record of its size, before any byte of it is read; storages on the meta device
    have no record."""
    for key, storage in storages.items():
        record = records.get(f"data/{key}")
        if record is None and storage.location != "meta":
            raise IncompleteError(f"storage {key!r} has no record in the archive", path=path)
        if record is not None and record.size != storage.num_bytes:
            size = format_count(record.size, "byte")
            raise MalformedError(f"storage {key!r} has {size} instead of {storage.num_bytes:,}", path=path)


@dataclass(frozen=True, slots=True)
class ItemLocation:
    """The one tensor of a DCP item: its storage's bytes ``[start, stop)`` of the file, and how it views them.

    ``storage_offset`` and ``strides`` are in elements. The CRC-32 of the storage is stated at byte ``crc_at``.
    """

    start: int
    stop: int
    dtype: DType
    storage_offset: int
    shape: Shape
    strides: Shape
    crc_at: int


def locate_item(read: ReadRange, start: int, stop: int, path: str) -> ItemLocation:
    """Byte range of the elements of the DCP item at ``[start, stop)`` of a file.

    Items of one size whose bytes before the elements are equal have their elements at the same offset, so that each
    except the first costs one read of 4 KiB and a comparison.

    Raises:
        FormatError: it is not a torch archive of one tensor.
    """
    #   | headers, pickle, padding | elements | directory |
    #     prefix: equal bytes of an item of equal size put the elements at the same offset
    head = read(start, min(start + ITEM_HEAD_BYTES, stop))
    prefix, location = _known_items.get(stop - start, (None, None))
    if prefix is None or location is None or not head.startswith(prefix):
        location, pickle_stop = _parse_item(read, start, stop, path, head)
        if location.start <= len(head) and pickle_stop <= location.start:
            if len(_known_items) >= MAX_KNOWN_ITEMS:
                _known_items.clear()
            _known_items[stop - start] = head[: location.start], location
    first, last, crc_at = (start + at for at in (location.start, location.stop, location.crc_at))
    return replace(location, start=first, stop=last, crc_at=crc_at)


PICKLE_BYTES: Final = 16 << 10
"""One read from the start of a DCP item that covers the pickle of its tensor, of any class."""


def read_item_value(head: bytes, path: str) -> Value:
    """Value of the DCP item that begins with ``head``, from its pickle alone, which is the first record.

    Raises:
        MalformedError: it is not a torch archive, or its pickle is longer than ``head``.
    """
    if len(head) < LOCAL.size or not head.startswith(LOCAL_MAGIC):
        raise MalformedError("it is not a file of torch.save", path=path)
    *_, name_bytes, extra_bytes = LOCAL.unpack_from(head)
    start = LOCAL.size + name_bytes + extra_bytes
    return load_first_pickle(head[start:], path=path, persistent_load=parse_storage_id).value


MAX_KNOWN_ITEMS: Final = 4096
"""Sizes of items remembered by a process, at about 2 KiB each."""

_known_items: dict[int, tuple[bytes, ItemLocation]] = {}
"""By the size of an item: its bytes before the elements, and where these are from its start."""


def _parse_item(read: ReadRange, start: int, stop: int, path: str, head: bytes) -> tuple[ItemLocation, int]:
    """Offset of the elements from the start of the item, and the end of its pickle."""
    size = stop - start
    tail_start = max(size - ITEM_TAIL_BYTES, 0)
    tail = head[tail_start:] if len(head) == size else read(start + tail_start, stop)

    def read_item(first: int, last: int) -> bytes:
        if last <= len(head):
            return head[first:last]
        if first >= tail_start:
            return tail[first - tail_start : last - tail_start]
        return read(start + first, start + last)

    archive = _open_zip(read_item, size, path, ITEM_TAIL_BYTES)
    tensor = archive.value
    reason = explain_unreadable(tensor)
    if reason is not None:
        raise UnsupportedError(f"the item at byte {start:,} does not contain a plain tensor: {reason}", path=path)
    if not isinstance(tensor, StoredTensor) or tensor.storage is None:
        raise MalformedError(f"the item at byte {start:,} does not contain a tensor", path=path)
    storage_start, storage_stop = archive.locate_storage(tensor.storage.key)
    crc_at = archive.records[f"data/{tensor.storage.key}"].crc_at
    location = ItemLocation(
        storage_start, storage_stop, tensor.dtype, tensor.storage_offset, tensor.shape, tensor.strides, crc_at
    )
    pickle = archive.records["data.pkl"]
    return location, pickle.header_offset + pickle.size


def make_archive_segments(
    value: Value, storages: Mapping[str, Sequence[Segment]], *, root: str = DEFAULT_ROOT, base: int = 0
) -> list[Segment]:
    """The torch file that holds ``value``, as segments; ``storages`` gives the segments of each storage by its key.

    Storages are written in the order of ``storages``; torch numbers them ``"0"``, ``"1"``, ... in the order in which
    the pickle meets them. ``root`` is the folder in the zip, ``base`` the offset in its file at which the archive
    starts (a DCP item): checksums cover ranges of the file.
    """
    return TorchFileContent.of(value, storages).make_segments(storages, root=root, base=base)


def get_archive_root(path: str) -> str:
    """The folder in the zip that torch makes where it writes a file by its name: the name without its ending."""
    name = path.rpartition("/")[2]
    return name.rpartition(".")[0] or name


@dataclass(frozen=True, slots=True)
class TorchFileContent:
    """The pickle of a file, and how many bytes each storage has. Files of several ranks can share it."""

    pickle: bytes = field(repr=False)
    sizes: Mapping[str, int] = field(repr=False)

    @classmethod
    def of(cls, value: Value, storages: Mapping[str, Sequence[Segment]]) -> TorchFileContent:
        pickle, used = dumps_with_storages(value)
        sizes = {key: sum(segment.num_bytes for segment in segments) for key, segments in storages.items()}
        assert sizes == {key: ref.num_bytes for key, ref in used.items()}, "the storages are those of the value"
        return cls(pickle, sizes)

    def make_segments(self, storages: Mapping[str, Sequence[Segment]], *, root: str, base: int = 0) -> list[Segment]:
        """Segments of the file with these ``storages``, which have the ``sizes``."""
        from xxhash import xxh3_128_intdigest

        from ckpt_tools.serialization.zip_writer import ArchiveWriter

        writer = ArchiveWriter(root, base=base)
        for name, content in _HEAD_RECORDS.items():
            writer.add_record(name, [Literal(content or self.pickle)])
        for key in self.sizes:
            writer.add_record(f"data/{key}", storages[key])
        writer.add_record("version", [Literal(b"3\n")])
        # Forty digits. torch hashes the checksums of the records, which are not known yet; nothing reads them.
        writer.add_record(".data/serialization_id", [Literal(b"%040d" % (xxh3_128_intdigest(self.pickle) % 10**40))])
        return writer.finish()


_HEAD_RECORDS = {
    "data.pkl": b"",
    ".format_version": b"1",
    ".storage_alignment": str(ALIGNMENT).encode(),
    "byteorder": b"little",
}
"""The records before the storages, in torch's order; the first is the pickle."""
