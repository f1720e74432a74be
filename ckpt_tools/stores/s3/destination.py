"""Files of an output as multipart uploads to S3, and the log of the parts.

Every output file is a multipart upload, which is invisible until it is completed; a task is one part of it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from ckpt_tools.errors import StoreError
from ckpt_tools.stores.destination import CopyingRules, Destination
from ckpt_tools.stores.s3.client import Bucket, Part, RefusedError
from ckpt_tools.stores.s3.upload_notes import TOKEN, UploadNotes, in_parallel
from ckpt_tools.stores.source import Buffer, ServiceFile, checked_name

PART_BYTES = 8 << 20
"""Part size of an uploaded file: S3's own tools use 8 MiB."""

MAX_PARTS = 10_000
"""Most parts of one upload, the service's limit."""

LOG_NUMBER = re.compile(r"\d{12}")

MIN_COPY_BYTES = 5 << 20
"""Smallest part that the service copies, and smallest part that is not a file's last: the service's limit."""


@dataclass(slots=True)
class S3Destination(Destination):
    """Uploads of files below ``prefix``. In another process it writes parts of uploads that were begun here.

    A handle is a token, which the finished object carries, and the upload's id. A part tag is its ETag, after a ``+``
    where the service copied the part itself, so that its size has to be looked at.
    """

    bucket: Bucket
    prefix: str
    notes: UploadNotes
    finished: dict[str, tuple[str, str]] = field(default_factory=dict, repr=False)
    """By path: the handle, and the ETags of the parts, joined because a large output has millions."""
    _held: dict[tuple[str, str], Mapping[int, Part] | None] = field(default_factory=dict, repr=False)

    def begin(self, path: str, size_bytes: int) -> str:
        key = self.prefix + checked_name(path)
        token = self.notes.begin(key)
        return f"{token}/{self.bucket.create_upload(key, {TOKEN: token})}"

    def write(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        return self.bucket.upload_part(self.prefix + path, _upload(handle), number + 1, data)

    @property
    def copying(self) -> CopyingRules:
        return copying_rules(self.bucket)

    def copy(self, path: str, handle: str, number: int, source: ServiceFile, start: int, stop: int) -> str:
        etag = self.bucket.copy_part(self.prefix + path, _upload(handle), number + 1, source, start, stop)
        return f"{stop - start}+{etag}"

    def holds(self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str) -> bool:
        found = self._parts(path, handle)
        return found is None or found.get(number + 1) == Part(_etag(part_tag), num_bytes)

    def _parts(self, path: str, handle: str) -> Mapping[int, Part] | None:
        """Parts of an upload of an earlier run; None if it was completed, empty if it is gone."""
        if (path, handle) not in self._held:
            key = self.prefix + path
            try:
                self._held[path, handle] = self.bucket.parts(key, _upload(handle))
            except RefusedError:
                is_complete = self.bucket.metadata(key) == {TOKEN: handle.partition("/")[0]}
                self._held[path, handle] = None if is_complete else {}
        return self._held[path, handle]

    def finish(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        if any("+" in part_tag for part_tag in part_tags):
            self._check_copied(path, handle, part_tags)
        self.finished[path] = (handle, "\n".join(map(_etag, part_tags)))
        self._held.pop((path, handle), None)

    def _check_copied(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        """Raises StoreError where a copied part has another size than it should."""
        found = self.bucket.parts(self.prefix + path, _upload(handle))
        for number, (size, mark, etag) in enumerate((each.rpartition("+") for each in part_tags), 1):
            if mark and found.get(number) != Part(etag, int(size)):
                raise StoreError(
                    f"the service copied part {number} wrongly: {found.get(number)} instead of {size} bytes",
                    path=self.bucket.url(self.prefix + path),
                )

    def complete(self, path: str) -> None:
        """Make a finished file visible. Raises StoreError."""
        handle, etags = self.finished[path]
        token, _, upload = handle.partition("/")
        self.bucket.complete(self.prefix + path, upload, etags.split("\n"), {TOKEN: token})

    def mark(self, path: str) -> tuple[str, str]:
        """The key of a finished file, and the token that its object will carry."""
        return self.prefix + path, self.finished[path][0].partition("/")[0]

    def abandon(self) -> None:
        """Does nothing: no file is open here."""

    def __reduce__(self) -> tuple[object, ...]:
        return S3Destination, (self.bucket, self.prefix, self.notes)


def copying_rules(bucket: Bucket) -> CopyingRules:
    return CopyingRules(bucket.options, MIN_COPY_BYTES)


def _upload(handle: str) -> str:
    return handle.partition("/")[2]


def _etag(part_tag: str) -> str:
    return part_tag.rpartition("+")[2]


@dataclass(slots=True)
class S3Log:
    """An object for each append, numbered."""

    bucket: Bucket
    prefix: str
    _next: Iterator[int] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self) -> bytes:
        pieces = in_parallel(self.bucket.get, self._keys())
        return b"".join(piece.data for piece in pieces if piece is not None)

    def append(self, data: bytes) -> None:
        with self._lock:
            if self._next is None:
                last = max(self._keys(), default=None)
                self._next = count(0 if last is None else int(last.removeprefix(self.prefix)) + 1)
            number = next(self._next)
        self.bucket.put(f"{self.prefix}{number:012d}", data)

    def clear(self) -> None:
        self.bucket.delete(self._keys())

    def _keys(self) -> list[str]:
        keys = [found.key for found in self.bucket.objects(self.prefix)]
        return [key for key in keys if LOG_NUMBER.fullmatch(key.removeprefix(self.prefix))]
