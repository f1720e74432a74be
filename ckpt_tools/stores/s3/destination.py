"""Files of an output as multipart uploads to S3, and the log of the parts.

An output file is a multipart upload, which is invisible until it is completed; a task is one part of it. An upload is
four requests: its note, beginning, part and completion. So small files are held instead, in the tags of their parts:
these are with the journal, and wherever the file is completed, by one request.
"""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar, NamedTuple

from ckpt_tools.core.part_rules import PartRules
from ckpt_tools.errors import StoreError
from ckpt_tools.stores.destination import Destination
from ckpt_tools.stores.parallel import MAX_PARALLEL_REQUESTS, map_in_parallel
from ckpt_tools.stores.s3.client import Bucket, RefusedError, UploadedPart
from ckpt_tools.stores.s3.upload_notes import TOKEN_METADATA_KEY, UploadNotes, make_token
from ckpt_tools.stores.source import Buffer, CopySource, check_file_name

PART_BYTES = 8 << 20
"""Part size of an uploaded file: S3's own tools use 8 MiB."""

MAX_PARTS = 10_000
"""Most parts of one upload, the service's limit."""

LOG_NAME_FORM = re.compile(r"\d{12}")

MIN_COPY_BYTES = 5 << 20
"""Smallest part that the service copies, and smallest part that is not a file's last: the service's limit."""


MAX_HELD_FILE_BYTES = 64 << 10
"""Largest file that is held, such as a step, a norm or an index. Sending it takes less time than a request waits."""

MAX_HELD_BYTES = 8 << 20
"""Of all held files: 5,000 steps of DeepSpeed's universal format."""

HELD_MARK = "="
"""Begins the tag of a part that is held: its bytes follow in base 64."""


class _PartTag(NamedTuple):
    """The ETag of a part; as text, ``ETAG``, or ``SIZE+ETAG`` if the service copied the part."""

    etag: str
    copied_bytes: int | None = None
    """Bytes that the service was asked to copy, to be compared with those that it lists; None for a part sent here."""

    @classmethod
    def parse(cls, text: str) -> _PartTag:
        size, mark, etag = text.rpartition("+")
        return cls(etag, int(size) if mark else None)

    def __str__(self) -> str:
        return self.etag if self.copied_bytes is None else f"{self.copied_bytes}+{self.etag}"


