"""Object store for a run's checkpoints (``--storage``).

Every scheme uses fsspec, S3 uses s3fs, which resolves credentials, endpoint, region and profile as ``ckpt_tools`` does.
They are not sent to workers: each process reads its own environment, which workers of a local cluster inherit.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from ckpt_tools.errors import SourceNotFoundError, StoreError, UsageError

SAME_IN_S3FS = ("key", "secret", "token", "profile", "anon", "endpoint_url")
"""Storage options of ``ckpt_tools`` for S3 with the same name in s3fs."""


def file_system(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """fsspec's file system of ``url`` without cached listings, because others write there, and the path in it. The
    storage ``options`` are those of ``ckpt_tools``. Raises UsageError if the scheme is unknown, or its package is
    missing."""
    given = dict(options or {})
    if url.startswith("s3://"):  # other stores take fsspec's options unchanged
        region = {"client_kwargs": {"region_name": given["region"]}} if "region" in given else {}
        given = {name: value for name, value in given.items() if name in SAME_IN_S3FS} | region
    try:
        fs, path = url_to_fs(url, use_listings_cache=False, **given)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be used: {error}") from error
    return fs, str(path).rstrip("/")


def check_storage(url: str) -> None:
    """Raises UsageError for an unknown scheme, SourceNotFoundError if S3 has no such bucket, StoreError if the request
    fails. s3fs would create a bucket for a mistyped name."""
    fs, path = file_system(url)
    if not url.startswith("s3://"):
        return
    bucket = path.partition("/")[0]
    try:
        with report_failed_requests(url):
            fs.call_s3("head_bucket", Bucket=bucket)
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"there is no bucket {bucket}", path=url) from error


@contextmanager
def report_failed_requests(url: str) -> Iterator[None]:
    """Within the block a failure of the service, whose libraries have no common error class, raises StoreError;
    FileNotFoundError is passed on."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise StoreError(f"the store failed with {type(error).__name__}: {error}", path=url) from error


_CUT_OFF = re.compile(r"PytorchStreamWriter|inline_container\.cc|iostream error")
"""torch's zip writer, which drops the reason of the operating system."""


@contextmanager
def report_failed_writes(path: Path) -> Iterator[None]:
    """Within the block, a write that fails raises StoreError; other errors are passed on."""
    try:
        yield
    except BaseException as error:  # CheckpointException is none of Exception's
        reason = _write_failure_reason(find_root_cause(error), path)
        if reason is None:
            raise
        raise StoreError(f"{path} cannot be written: {reason}") from error


def find_root_cause(error: BaseException) -> BaseException:
    """The error of the first rank that failed, if torch has wrapped the errors of a collective save or load."""
    from torch.distributed.checkpoint.api import CheckpointException  # it takes seconds

    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error


def describe_os_error(error: OSError) -> str:
    return (f"{error.filename}: " if error.filename else "") + (error.strerror or str(error))


def _write_failure_reason(error: BaseException, path: Path) -> str | None:
    if isinstance(error, OSError):
        return describe_os_error(error)
    if isinstance(error, RuntimeError) and _CUT_OFF.search(str(error)):
        return f"torch could not write a whole file; its disk has {shutil.disk_usage(path.parent).free:,} bytes left"
    return None
