"""A folder of a store as a store of its own, without listing it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.stores.source import ServiceFile, Source, Store, StoreWrapper, checked_name


@dataclass(frozen=True, slots=True)
class Within(StoreWrapper):
    """Files below ``folder`` of ``store``."""

    store: Store
    folder: str

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.folder}"

    def _path(self, path: str) -> str:
        return f"{self.folder}/{checked_name(path)}"

    def list(self) -> Mapping[str, int]:
        start = f"{self.folder}/"
        return {path.removeprefix(start): size for path, size in self.store.list().items() if path.startswith(start)}

    def hidden(self) -> Mapping[str, int]:
        start = f"{self.folder}/"
        return {path.removeprefix(start): size for path, size in self.store.hidden().items() if path.startswith(start)}

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self.store.read_into(self._path(path), start, buffer)

    def version(self, path: str) -> str:
        return self.store.version(self._path(path))

    def modified(self, path: str) -> float | None:
        return self.store.modified(self._path(path))

    def locate(self, path: str) -> ServiceFile | None:
        return self.store.locate(self._path(path))

    def prefetch(self, path: str, start: int, stop: int) -> None:
        self.store.prefetch(self._path(path), start, stop)


def part_of(source: Source, folder: str, files: Mapping[str, int]) -> Source:
    """``files``, which lie below ``folder`` of ``source`` by these names, as a source; all of it if that is empty."""
    return Source(Within(source.store, folder) if folder else source.store, files)