@dataclass(slots=True)
class S3Destination(Destination):
    """Uploads of files below ``prefix``. In another process it writes parts of uploads that were begun here.

    A handle is a token, which the finished object carries, a slash, and the upload's id, which a held file has not. A
    part tag is the text of a ``_PartTag``, or ``HELD_MARK`` and the bytes.
    """

    files_begun_at_once: ClassVar[int] = MAX_PARALLEL_REQUESTS

    bucket: Bucket
    prefix: str
    notes: UploadNotes
    max_held_bytes: int = MAX_HELD_BYTES
    finished_uploads: dict[str, tuple[str, str]] = field(default_factory=dict, repr=False)
    """By path: the handle, and the ETags of the parts or the tags of held ones, joined because a large output has
    millions."""
    _bytes_held: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _earlier_parts: dict[tuple[str, str], Mapping[int, UploadedPart] | None] = field(default_factory=dict, repr=False)

    def begin_file(self, path: str, size_bytes: int) -> str:
        key, token = self.prefix + check_file_name(path), make_token()
        with self._lock:
            if size_bytes <= min(MAX_HELD_FILE_BYTES, self.max_held_bytes - self._bytes_held):
                self._bytes_held += size_bytes
                return f"{token}/"
        self.notes.note_upload(key, token)
        return f"{token}/{self.bucket.create_upload(key, {TOKEN_METADATA_KEY: token})}"

    def begin_files(self, sizes: Mapping[str, int]) -> list[str]:
        return map_in_parallel(lambda each: self.begin_file(*each), sizes.items())

    def write_part(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        if not _upload_id(handle):
            return HELD_MARK + base64.b64encode(data).decode()
        return self.bucket.upload_part(self.prefix + path, _upload_id(handle), number + 1, data)

    @property
    def part_rules(self) -> PartRules:
        return part_rules_of(self.bucket)

    def copy_part(self, path: str, handle: str, number: int, source: CopySource, start: int, stop: int) -> str:
        etag = self.bucket.copy_part(self.prefix + path, _upload_id(handle), number + 1, source, start, stop)
        return str(_PartTag(etag, stop - start))

    def has_part(
        self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str
    ) -> bool:
        if part_tag.startswith(HELD_MARK):
            return True
        parts_by_number = self._list_earlier_parts(path, handle)
        return parts_by_number is None or parts_by_number.get(number + 1) == UploadedPart(
            _PartTag.parse(part_tag).etag, num_bytes
        )

    def _list_earlier_parts(self, path: str, handle: str) -> Mapping[int, UploadedPart] | None:
        """Parts of an upload of an earlier run; None if it was completed, empty if it is gone."""
        if (path, handle) not in self._earlier_parts:
            key = self.prefix + path
            try:
                self._earlier_parts[path, handle] = self.bucket.list_parts(key, _upload_id(handle))
            except RefusedError:
                is_complete = self.bucket.get_metadata(key) == {TOKEN_METADATA_KEY: handle.partition("/")[0]}
                self._earlier_parts[path, handle] = None if is_complete else {}
        return self._earlier_parts[path, handle]

    def finish_file(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        if not _upload_id(handle):
            self.finished_uploads[path] = (handle, "\n".join(part_tags))
            return
        parsed_tags = [_PartTag.parse(part_tag) for part_tag in part_tags]
        if any(tag.copied_bytes is not None for tag in parsed_tags):
            self._check_copied_parts(path, handle, parsed_tags)
        self.finished_uploads[path] = (handle, "\n".join(tag.etag for tag in parsed_tags))
        self._earlier_parts.pop((path, handle), None)

    def _check_copied_parts(self, path: str, handle: str, part_tags: Sequence[_PartTag]) -> None:
        """Raises StoreError where a copied part has another size than it should."""
        parts_by_number = self.bucket.list_parts(self.prefix + path, _upload_id(handle))
        for number, (etag, size) in enumerate(part_tags, 1):
            if size is not None and parts_by_number.get(number) != UploadedPart(etag, size):
                raise StoreError(
                    f"the service copied part {number} wrongly: {parts_by_number.get(number)} instead of {size} bytes",
                    path=self.bucket.url(self.prefix + path),
                )

    def complete_file(self, path: str) -> None:
        """Make a finished file visible. Raises StoreError."""
        handle, joined_tags = self.finished_uploads[path]
        key, tags, (token, _, upload) = self.prefix + path, joined_tags.split("\n"), handle.partition("/")
        metadata = {TOKEN_METADATA_KEY: token}
        if upload:
            self.bucket.complete_upload(key, upload, tags, metadata)
        else:
            data = b"".join(base64.b64decode(tag.removeprefix(HELD_MARK)) for tag in tags)
            self.bucket.put_object(key, data, metadata)

    def get_key_and_token(self, path: str) -> tuple[str, str]:
        """The key of a finished file, and the token that its object will carry."""
        return self.prefix + path, self.finished_uploads[path][0].partition("/")[0]

    def list_held_files(self) -> dict[str, str]:
        """By token, the keys of finished files that no note names yet."""
        handles = {self.prefix + path: handle for path, (handle, _) in self.finished_uploads.items()}
        return {handle.rstrip("/"): key for key, handle in handles.items() if not _upload_id(handle)}

    def close_open_files(self) -> None:
        """Does nothing: no file is open here."""

    def __reduce__(self) -> tuple[object, ...]:
        return S3Destination, (self.bucket, self.prefix, self.notes)


def part_rules_of(bucket: Bucket) -> PartRules:
    return PartRules(PART_BYTES, MAX_PARTS, MIN_COPY_BYTES, service=bucket.options)


def _upload_id(handle: str) -> str:
    return handle.partition("/")[2]


@dataclass(slots=True)
class S3Log:
    """An object for each append, numbered."""

    bucket: Bucket
    prefix: str
    _next_number: Iterator[int] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self) -> bytes:
        appended_objects = map_in_parallel(self.bucket.get_object, self._list_keys())
        return b"".join(piece.data for piece in appended_objects if piece is not None)

    def append(self, data: bytes) -> None:
        with self._lock:
            if self._next_number is None:
                last = max(self._list_keys(), default=None)
                self._next_number = count(0 if last is None else int(last.removeprefix(self.prefix)) + 1)
            number = next(self._next_number)
        self.bucket.put_object(f"{self.prefix}{number:012d}", data)

    def clear(self) -> None:
        self.bucket.delete_objects(self._list_keys())

    def _list_keys(self) -> list[str]:
        keys = [found.key for found in self.bucket.list_objects(self.prefix)]
        return [key for key in keys if LOG_NAME_FORM.fullmatch(key.removeprefix(self.prefix))]
