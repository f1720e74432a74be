"""A store with a few files of our own in front of it: values that a checkpoint keeps as plain numbers, as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_tools.errors import IncompleteError
from ckpt_tools.stores.source import ServiceFile, Store, StoreWrapper


@dataclass(frozen=True, slots=True)
class Overlay(StoreWrapper):
    """``literals`` by name, then ``store``."""

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

    def version(self, path: str) -> str:
        """Version in the store; empty for literals."""
        return "" if path in self.literals else self.store.version(path)

    def prefetch(self, path: str, start: int, stop: int) -> None:
        """Prefetch files of the store; literals need none."""
        if path not in self.literals:
            self.store.prefetch(path, start, stop)

    def locate(self, path: str) -> ServiceFile | None:
        """Location of the store's file; None for literals."""
        return None if path in self.literals else self.store.locate(path)
