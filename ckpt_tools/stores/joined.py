"""A store with a few files of other places, under names of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.stores.source import ServiceFile, Store, StoreWrapper


@dataclass(frozen=True, slots=True)
class Joined(StoreWrapper):
    """``others`` by name: the store that has the file, and its name there. Every other name is of ``store``."""

    store: Store
    others: Mapping[str, tuple[Store, str]]

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        store, name = self._of(path)
        store.read_into(name, start, buffer)

    def version(self, path: str) -> str:
        store, name = self._of(path)
        return store.version(name)

    def modified(self, path: str) -> float | None:
        store, name = self._of(path)
        return store.modified(name)

    def locate(self, path: str) -> ServiceFile | None:
        store, name = self._of(path)
        return store.locate(name)

    def prefetch(self, path: str, start: int, stop: int) -> None:
        store, name = self._of(path)
        store.prefetch(name, start, stop)

    def _of(self, path: str) -> tuple[Store, str]:
        return self.others.get(path, (self.store, path))
