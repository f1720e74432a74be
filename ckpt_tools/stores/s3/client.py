"""The requests of S3 that we make, each checked, tried again where that may help, and its errors translated to ours.

Measured on 2 cores against SeaweedFS on loopback, 512 MiB by 6 threads in parts of 8 MiB, medians of 3 (server
included, which is the limit of uploads): ranged reads botocore 619 MB/s, obstore 620, s3fs 477; part uploads botocore
72, obstore 66, s3fs 71. obstore has no upload of single parts from several processes.

Bodies are not hashed for the signature, which costs more than sending them; each part carries its CRC-32 in a signed
header instead, which the service checks.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Any, TypeVar, cast

from isal import isal_zlib

from ckpt_tools.errors import IncompleteError, SourceNotFoundError, StoreError
from ckpt_tools.stores.object_lock import ObjectBody
from ckpt_tools.stores.retry import TransientError, host_of, is_transient, retry_transient
from ckpt_tools.stores.s3.options import S3Options, credentials_hint, import_exceptions, make_client
from ckpt_tools.stores.source import Buffer, CopySource

Result = TypeVar("Result")

RECEIVE_BYTES = 256 << 10
"""Bytes of a body read at a time, into a buffer that fits the processor's cache: no second copy of a part in memory."""

MAX_KEYS_PER_DELETE = 1000
"""Keys of one DeleteObjects request, the service's own limit."""

_SERVICE_NAME = "the S3 service"

_NEXT_OBJECTS = {"ContinuationToken": "NextContinuationToken"}
_NEXT_PARTS = {"PartNumberMarker": "NextPartNumberMarker"}
_NEXT_UPLOADS = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
"""Where the next page of a listing begins: the parameter of a request, and the field of the answer before."""

_REFUSED_CODES = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "403"}


