"""Published deltas: folders that hold the changes of an earlier version of a model's weights.

Written by slime (``update_weight_from_disk_delta.py``) and miles, applied by SGLang
(``srt/weight_sync/local_checkpoint.py``), in August 2026. ``weight_vNNNNNN`` is version N: a model, or a delta against
``base_version``, the folder of that number beside it; version 0 is the model that the engine started from. The index
of a delta has in ``metadata``:

    version, base_version    numbers of six digits, as texts
    delta_encoding           xor: new ^ old; overwrite: a count, positions (all u32) and new values of bytes
    compression_format       zstd, one frame a tensor
    checksum_format          of the tensor after the change: xxh3-128, blake3 or adler32

A tensor of its files is the frame that changes the tensor of this name, as bytes; ``__metadata__`` of the file has its
checksum. Tensors that did not change are in no file.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.shards import ByteRange
from ckpt_tools.core.values import format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError, name_file_in_errors
from ckpt_tools.formats.safetensors.files import INDEX_NAME, read_safetensors_header
from ckpt_tools.formats.safetensors.hf_index import MAX_INDEX_BYTES, find_index, get_weight_map
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.serialization.windowed_stream import WINDOW_BYTES, WindowedStream
from ckpt_tools.serialization.zstd import open_zstd_stream
from ckpt_tools.stores.source import Source, Store, check_file_name
from ckpt_tools.stores.wrappers import GeneratedFilesStore

MAX_FRAME_WINDOW_BYTES = 2 << 20
"""The window that a frame may ask for. Level 1 of zstd, at which deltas are written, takes 512 KiB."""

MAX_STREAMS = 4
"""Tensors that are patched at a time."""

POSITIONS = 1 << 16
"""Positions of an overwrite that are in memory at a time."""

_VERSION = re.compile(r"\d{1,18}")


class _Adler32:
    _value = 1

    def update(self, data: Any) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def make_hasher(algorithm: object) -> Any:
    """A new checksum, with ``update`` and ``hexdigest``. Raises UnsupportedError for an unknown one."""
    from blake3 import blake3
    from xxhash import xxh3_128

    hashers = {"xxh3-128": xxh3_128, "blake3": blake3, "adler32": _Adler32}
    if not isinstance(algorithm, str) or algorithm not in hashers:
        raise UnsupportedError(f"checksum_format {format_brief(algorithm)} is not one of {', '.join(hashers)}")
    return hashers[algorithm]()


@dataclass(frozen=True, slots=True)
class TensorChange:
    """The frame in ``frame`` that changes a tensor to one with the checksum ``digest``."""

    frame: ByteRange
    encoding: str
    algorithm: str
    digest: str


@dataclass(frozen=True, slots=True)
class Delta:
    """One folder of changes; ``changes`` are by the names of tensors, and name the files of ``source``."""

    source: Source
    version: int
    base_version: int
    changes: Mapping[str, TensorChange]
    unread_files: tuple[str, ...]


def format_version(version: int) -> str:
    """The name of a version's folder."""
    return f"weight_v{version:06d}"


