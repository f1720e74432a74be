"""A prefix of an S3 bucket as a store to read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import IncompleteError, SourceNotFoundError, UsageError
from ckpt_tools.stores.marker_files import is_hidden, is_shown
from ckpt_tools.stores.s3.client import Bucket, Found, S3Options
from ckpt_tools.stores.source import ServiceFile, Store, checked_name


@dataclass(slots=True)
class S3Store(Store):
    """The objects below ``prefix``, which is empty or ends with a slash; with ``only``, a single one of them."""

    bucket: Bucket
    prefix: str
    only: str | None = None
    _etags: dict[str, str] = field(default_factory=dict, repr=False)
    _times: dict[str, float | None] = field(default_factory=dict, repr=False)
    _hidden: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        return self.bucket.url(self.prefix + (self.only or "")).rstrip("/")

    def list(self) -> Mapping[str, int]:
        listed = {each.key.removeprefix(self.prefix): each for each in self._objects()}
        if self.only is not None and not listed:
            raise SourceNotFoundError(f"there is no file {self.url}")
        found = {path: each for path, each in listed.items() if is_shown(path) or path == self.only}
        self._hidden = {
            path: each.size for path, each in listed.items() if path not in found and is_hidden(path, each.size)
        }
        self._etags = {path: each.etag for path, each in found.items()}
        self._times = {path: each.modified for path, each in found.items()}
        return {path: each.size for path, each in found.items()}

    def hidden(self) -> Mapping[str, int]:
        """Those of the listing."""
        return self._hidden

    def _objects(self) -> Iterator[Found]:
        if self.only is not None:
            single = self.bucket.head(self.prefix + self.only)
            return iter(() if single is None else (single,))
        return self.bucket.objects(self.prefix)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        key = self.prefix + checked_name(path)
        if len(buffer):
            self.bucket.read_into(key, start, buffer, etag=self._etags.get(path))
            return
        size = self._found(path).size
        if start > size:
            raise IncompleteError(f"the file ends at byte {size:,}", path=self.bucket.url(key))

    def _found(self, path: str) -> Found:
        found = self.bucket.head(self.prefix + checked_name(path))
        if found is None:
            raise IncompleteError("this file of the checkpoint is missing", path=self.bucket.url(self.prefix + path))
        return found

    def version(self, path: str) -> str:
        return self._etags.get(path) or self._found(path).etag

    def modified(self, path: str) -> float | None:
        """The time in the listing."""
        return self._times.get(path)

    def locate(self, path: str) -> ServiceFile | None:
        return ServiceFile(self.bucket.options, f"{self.bucket.name}/{self.prefix}{path}", self.version(path))


def open_s3_store(bucket: Bucket, key: str) -> S3Store | None:
    """Store at ``key``, which is an object or a prefix; None if nothing exists there.

    Raises:
        SourceNotFoundError: there is no such bucket. StoreError: it cannot be asked.
    """
    key = key.rstrip("/")
    if key and bucket.head(key) is not None:
        folder, _, name = key.rpartition("/")
        return S3Store(bucket, f"{folder}/" if folder else "", only=name)
    prefix = f"{key}/" if key else ""
    return S3Store(bucket, prefix) if bucket.holds_any(prefix) else None


def bucket_of(url: str, options: S3Options) -> tuple[Bucket, str]:
    """The bucket of an ``s3://`` URL, and the key in it, without slashes at its ends.

    Raises:
        UsageError: it holds credentials, which the service's library would show in its errors.
    """
    name, _, key = url.partition("://")[2].partition("/")
    if "@" in name or (":" in name and not name.startswith("arn:")):
        given = format_option("storage_options", {"key": "...", "secret": "..."})
        raise UsageError(f"{url}: credentials do not belong in the URL; give them with {given}")
    return Bucket(options, name), key.strip("/")
