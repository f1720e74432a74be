"""A store with a few files of our own in front of it: values that a checkpoint keeps as plain numbers, as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_tools.errors import IncompleteError
from ckpt_tools.stores.source import Located, Prefetching, ServiceFile, Store, Versioned


@dataclass(frozen=True, slots=True)
class Overlay:
    """``literals`` by name, then ``store``."""

    store: Store
    literals: Mapping[str, bytes] = field(repr=False)
    _prefetching: Prefetching | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_prefetching", self.store if isinstance(self.store, Prefetching) else None)

    @property
    def url(self) -> str:
        return self.store.url

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
        """That of the store's file; nothing where it has none, or cannot tell."""
        if path in self.literals or not isinstance(self.store, Versioned):
            return ""
        return self.store.version(path)

    def prefetch(self, path: str, start: int, stop: int) -> None:
        """Of the store's own files."""
        if self._prefetching is not None and path not in self.literals:
            self._prefetching.prefetch(path, start, stop)

    def locate(self, path: str) -> ServiceFile | None:
        """Where the store's file is; nowhere where it is one of ours."""
        if path in self.literals or not isinstance(self.store, Located):
            return None
        return self.store.locate(path)