def read_delta(source: Source) -> Delta | None:
    """The delta in the folder ``source``, from its headers; None if it is a model.

    Raises:
        UnsupportedError: an encoding, compression or checksum is unknown. MalformedError, IncompleteError: the folder
            is torn or breaks a rule.
    """
    index = find_index(source.files, INDEX_NAME)
    index_json = parse_json(source.read_all(index, limit_bytes=MAX_INDEX_BYTES), index) if index else None
    metadata = index_json.get("metadata") if isinstance(index_json, dict) else None
    if index is None or not isinstance(metadata, dict) or "delta_encoding" not in metadata:
        return None
    with name_file_in_errors(index):
        encoding, algorithm = metadata["delta_encoding"], metadata.get("checksum_format")
        if encoding not in ("xor", "overwrite"):
            raise UnsupportedError(f"delta_encoding {format_brief(encoding)} is not xor or overwrite")
        if (compression := metadata.get("compression_format")) != "zstd":
            raise UnsupportedError(f"compression_format {format_brief(compression)} is not zstd")
        make_hasher(algorithm)
        version, base_version = (str(metadata.get(name)) for name in ("version", "base_version"))
        if not (_VERSION.fullmatch(version) and _VERSION.fullmatch(base_version) and int(base_version) < int(version)):
            shown = f"version {format_brief(version)} against {format_brief(base_version)}"
            raise MalformedError(f"it is {shown} by its index, and a delta is against an earlier version")
        weight_map = get_weight_map(index_json)
    changes: dict[str, TensorChange] = {}
    files = list(dict.fromkeys(map(check_file_name, weight_map.values())))
    headers = source.map_files(partial(read_safetensors_header, may_be_delta=True), files)
    for file, header in zip(files, headers, strict=True):
        indexed_names = {name for name, where in weight_map.items() if where == file}
        if odd_names := sorted(indexed_names ^ header.tensors.keys()):
            raise MalformedError("the index and this file do not name the same tensors", path=file, key=odd_names[0])
        for name, table in header.tensors.items():
            frame, digest = table.whole_range, header.metadata.get(name)
            if frame is None or table.dtype is not DType.UINT8 or digest is None:
                raise MalformedError("it is not a change with a checksum", path=file, key=name)
            changes[name] = TensorChange(frame, encoding, str(algorithm), digest)
    unread_files = tuple(sorted(source.files.keys() - {index, *weight_map.values()}))
    return Delta(source, int(version), int(base_version), changes, unread_files)


@dataclass(frozen=True, slots=True)
class PatchedTensor:
    """A tensor whose bytes are those of ``base`` with ``changes``, the oldest first."""

    name: str
    dtype: DType
    base: ByteRange
    changes: tuple[TensorChange, ...]

    @property
    def num_bytes(self) -> int:
        return self.base.stop - self.base.start


def estimate_patching_bytes(num_deltas: int) -> int:
    """The most memory that reading patched tensors takes: windows of tensors and of the frames of ``num_deltas``."""
    return MAX_STREAMS * (WINDOW_BYTES + (8 << 20) + 2 * num_deltas * (MAX_FRAME_WINDOW_BYTES + (1 << 20)))


