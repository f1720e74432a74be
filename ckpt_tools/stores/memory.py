"""A store in memory: the simplest thing that is one, for tests and for small results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_tools.errors import IncompleteError
from ckpt_tools.stores.source import Buffer, FillableStore, check_file_name, check_range


@dataclass(slots=True)
class MemoryStore(FillableStore):
    """Files as byte arrays."""

    files: dict[str, bytearray] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return "memory://"

    def list(self) -> Mapping[str, int]:
        return {path: len(data) for path, data in self.files.items()}

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        data = self._get_bytes(path)
        check_range(path, start + len(buffer), len(data))
        buffer[:] = memoryview(data)[start : start + len(buffer)]

    def size(self, path: str) -> int:
        return len(self._get_bytes(path))

    def _get_bytes(self, path: str) -> bytearray:
        if path not in self.files:
            check_file_name(path)
            raise IncompleteError("this file of the checkpoint is missing", path=path)
        return self.files[path]

    def create(self, path: str, size_bytes: int) -> MemoryFileWriter:
        data = self.files[check_file_name(path)] = bytearray(size_bytes)
        return MemoryFileWriter(data)

    def reopen(self, path: str) -> MemoryFileWriter:
        return MemoryFileWriter(self.files[check_file_name(path)])


@dataclass(slots=True)
class MemoryFileWriter:
    """A byte array being filled."""

    data: bytearray

    def write_at(self, offset: int, data: Buffer) -> None:
        assert offset + len(data) <= len(self.data), "a write stays inside its file"
        self.data[offset : offset + len(data)] = data

    def close(self) -> None:
        """Does nothing."""

    def abandon(self) -> None:
        """Does nothing."""