class RefusedError(StoreError):
    """The service refused the request."""

    def __init__(self, message: str, *, path: str | None = None, key: str | None = None, status: int = 0) -> None:
        super().__init__(message, path=path, key=key)
        self.status = status


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object of a listing."""

    key: str
    size: int
    etag: str
    modified: float | None = None
    """When it was written, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """A part of an upload as the service lists it."""

    etag: str
    size: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of a service. Holds no connection, so that it can be sent to another process."""

    options: S3Options
    name: str

    def url(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    # Reading

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Every object whose key starts with ``prefix``, in order. Raises SourceNotFoundError, StoreError."""
        for page in self._list_pages("list_objects_v2", prefix, _NEXT_OBJECTS, Prefix=prefix):
            for listed in page.get("Contents", ()):
                yield ListedObject(
                    listed["Key"], int(listed["Size"]), listed["ETag"], listed["LastModified"].timestamp()
                )

    def has_any_object(self, prefix: str) -> bool:
        """True if any key starts with ``prefix``. Raises as ``list_objects``."""
        return bool(self._call_with_retry("list_objects_v2", prefix, Prefix=prefix, MaxKeys=1).get("Contents"))

    def _list_pages(
        self, operation: str, key: str, next_fields: Mapping[str, str], **given: Any
    ) -> Iterator[Mapping[str, Any]]:
        """The pages of a listing. ``next_fields`` has, by parameter of a request, the field of the answer before."""
        page = self._call_with_retry(operation, key, **given)
        yield page
        while page.get("IsTruncated"):
            position = {parameter: page[answer_field] for parameter, answer_field in next_fields.items()}
            page = self._call_with_retry(operation, key, **given, **position)
            yield page

    def head_object(self, key: str) -> ListedObject | None:
        """The object, if there is one. Raises StoreError."""
        answer = self._call_or_none("head_object", key, Key=key)
        if answer is None:
            return None
        return ListedObject(key, int(answer["ContentLength"]), answer["ETag"], answer["LastModified"].timestamp())

    def get_metadata(self, key: str) -> Mapping[str, str] | None:
        """Metadata of the object, if it exists. Raises StoreError."""
        answer = self._call_or_none("head_object", key, Key=key)
        return None if answer is None else dict(answer.get("Metadata", {}))

    def _call_or_none(self, operation: str, key: str, **given: Any) -> Mapping[str, Any] | None:
        try:
            return self._call_with_retry(operation, key, **given)
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None) -> None:
        """Fill ``buffer`` with the object's bytes from ``start``; with ``etag``, of that version of it alone.

        Raises:
            IncompleteError: there is no such object, or it ends early. StoreError: reading failed.
        """
        version_condition = {} if etag is None else {"IfMatch": etag}
        retry_transient(lambda: self._read_once(key, start, buffer, version_condition), self.options.retry)

    def _read_once(self, key: str, start: int, buffer: memoryview, version_condition: Mapping[str, str]) -> None:
        byte_range = f"bytes={start}-{start + len(buffer) - 1}"
        try:
            answer = self._call_once("get_object", key, Key=key, Range=byte_range, **version_condition)
        except RefusedError as error:
            if error.status == 412:
                raise StoreError("it was changed while it was being read; run again", path=self.url(key)) from error
            if error.status == 404:
                raise IncompleteError("this file of the checkpoint is missing", path=self.url(key)) from error
            if error.status == 416:
                stop = start + len(buffer)
                raise IncompleteError(f"the file ends before byte {stop:,}", path=self.url(key)) from error
            raise
        body = answer["Body"]
        try:
            self._check_range(answer, key, start, len(buffer))
            self._translate_errors("get_object", key, lambda: _read_body_into(buffer, body))
        except BaseException:
            body.close()
            raise

    def _check_range(self, answer: Mapping[str, Any], key: str, start: int, num_bytes: int) -> None:
        """Raises IncompleteError if the object ends early, TransientError if another range than this came."""
        content_range, stop = str(answer.get("ContentRange", "")), start + num_bytes
        if content_range.startswith(f"bytes {start}-{stop - 1}/") and answer["ContentLength"] == num_bytes:
            return
        parsed_range = re.fullmatch(r"bytes [0-9]+-[0-9]+/([0-9]{1,19})", content_range)
        object_size = 0 if parsed_range is None else int(parsed_range[1])
        if content_range == f"bytes {start}-{object_size - 1}/{object_size}" and object_size < stop:
            raise IncompleteError(f"the file ends at byte {object_size:,}", path=self.url(key))
        raise TransientError(
            StoreError(f"the service sent {content_range or 'no range'} but bytes {start}-{stop - 1} were requested",
                       path=self.url(key))
        )  # fmt: skip

    def get_object(self, key: str) -> ObjectBody | None:
        """A small object in one piece, if there is one. Raises StoreError."""
        return retry_transient(lambda: self._get_once(key), self.options.retry)

    def _get_once(self, key: str) -> ObjectBody | None:
        try:
            # As a range, so that the answer says how large the object is: a body alone may be cut short unnoticed.
            answer = self._call_once("get_object", key, Key=key, Range="bytes=0-")
        except RefusedError as error:
            if error.status == 404:
                return None
            if error.status != 416:
                raise
            # An empty object has no range: SeaweedFS makes one of a request whose sender was killed.
            head_answer = self._call_or_none("head_object", key, Key=key)
            if head_answer is not None and int(head_answer["ContentLength"]):
                raise TransientError(StoreError("another process wrote it meanwhile", path=self.url(key))) from error
            return None if head_answer is None else ObjectBody(b"", head_answer["ETag"], _age_seconds(head_answer))
        data = self._translate_errors("get_object", key, answer["Body"].read)
        if answer.get("ContentRange") != f"bytes 0-{len(data) - 1}/{len(data)}":
            raise TransientError(StoreError("the service sent a part of it", path=self.url(key)))
        return ObjectBody(data, answer["ETag"], _age_seconds(answer))

    # Writing small objects

    def put_object(self, key: str, data: bytes, metadata: Mapping[str, str] = MappingProxyType({})) -> None:
        """Make or replace an object. Raises StoreError."""
        request_fields = {"Key": key, "Metadata": dict(metadata), "ChecksumCRC32": _compute_crc(data)}
        self._call_with_retry("put_object", key, **request_fields, Body=data)

    def put_if_unchanged(self, key: str, data: bytes, etag: str | None) -> None:
        """Make an object if there is none, or with ``etag`` replace that version of it; on a service that cannot tell,
        in any case. Raises StoreError."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            self._call_with_retry("put_object", key, Key=key, Body=data, **condition)
        except RefusedError as error:
            if error.status == 501:
                self.put_object(key, data)
            elif error.status not in (404, 412):
                raise

    def delete_objects(self, keys: Sequence[str]) -> None:
        """Remove objects, in that order by thousands; those that do not exist are skipped. Raises StoreError."""
        for first in range(0, len(keys), MAX_KEYS_PER_DELETE):
            batch = [{"Key": key} for key in keys[first : first + MAX_KEYS_PER_DELETE]]
            retry_transient(lambda batch=batch: self._delete_once(batch), self.options.retry)  # type: ignore[misc]

    def _delete_once(self, batch: Sequence[Mapping[str, str]]) -> None:
        answer = self._call_once("delete_objects", batch[0]["Key"], Delete={"Objects": batch, "Quiet": True})
        for left in answer.get("Errors", ()):
            reason = f"removing failed: {left.get('Message') or left.get('Code')}"
            raise TransientError(StoreError(reason, path=self.url(left.get("Key", ""))))

    # Uploads

    def create_upload(self, key: str, metadata: Mapping[str, str]) -> str:
        """Id of a new upload, which is not visible before it is completed. Raises StoreError.

        An attempt whose answer was lost leaves an open upload behind, which ``list_uploads`` lists.
        """
        return str(self._call_with_retry("create_multipart_upload", key, Key=key, Metadata=dict(metadata))["UploadId"])

    def upload_part(self, key: str, upload: str, number: int, data: Buffer) -> str:
        """The ETag of part ``number``, from 1; sent again, it replaces itself. Raises StoreError."""
        request_fields = {"Key": key, "UploadId": upload, "PartNumber": number, "ChecksumCRC32": _compute_crc(data)}
        request_fields["ContentLength"] = memoryview(data).nbytes

        def send_part() -> Mapping[str, Any]:
            # A body for each attempt: a broken one has been read in part.
            return self._call_once("upload_part", key, **request_fields, Body=_UploadBody(memoryview(data)))

        return _strip_quotes(retry_transient(send_part, self.options.retry)["ETag"])

    def copy_part(self, key: str, upload: str, number: int, source: CopySource, start: int, stop: int) -> str:
        """The ETag of part ``number``, bytes ``[start, stop)`` of ``source``, which the service itself copies.

        Raises StoreError.
        """
        bucket, _, source_key = source.name.partition("/")
        copy_fields = {
            "CopySource": {"Bucket": bucket, "Key": source_key},
            "CopySourceRange": f"bytes={start}-{stop - 1}",
            "CopySourceIfMatch": source.version,
        }
        answer = self._call_with_retry(
            "upload_part_copy", key, Key=key, UploadId=upload, PartNumber=number, **copy_fields
        )
        return _strip_quotes(answer["CopyPartResult"]["ETag"])

    def list_parts(self, key: str, upload: str) -> dict[int, UploadedPart]:
        """Parts of an open upload, by number from 1. Raises StoreError."""
        pages = self._list_pages("list_parts", key, _NEXT_PARTS, Key=key, UploadId=upload)
        # SeaweedFS lists a part that was sent twice twice; the last counts.
        return {
            int(part["PartNumber"]): UploadedPart(_strip_quotes(part["ETag"]), int(part["Size"]))
            for page in pages
            for part in page.get("Parts", ())
        }

    def list_uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Keys and ids of open uploads to keys that start with ``prefix``. Raises StoreError."""
        for page in self._list_pages("list_multipart_uploads", prefix, _NEXT_UPLOADS, Prefix=prefix):
            yield from ((each["Key"], each["UploadId"]) for each in page.get("Uploads", ()))

    def complete_upload(self, key: str, upload: str, etags: Sequence[str], metadata: Mapping[str, str]) -> None:
        """Make an upload an object, visible in one step. Raises StoreError.

        An upload that is gone was completed by an attempt whose answer was lost, if the object has its metadata.
        """
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        try:
            self._call_with_retry(
                "complete_multipart_upload", key, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
            )
        except RefusedError as error:
            if error.status != 404 or self.get_metadata(key) != metadata:
                raise

    def abort_upload(self, key: str, upload: str) -> None:
        """Remove an upload; one that does not exist is skipped. Raises StoreError."""
        self._call_or_none("abort_multipart_upload", key, Key=key, UploadId=upload)

    # One request

    def _call_with_retry(self, operation: str, key: str, **given: Any) -> Mapping[str, Any]:
        return retry_transient(lambda: self._call_once(operation, key, **given), self.options.retry)

    def _call_once(self, operation: str, key: str, **given: Any) -> Mapping[str, Any]:
        """Raises RefusedError, TransientError, CkptError."""

        def send_request() -> Any:
            return getattr(make_client(self.options, os.getpid()), operation)(Bucket=self.name, **given)

        return cast(Mapping[str, Any], self._translate_errors(operation, key, send_request))

    def _translate_errors(self, operation: str, key: str, call: Callable[[], Result]) -> Result:
        exceptions, urllib3 = import_exceptions()
        try:
            return call()
        except exceptions.ClientError as error:
            raise self._error_of_answer(operation, key, error.response) from error
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
            raise StoreError(f"no credentials for S3 were found; {credentials_hint()}", path=self.url(key)) from error
        except (exceptions.CredentialRetrievalError, exceptions.TokenRetrievalError) as error:
            raise StoreError(f"credentials for S3 cannot be loaded: {error}", path=self.url(key)) from error
        except (
            *(exceptions.HTTPClientError, exceptions.ConnectionError),
            *(exceptions.IncompleteReadError, exceptions.ResponseParserError),
            *(OSError, http.client.HTTPException, urllib3.HTTPError, EOFError),
        ) as error:
            reason = f"no answer from {self._endpoint or _SERVICE_NAME}: {error or type(error).__name__}"
            store_error = StoreError(reason, path=self.url(key))
            raise TransientError(store_error, f"no answer from {self._host} yet") from error
        except exceptions.BotoCoreError as error:
            raise StoreError(f"S3 cannot be reached: {error}", path=self.url(key)) from error

    @property
    def _endpoint(self) -> str | None:
        return self.options.endpoint_url or os.environ.get("AWS_ENDPOINT_URL")

    @property
    def _host(self) -> str:
        return host_of(self._endpoint) if self._endpoint else _SERVICE_NAME

    def _error_of_answer(self, operation: str, key: str, answer: Mapping[str, Any]) -> Exception:
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code, message = answer["Error"].get("Code", ""), answer["Error"].get("Message", "")
        if is_transient(status, code):
            store_error = StoreError(f"the S3 service failed: {code} {message}", path=self.url(key))
            return TransientError(store_error, f"{self._host} answers {code}")
        if code == "NoSuchBucket" or (status == 404 and operation.startswith("list_objects")):
            return SourceNotFoundError(f"there is no bucket {self.name}")
        if code in _REFUSED_CODES:
            return RefusedError(f"access was refused ({code}); {credentials_hint()}", path=self.url(key), status=status)
        text = f"the S3 service refused {operation}: {code} {message}".rstrip()
        return RefusedError(text, path=self.url(key), status=status)


