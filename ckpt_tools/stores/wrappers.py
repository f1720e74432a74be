"""Stores in front of others: with files of other stores, with literals, or a folder of a store by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
