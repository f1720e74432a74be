"""Stores in front of others: with files of other stores, with literals, with files made as they are read, or a folder
of a store by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import IncompleteError
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source, Store, StoreWrapper, checked_name


@dataclass(frozen=True, slots=True)
class Joined(StoreWrapper):
    """``store`` with a few files of other stores: ``others`` maps a name to the store and the file's name in it."""

    store: Store
    others: Mapping[str, tuple[Store, str]]

    def _behind(self, path: str) -> tuple[Store, str]:
        return self.others.get(path, (self.store, path))


@dataclass(frozen=True, slots=True)
class Overlay(StoreWrapper):
    """``literals`` by name, in front of ``store``: values that a checkpoint keeps as plain numbers, as bytes."""

    store: Store
    literals: Mapping[str, bytes] = field(repr=False)

    def list(self) -> Mapping[str, int]:
        return {**self.store.list(), **{name: len(data) for name, data in self.literals.items()}}

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        data = self.literals.get(path)
        if data is None:
            self.store.read_into(path, start, buffer)
        elif start + len(buffer) > len(data):
            raise IncompleteError(f"it ends at byte {len(data):,}, before byte {start + len(buffer):,}", path=path)
        else:
            buffer[:] = memoryview(data)[start : start + len(buffer)]

    def _behind(self, path: str) -> tuple[Store, str]:
        """A literal has no version, no time and no service."""
        return MemoryStore() if path in self.literals else self.store, path


class Elements(Protocol):
    """The elements of a tensor, row-major, as a file that is made as it is read."""

    @property
    def dtype(self) -> DType: ...

    @property
    def num_bytes(self) -> int: ...


class MakingStore(StoreWrapper):
    """``store`` with one more file for each of ``made``, whose elements are decoded or computed as they are read."""

    __slots__ = ()

    @property
    @abstractmethod
    def made(self) -> Mapping[str, Elements]:
        """The files by name."""

    @abstractmethod
    def _make(self, path: str, first: int, last: int, buffer: memoryview) -> None:
        """Elements ``[first, last)`` of a file of ``made`` into ``buffer``, which has exactly their room."""

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: each.num_bytes for name, each in self.made.items()}

    def list(self) -> Mapping[str, int]:
        return {**self.store.list(), **self.sizes}

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        found = self.made.get(path)
        if found is None:
            self.store.read_into(path, start, buffer)
            return
        stop, item = start + len(buffer), found.dtype.item_bytes
        if stop > found.num_bytes:
            raise IncompleteError(f"it ends at byte {found.num_bytes:,}, before byte {stop:,}", path=path)
        first, last = start // item, -(-stop // item)
        if start == first * item and stop == last * item:
            self._make(path, first, last, buffer)
        else:
            whole = bytearray((last - first) * item)
            self._make(path, first, last, memoryview(whole))
            buffer[:] = memoryview(whole)[start - first * item :][: len(buffer)]

    def _behind(self, path: str) -> tuple[Store, str]:
        """A file of ``made`` has no version, no time and no service, and is not read ahead."""
        return MemoryStore() if path in self.made else self.store, path


@dataclass(frozen=True, slots=True)
class Within(StoreWrapper):
    """Files below ``folder`` of ``store``, which is not listed again."""

    store: Store
    folder: str

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.folder}"

    def _behind(self, path: str) -> tuple[Store, str]:
        return self.store, f"{self.folder}/{checked_name(path)}"

    def list(self) -> Mapping[str, int]:
        return self._inside(self.store.list())

    def hidden(self) -> Mapping[str, int]:
        return self._inside(self.store.hidden())

    def _inside(self, files: Mapping[str, int]) -> Mapping[str, int]:
        start = f"{self.folder}/"
        return {path.removeprefix(start): size for path, size in files.items() if path.startswith(start)}


def part_of(source: Source, folder: str, files: Mapping[str, int]) -> Source:
    """``files``, named relative to ``folder`` of ``source``, as a source; an empty ``folder`` is all of ``source``."""
    return Source(Within(source.store, folder) if folder else source.store, files)