def _age_seconds(answer: Mapping[str, Any]) -> float:
    """Seconds since the object was written, by the service's own clock."""
    now = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return (parsedate_to_datetime(now) - answer["LastModified"]).total_seconds() if now else 0.0


def _compute_crc(data: Buffer) -> str:
    """The CRC-32 as requests state it."""
    return base64.b64encode(isal_zlib.crc32(data).to_bytes(4, "big")).decode()


def _strip_quotes(etag: str) -> str:
    """The ETag without quotes, which only some answers have."""
    return etag.strip('"')


def _read_body_into(buffer: memoryview, body: Any) -> None:
    """Raises EOFError where the body ends before the buffer does."""
    bytes_received = 0
    while bytes_received < len(buffer):
        count = body.readinto(buffer[bytes_received : bytes_received + RECEIVE_BYTES])
        if not count:
            raise EOFError(f"the body ended after {bytes_received:,} of {len(buffer):,} bytes")
        bytes_received += count


class _UploadBody:
    """A buffer as a file, from which botocore sends a body without a copy.

    Read in blocks, because http.client asks for 8 KiB at a time, a system call each.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data.cast("B") if data.nbytes else memoryview(b"")
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> memoryview:
        stop = len(self._data) if size is None or size < 0 else self._at + max(size, RECEIVE_BYTES)
        block = self._data[self._at : stop]
        self._at += len(block)
        return block

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at
