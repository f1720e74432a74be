"""Format of ``torch.save`` before torch 1.6, still written with ``_use_new_zipfile_serialization=False``.

Five pickles follow each other: a magic number, a version, facts of the machine, the saved value, and the keys of the
storages in the order in which these follow the pickles. A storage is its number of elements in eight bytes, and the
elements (torch 2.15.0, torch/serialization.py ``_legacy_save`` and ``_legacy_load``). The start of a storage follows
from the sizes of those before it, so opening reads the pickles alone; no tensor byte is touched.

    | magic | version | machine | value | keys | count, elements | count, elements | ...
     pickle  pickle    pickle    pickle  pickle  one storage for each key, in the order of the keys
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from ckpt_tools.core.values import StorageRef, Value
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.messages.wording import format_count
from ckpt_tools.serialization.pickle.load import LoadedPickle, load_first_pickle
from ckpt_tools.serialization.pickle.machine import EndsEarlyError, PersistentLoad
from ckpt_tools.serialization.torch_archive import MAX_PICKLE_BYTES, TorchArchive, parse_storage_id, register_storage
from ckpt_tools.serialization.zip_archive import ReadRange

MAGIC_NUMBER: Final = 0x1950A86A20F9469CFC6C
VERSION: Final = 1001

FIRST_READ_BYTES: Final = 1 << 16
"""Most pickles are smaller. A larger one takes a read of eight times as much until it fits."""

COUNT_BYTES: Final = 8

MAGIC_READ_BYTES: Final = 32

_MAGIC = re.compile(rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)
"""The magic number as a pickle of any protocol that torch can write."""


def is_legacy(head: bytes) -> bool:
    """True if a file that begins with ``head`` has this format; 32 bytes suffice."""
    return _MAGIC.match(head) is not None


ReadFirstPickle = Callable[[bytes, PersistentLoad | None], LoadedPickle]
"""Reads the pickle that some bytes begin with. Raises EndsEarlyError where they may not be all of it."""


def open_legacy(read: ReadRange, size: int, path: str) -> TorchArchive:
    """Open the file of ``size`` bytes that ``read(start, stop)`` reads and that ``is_legacy``.

    Raises:
        MalformedError: it is damaged. IncompleteError: it ends too early. UnsupportedError: it is of a big-endian
        machine, or holds a tensor of a kind that is not handled.
    """

    def load_pickle(data: bytes, persistent_load: PersistentLoad | None) -> LoadedPickle:
        return load_first_pickle(data, path=path, persistent_load=persistent_load)

    value, storages = read_legacy(read, size, path, load_pickle)
    storage_by_key = MappingProxyType(storages.storage_by_key)
    return TorchArchive(path, value, MappingProxyType({}), storage_by_key, lambda: storages.locate_all(read, path))


def read_legacy(
    read: ReadRange, size: int, path: str, read_first_pickle: ReadFirstPickle
) -> tuple[Value, LegacyStorages]:
    """The value of the legacy file of ``size`` bytes, and its storages; each byte belongs to a pickle or to a storage.

    The number of elements that precedes each storage is not read; ``locate_roots`` compares it.

    Raises:
        MalformedError, IncompleteError, UnsupportedError: as ``open_legacy``.
    """
    pickles = _PickleSequence(read, size, path, read_first_pickle)
    magic, version, machine = pickles.read_next(), pickles.read_next(), pickles.read_next()
    _check_header(magic.value, version.value, machine.value, path)
    storages = LegacyStorages()
    value, keys = pickles.read_next(storages.resolve_id), pickles.read_next()
    storages.assign_offsets(keys.value, pickles.position, size, path)
    return value.value, storages


class _PickleSequence:
    """The pickles at the start of a file, one after the other."""

    def __init__(self, read: ReadRange, size: int, path: str, read_first: ReadFirstPickle) -> None:
        self._read, self._size, self._path, self._read_first_pickle = read, size, path, read_first
        self._buffer_start, self._buffer = 0, b""
        self.position = 0

    def read_next(self, persistent_load: PersistentLoad | None = None) -> LoadedPickle:
        num_bytes = 1
        while True:
            data = self._peek_bytes(num_bytes)
            try:
                pickle = self._read_first_pickle(data, persistent_load)
            except EndsEarlyError as error:
                num_bytes = self._get_larger_read(len(data), error)
            else:
                self.position += pickle.stop
                return pickle

    def _get_larger_read(self, num_bytes: int, error: EndsEarlyError) -> int:
        """Number of bytes to try next, if the pickle may be longer than ``num_bytes``."""
        if self.position + num_bytes >= self._size:
            raise IncompleteError(f"it is truncated, or damaged: {error.message}", path=self._path) from error
        if num_bytes >= MAX_PICKLE_BYTES:
            raise MalformedError(f"one of its pickles has more than {MAX_PICKLE_BYTES:,} bytes", path=self._path)
        return min(num_bytes * 8, MAX_PICKLE_BYTES)

    def _peek_bytes(self, num_bytes: int) -> bytes:
        """The next bytes: those that were read already, if there are at least ``num_bytes``."""
        buffered = self._buffer[self.position - self._buffer_start :]
        if len(buffered) < num_bytes:
            stop = min(self.position + max(num_bytes, FIRST_READ_BYTES), self._size)
            self._buffer_start, self._buffer = self.position, self._read(self.position, stop)
            buffered = self._buffer
        return buffered


def _check_header(magic: Value, version: Value, machine: Value, path: str) -> None:
    if magic != MAGIC_NUMBER or type(version) is not int or version != VERSION:
        raise MalformedError("its magic number or its version is not torch's", path=path)
    is_little_endian = machine.get("little_endian") if isinstance(machine, dict) else None
    if is_little_endian is False:
        raise UnsupportedError(
            "it was written on a big-endian machine; open it there with torch.load and save it again with torch.save",
            path=path,
        )
    if is_little_endian is not True or machine.get("protocol_version") != VERSION:
        raise MalformedError("it does not say on which machine and in which version it was written", path=path)


class LegacyStorages:
    """The storages that the pickle describes: ``storage_by_key`` by key, views of them included.

    ``has_sources`` says whether classes of modules came with the text of their source.
    """

    def __init__(self) -> None:
        self.storage_by_key: dict[str, StorageRef] = {}
        self.has_sources = False
        self._starts: dict[str, int] = {}
        self._roots: dict[str, StorageRef] = {}
        self._views: dict[str, tuple[str, int]] = {}

    def resolve_id(self, pid: Value) -> Value:
        """``("storage", class, key, location, numel, view)``, where a view (torch before 0.4) is ``(key, offset,
        numel)``; or ``("module", class, file, source)``, which stands for the class."""
        if type(pid) is tuple and len(pid) == 4 and pid[0] == "module":
            self.has_sources = True
            return pid[1]
        root = parse_storage_id(pid)
        if len(pid) != 6:
            raise MalformedError("a storage is not described in torch's way", key=root.key)
        register_storage(self._roots, root)
        return register_storage(self.storage_by_key, root) if pid[5] is None else self._resolve_view(root, pid[5])

    @property
    def has_views(self) -> bool:
        return bool(self._views)

    def _resolve_view(self, root: StorageRef, view: Value) -> StorageRef:
        if type(view) is not tuple or len(view) != 3 or type(view[1]) is not int:
            raise MalformedError("a view of a storage is not described in torch's way", key=root.key)
        key, offset, numel = view
        view_storage = StorageRef(key, root.dtype, numel, root.location)
        at = root.key, offset
        if not 0 <= offset <= root.numel - numel or self._views.setdefault(key, at) != at:
            raise MalformedError("a view of a storage leaves it, or is described in two ways", key=root.key)
        return register_storage(self.storage_by_key, view_storage)

    def assign_offsets(self, keys: Value, position: int, size: int, path: str) -> None:
        """Note where the elements of each storage begin: they follow in the order of ``keys`` from byte ``position`` to
        ``size``."""
        starts = self._starts
        for key in keys if isinstance(keys, list) else ():
            if type(key) is not str or key not in self._roots or key in starts:
                raise MalformedError(f"storage {key!s:.40} is listed, and no tensor is a view of it", path=path)
            starts[key] = position + COUNT_BYTES
            position = starts[key] + self._roots[key].num_bytes
        missing_key = next((key for key in self._roots if key not in starts), None)
        if missing_key is not None or not isinstance(keys, list):
            raise IncompleteError(f"storage {missing_key!r} is not in the list of storages", path=path)
        if position > size:
            raise IncompleteError(f"it has {size:,} bytes instead of {position:,}; it is truncated", path=path)
        if position < size:
            raise MalformedError(f"it has {format_count(size - position, 'byte')} after the last storage", path=path)

    def locate_roots(self, read: ReadRange, path: str) -> dict[str, tuple[int, int]]:
        """The bytes of each storage, after a check of the count before them."""
        range_by_key = {}
        for key, start in self._starts.items():
            ref = self._roots[key]
            count = int.from_bytes(read(start - COUNT_BYTES, start), "little")
            if count != ref.numel:
                raise MalformedError(f"storage {key!r} has {count:,} elements instead of {ref.numel:,}", path=path)
            range_by_key[key] = start, start + ref.num_bytes
        return range_by_key

    def locate_all(self, read: ReadRange, path: str) -> dict[str, tuple[int, int]]:
        """The bytes of each storage, and of each view of one."""
        range_by_key = self.locate_roots(read, path)
        for key, (root, offset) in self._views.items():
            dtype = self._roots[root].dtype
            start = self._starts[root] + offset * (dtype.item_bytes if dtype else 1)
            range_by_key[key] = start, start + self.storage_by_key[key].num_bytes
        return range_by_key
