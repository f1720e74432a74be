"""Small objects of a lock in a store of fsspec, which has no conditional writes: every write is read back."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ckpt_tools.stores.fsspec.store import call_with_retry
from ckpt_tools.stores.object_lock import ObjectBody


@dataclass(frozen=True, slots=True)
class FsspecLockObjects:
    """``LockObjects`` of a file system. Ages compare the store's clock with the local one."""

    fs: Any

    def get_object(self, key: str) -> ObjectBody | None:
        def read_object() -> ObjectBody:
            self.fs.invalidate_cache()
            data: bytes = self.fs.cat_file(key)
            return ObjectBody(data, hashlib.sha256(data).hexdigest(), self._age_seconds(key))

        with suppress(FileNotFoundError):
            return call_with_retry(key, read_object)
        return None

    def _age_seconds(self, key: str) -> float:
        """Age by the store's time. A lock on a file system without times never becomes stale: only its holder or a
        person removes it."""
        try:
            modified: datetime = self.fs.modified(key)
        except NotImplementedError:
            return 0.0
        modified_utc = modified if modified.tzinfo else modified.replace(tzinfo=UTC)
        return (datetime.now(UTC) - modified_utc).total_seconds()

    def put_if_unchanged(self, key: str, data: bytes, etag: str | None) -> None:
        existing = self.get_object(key)
        if (None if existing is None else existing.etag) == etag:
            call_with_retry(key, lambda: self.fs.makedirs(self.fs._parent(key), exist_ok=True))
            call_with_retry(key, lambda: self.fs.pipe_file(key, data))

    def delete_objects(self, keys: list[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                call_with_retry(key, lambda key=key: self.fs.rm_file(key))  # type: ignore[misc]
