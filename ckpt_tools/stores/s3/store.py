"""A prefix of an S3 bucket as a store to read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import IncompleteError, SourceNotFoundError, UsageError
from ckpt_tools.stores.output_names import split_visible_objects
from ckpt_tools.stores.s3.client import Bucket, ListedObject
from ckpt_tools.stores.s3.options import S3Options
from ckpt_tools.stores.source import CopySource, Store, check_file_name


@dataclass(slots=True)
class S3Store(Store):
    """The objects below ``prefix``, which is empty or ends with a slash; with ``only_file``, a single one of them."""

    bucket: Bucket
    prefix: str
    only_file: str | None = None
    _listed_objects: dict[str, ListedObject] = field(default_factory=dict, repr=False)
    _hidden_files: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        return self.bucket.url(self.prefix + (self.only_file or "")).rstrip("/")

    def list(self) -> Mapping[str, int]:
        if self.only_file is None:
            all_objects = {each.key.removeprefix(self.prefix): each for each in self.bucket.list_objects(self.prefix)}
        elif (single_object := self.bucket.head_object(self.prefix + self.only_file)) is not None:
            all_objects = {self.only_file: single_object}
        else:
            raise SourceNotFoundError(f"there is no file {self.url}")
        sizes = {path: each.size for path, each in all_objects.items()}
        visible, self._hidden_files = split_visible_objects(sizes, self.only_file)
        self._listed_objects = {path: all_objects[path] for path in visible}
        return visible

    def list_hidden(self) -> Mapping[str, int]:
        """Those of the listing."""
        return self._hidden_files

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        key = self.prefix + check_file_name(path)
        if len(buffer):
            listed_object = self._listed_objects.get(path)
            self.bucket.read_into(key, start, buffer, etag=None if listed_object is None else listed_object.etag)
            return
        size = self._head_object(path).size
        if start > size:
            raise IncompleteError(f"the file ends at byte {size:,}", path=self.bucket.url(key))

    def _head_object(self, path: str) -> ListedObject:
        listed_object = self.bucket.head_object(self.prefix + check_file_name(path))
        if listed_object is None:
            raise IncompleteError("this file of the checkpoint is missing", path=self.bucket.url(self.prefix + path))
        return listed_object

    def version(self, path: str) -> str:
        return (self._listed_objects.get(path) or self._head_object(path)).etag

    def modified_time(self, path: str) -> float | None:
        """The time in the listing."""
        listed_object = self._listed_objects.get(path)
        return None if listed_object is None else listed_object.modified

    def find_copy_source(self, path: str) -> CopySource | None:
        return CopySource(self.bucket.options, f"{self.bucket.name}/{self.prefix}{path}", self.version(path))


def open_s3_store(bucket: Bucket, key: str) -> S3Store | None:
    """Store at ``key``, which is an object or a prefix; None if nothing exists there.

    Raises:
        SourceNotFoundError: there is no such bucket. StoreError: the service does not answer.
    """
    key = key.rstrip("/")
    if key and bucket.head_object(key) is not None:
        folder, _, name = key.rpartition("/")
        return S3Store(bucket, f"{folder}/" if folder else "", only_file=name)
    prefix = f"{key}/" if key else ""
    return S3Store(bucket, prefix) if bucket.has_any_object(prefix) else None


def bucket_of(url: str, options: S3Options) -> tuple[Bucket, str]:
    """The bucket of an ``s3://`` URL, and the key in it, without slashes at its ends.

    Raises:
        UsageError: it holds credentials, which the service's library would show in its errors.
    """
    name, _, key = url.partition("://")[2].partition("/")
    if "@" in name or (":" in name and not name.startswith("arn:")):
        options_example = format_option("storage_options", {"key": "...", "secret": "..."})
        raise UsageError(f"{url}: credentials do not belong in the URL; give them with {options_example}")
    return Bucket(options, name), key.strip("/")
