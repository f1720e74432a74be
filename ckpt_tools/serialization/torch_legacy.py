"""Format of ``torch.save`` before torch 1.6, still written with ``_use_new_zipfile_serialization=False``.

Five pickles follow each other: a magic number, a version, facts of the machine, the saved value, and the keys of the
storages in the order in which these follow the pickles. A storage is its number of elements in eight bytes, and the
elements (torch 2.15.0, torch/serialization.py ``_legacy_save`` and ``_legacy_load``). The start of a storage follows
from the sizes of those before it, so opening reads the pickles alone; no tensor byte is touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from ckpt_tools.core.values import StorageRef, Value
from ckpt_tools.core.wording import count
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.serialization.pickle.load import load_first
from ckpt_tools.serialization.pickle.machine import EndsEarlyError, PersistentLoad
from ckpt_tools.serialization.torch_archive import MAX_PICKLE_BYTES, TorchArchive, described_storage, noted
from ckpt_tools.serialization.zip_archive import ReadRange

MAGIC_NUMBER: Final = 0x1950A86A20F9469CFC6C
VERSION: Final = 1001

FIRST_READ_BYTES: Final = 1 << 16
"""Most pickles are smaller. A larger one takes a read of eight times as much until it fits."""

COUNT_BYTES: Final = 8

HEAD_BYTES: Final = 32

_MAGIC = re.compile(rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)
"""The magic number as a pickle of any protocol that torch can write."""


def is_legacy(head: bytes) -> bool:
    """True if a file that begins with ``head`` has this format; 32 bytes suffice."""
    return _MAGIC.match(head) is not None


class FirstPickle(Protocol):
    """Result of reading the first of several pickles."""

    @property
    def value(self) -> Value: ...

    @property
    def stop(self) -> int:
        """End of the pickle in bytes."""


Read = TypeVar("Read", bound=FirstPickle)

ReadFirst = Callable[[bytes, PersistentLoad | None], Read]
"""Reads the pickle that some bytes begin with. Raises EndsEarlyError where they may not be all of it."""


@dataclass(frozen=True, slots=True)
class LegacyFile(Generic[Read]):
    """The five pickles, and the storages of the tensors in the fourth."""

    pickles: tuple[Read, ...]
    storages: Storages

    @property
    def value(self) -> Value:
        return self.pickles[3].value


def open_legacy(read: ReadRange, size: int, path: str) -> TorchArchive:
    """Open the file of ``size`` bytes that ``read(start, stop)`` reads and that ``is_legacy``.

    Raises:
        MalformedError: it is damaged. IncompleteError: it ends too early. UnsupportedError: it is of a big-endian
        machine, or holds a tensor of a kind that is not handled.
    """

    def read_first(data: bytes, persistent_load: PersistentLoad | None) -> FirstPickle:
        return load_first(data, path=path, persistent_load=persistent_load)

    found = read_legacy(read, size, path, read_first)
    storages = found.storages
    known = MappingProxyType(storages.all)
    return TorchArchive(path, found.value, MappingProxyType({}), known, lambda: storages.all_ranges(read, path))


def read_legacy(read: ReadRange, size: int, path: str, read_first: ReadFirst[Read]) -> LegacyFile[Read]:
    """The legacy file of ``size`` bytes, each of whose bytes belongs to a pickle or to a storage.

    The number of elements that precedes each storage is not read; ``Storages.ranges`` compares it.

    Raises:
        MalformedError, IncompleteError, UnsupportedError: as ``open_legacy``.
    """
    pickles = _Pickles(read, size, path, read_first)
    magic, version, machine = pickles.take(), pickles.take(), pickles.take()
    _check_head(magic.value, version.value, machine.value, path)
    storages = Storages()
    value, keys = pickles.take(storages.resolve), pickles.take()
    storages.place(keys.value, pickles.position, size, path)
    return LegacyFile((magic, version, machine, value, keys), storages)


class _Pickles(Generic[Read]):
    """The pickles at the start of a file, one after the other."""

    def __init__(self, read: ReadRange, size: int, path: str, read_first: ReadFirst[Read]) -> None:
        self._read, self._size, self._path, self._read_first = read, size, path, read_first
        self._known_start, self._known = 0, b""
        self.position = 0

    def take(self, persistent_load: PersistentLoad | None = None) -> Read:
        num_bytes = 1
        while True:
            data = self._ahead(num_bytes)
            try:
                found = self._read_first(data, persistent_load)
            except EndsEarlyError as error:
                num_bytes = self._more_than(len(data), error)
            else:
                self.position += found.stop
                return found

    def _more_than(self, num_bytes: int, error: EndsEarlyError) -> int:
        """Number of bytes to try next, if the pickle may be longer than ``num_bytes``."""
        if self.position + num_bytes >= self._size:
            raise IncompleteError(f"it is truncated, or damaged: {error.message}", path=self._path) from error
        if num_bytes >= MAX_PICKLE_BYTES:
            raise MalformedError(f"one of its pickles has more than {MAX_PICKLE_BYTES:,} bytes", path=self._path)
        return min(num_bytes * 8, MAX_PICKLE_BYTES)

    def _ahead(self, num_bytes: int) -> bytes:
        """The next bytes: those that were read already, if there are at least ``num_bytes``."""
        known = self._known[self.position - self._known_start :]
        if len(known) < num_bytes:
            stop = min(self.position + max(num_bytes, FIRST_READ_BYTES), self._size)
            self._known_start, self._known = self.position, self._read(self.position, stop)
            known = self._known
        return known


def _check_head(magic: Value, version: Value, machine: Value, path: str) -> None:
    if magic != MAGIC_NUMBER or type(version) is not int or version != VERSION:
        raise MalformedError("its magic number or its version is not torch's", path=path)
    little = machine.get("little_endian") if isinstance(machine, dict) else None
    if little is False:
        raise UnsupportedError(
            "it was written on a big-endian machine; open it there with torch.load and save it again with torch.save",
            path=path,
        )
    if little is not True or machine.get("protocol_version") != VERSION:
        raise MalformedError("it does not say on which machine and in which version it was written", path=path)


class Storages:
    """The storages that the pickle describes: ``all`` by key, views of them included.

    ``has_sources`` says whether classes of modules came with the text of their source.
    """

    def __init__(self) -> None:
        self.all: dict[str, StorageRef] = {}
        self.has_sources = False
        self._starts: dict[str, int] = {}
        self._roots: dict[str, StorageRef] = {}
        self._views: dict[str, tuple[str, int]] = {}

    def resolve(self, pid: Value) -> Value:
        """``("storage", class, key, location, numel, view)``, where a view (torch before 0.4) is ``(key, offset,
        numel)``; or ``("module", class, file, source)``, which stands for the class."""
        if type(pid) is tuple and len(pid) == 4 and pid[0] == "module":
            self.has_sources = True
            return pid[1]
        root = described_storage(pid)
        if len(pid) != 6:
            raise MalformedError("a storage is not described in torch's way", key=root.key)
        noted(self._roots, root)
        return noted(self.all, root) if pid[5] is None else self._view(root, pid[5])

    @property
    def has_views(self) -> bool:
        return bool(self._views)

    def _view(self, root: StorageRef, view: Value) -> StorageRef:
        if type(view) is not tuple or len(view) != 3 or type(view[1]) is not int:
            raise MalformedError("a view of a storage is not described in torch's way", key=root.key)
        key, offset, numel = view
        found = StorageRef(key, root.dtype, numel, root.location)
        at = root.key, offset
        if not 0 <= offset <= root.numel - numel or self._views.setdefault(key, at) != at:
            raise MalformedError("a view of a storage leaves it, or is described in two ways", key=root.key)
        return noted(self.all, found)

    def place(self, keys: Value, at: int, size: int, path: str) -> None:
        """Note where the elements of each storage begin: they follow in the order of ``keys`` from byte ``at`` to
        ``size``."""
        starts = self._starts
        for key in keys if isinstance(keys, list) else ():
            if type(key) is not str or key not in self._roots or key in starts:
                raise MalformedError(f"storage {key!s:.40} is listed, and no tensor is a view of it", path=path)
            starts[key] = at + COUNT_BYTES
            at = starts[key] + self._roots[key].num_bytes
        absent = next((key for key in self._roots if key not in starts), None)
        if absent is not None or not isinstance(keys, list):
            raise IncompleteError(f"storage {absent!r} is not in the list of storages", path=path)
        if at > size:
            raise IncompleteError(f"it has {size:,} bytes instead of {at:,}; it is truncated", path=path)
        if at < size:
            raise MalformedError(f"it has {count(size - at, 'byte')} after the last storage", path=path)

    def ranges(self, read: ReadRange, path: str) -> dict[str, tuple[int, int]]:
        """The bytes of each storage, after a check of the count before them."""
        found = {}
        for key, start in self._starts.items():
            ref = self._roots[key]
            count = int.from_bytes(read(start - COUNT_BYTES, start), "little")
            if count != ref.numel:
                raise MalformedError(f"storage {key!r} has {count:,} elements instead of {ref.numel:,}", path=path)
            found[key] = start, start + ref.num_bytes
        return found

    def all_ranges(self, read: ReadRange, path: str) -> dict[str, tuple[int, int]]:
        """The same with the views."""
        found = self.ranges(read, path)
        for key, (root, offset) in self._views.items():
            dtype = self._roots[root].dtype
            start = self._starts[root] + offset * (dtype.item_bytes if dtype else 1)
            found[key] = start, start + self.all[key].num_bytes
        return found