@dataclass(slots=True)
class PatchedStore(GeneratedFilesStore):
    """``store`` with a file for each of ``tensors``, by the names of those files. Threads may share it.

    Frames are read from their start alone. A tensor is patched and checked once before its first byte is given; it is
    patched again where a reader goes back further than the window of its stream.
    """

    store: Store
    tensors: Mapping[str, PatchedTensor] = field(repr=False)
    _streams: OrderedDict[str, WindowedStream] = field(default_factory=OrderedDict, init=False, repr=False)
    _checked: set[str] = field(default_factory=set, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def generated_files(self) -> Mapping[str, PatchedTensor]:
        return self.tensors

    def _generate_elements(self, path: str, first: int, last: int, buffer: memoryview) -> None:
        tensor, store = self.tensors[path], self.store
        with self._lock:
            stream = self._streams.pop(path, None)
            if stream is None:
                stream = WindowedStream(lambda: _PatchedBytes(store, tensor), _PatchedBytes(store, tensor))
            self._streams[path] = stream
            while len(self._streams) > MAX_STREAMS:
                self._streams.popitem(last=False)
        with stream.lock:
            while path not in self._checked:
                if not stream.read_block():  # the end, where the checksum is compared
                    self._checked.add(path)
            stream.read_into(first * tensor.dtype.item_bytes, buffer)

    def version(self, path: str) -> str:
        tensor = self.tensors.get(path)
        if tensor is None:
            return self.store.version(path)
        files = (tensor.base.file, *(change.frame.file for change in tensor.changes))
        return " ".join(self.store.version(file) for file in files)

    def __reduce__(self) -> tuple[object, ...]:
        return PatchedStore, (self.store, self.tensors)


class _PatchedBytes:
    """The bytes of a patched tensor from the first to the last. The end is there only if the checksum is right."""

    def __init__(self, store: Store, tensor: PatchedTensor) -> None:
        self._store, self._tensor, self._position = store, tensor, 0
        self._changes = [_CHANGES[change.encoding](store, tensor, change) for change in tensor.changes]
        self._hasher = make_hasher(tensor.changes[-1].algorithm)

    def read(self, size: int) -> bytes:
        """The next bytes, at most ``size``. Raises MalformedError."""
        base, last = self._tensor.base, self._tensor.changes[-1]
        block = np.empty(min(size, self._tensor.num_bytes - self._position), np.uint8)
        if len(block):
            self._store.read_into(base.file, base.start + self._position, block.data)
            for change in self._changes:
                change.change_block(block, self._position)
            self._position += len(block)
            self._hasher.update(block)
            return block.tobytes()
        for change in self._changes:
            change.check_end()
        if self._hasher.hexdigest() != last.digest:
            why = "its checksum after the changes is not the one stated: the base or a delta is not the right one"
            raise MalformedError(why, path=last.frame.file, key=self._tensor.name)
        return b""


class _XorChange:
    """A frame whose bytes are old ^ new."""

    def __init__(self, store: Store, tensor: PatchedTensor, change: TensorChange) -> None:
        frame = change.frame
        self._tensor, self._file = tensor, frame.file

        def read_range(start: int, stop: int) -> bytes:
            compressed = bytearray(stop - start)
            store.read_into(frame.file, frame.start + start, memoryview(compressed))
            return bytes(compressed)

        num_bytes = frame.stop - frame.start
        self._stream = open_zstd_stream(read_range, num_bytes, frame.file, max_window_bytes=MAX_FRAME_WINDOW_BYTES)

    def change_block(self, block: NDArray[np.uint8], start: int) -> None:
        """Change ``block``, the bytes of the tensor from ``start`` on, which follow those of the last call."""
        block ^= np.frombuffer(self.read_bytes(len(block)), np.uint8)

    def read_bytes(self, num_bytes: int) -> bytes:
        """The next decompressed bytes. Raises IncompleteError if there are fewer."""
        taken = bytearray()
        while len(taken) < num_bytes:
            if not (part := self._stream.read(num_bytes - len(taken))):
                raise IncompleteError("its change ends early", path=self._file, key=self._tensor.name)
            taken += part
        return bytes(taken)

    def check_end(self) -> None:
        """Raises MalformedError if there is more to change."""
        if self._stream.read(1):
            raise self._make_error("its change has more bytes than the tensor has in the base")

    def _make_error(self, why: str) -> MalformedError:
        return MalformedError(why, path=self._file, key=self._tensor.name)


class _OverwriteChange(_XorChange):
    """A frame with the number of changed bytes, their positions in ascending order, and their new values. Two streams
    read it at the same time: that of this object the positions, and that of ``_values`` the new values."""

    def __init__(self, store: Store, tensor: PatchedTensor, change: TensorChange) -> None:
        super().__init__(store, tensor, change)
        self._values, self._pending = _XorChange(store, tensor, change), np.empty(0, np.int64)
        self._left = int.from_bytes(self.read_bytes(4), "little")
        for start in range(0, 4 * min(self._left, tensor.num_bytes) + 4, POSITIONS):
            self._values.read_bytes(min(POSITIONS, 4 * self._left + 4 - start))

    def change_block(self, block: NDArray[np.uint8], start: int) -> None:
        least, stop = start, start + len(block)
        while self._left or len(self._pending):
            if not len(self._pending):
                taken = min(POSITIONS, self._left)
                self._pending = np.frombuffer(self.read_bytes(4 * taken), "<u4").astype(np.int64)
                self._left -= taken
            if self._pending[0] < least or (np.diff(self._pending) <= 0).any():
                raise self._make_error("its change has positions that do not ascend")
            num_here = int(np.searchsorted(self._pending, stop))
            here, self._pending = self._pending[:num_here], self._pending[num_here:]
            block[here - start] = np.frombuffer(self._values.read_bytes(num_here), np.uint8)
            if len(self._pending):
                return
            least = int(here[-1]) + 1

    def check_end(self) -> None:
        if self._left or len(self._pending):
            raise self._make_error("its change has positions after the end of the tensor in the base")
        self._values.check_end()


_CHANGES = {"xor": _XorChange, "overwrite": _OverwriteChange}
