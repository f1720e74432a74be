"""Small objects of a lock in a store of fsspec, which has no conditional writes: every write is read back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ckpt_tools.stores.fsspec.store import asked, file_system
from ckpt_tools.stores.s3.client import Small


@dataclass(frozen=True, slots=True)
class FsspecObjects:
    """``SmallObjects`` of the file system of a URL. Ages compare the store's clock with the local one."""

    fs: Any
    path: str

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> FsspecObjects:
        """Raises UsageError, UnsupportedError."""
        return cls(*file_system(url, options))

    def get(self, key: str) -> Small | None:
        def read() -> Small:
            self.fs.invalidate_cache()
            data: bytes = self.fs.cat_file(key)
            return Small(data, hashlib.sha256(data).hexdigest(), self._age_seconds(key))

        with suppress(FileNotFoundError):
            return asked(key, read)
        return None

    def _age_seconds(self, key: str) -> float:
        """Age by the store's time. A lock on a file system without times never becomes stale: only its holder or a
        person removes it."""
        try:
            modified: datetime = self.fs.modified(key)
        except NotImplementedError:
            return 0.0
        known = modified if modified.tzinfo else modified.replace(tzinfo=UTC)
        return (datetime.now(UTC) - known).total_seconds()

    def put_absent(self, key: str, data: bytes) -> bool:
        return self.get(key) is None and self._put(key, data)

    def put_matching(self, key: str, data: bytes, etag: str) -> bool:
        found = self.get(key)
        return found is not None and found.etag == etag and self._put(key, data)

    def _put(self, key: str, data: bytes) -> bool:
        asked(key, lambda: self.fs.makedirs(self.fs._parent(key), exist_ok=True))
        asked(key, lambda: self.fs.pipe_file(key, data))
        return True

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                asked(key, lambda key=key: self.fs.rm_file(key))  # type: ignore[misc]
