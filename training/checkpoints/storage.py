"""Object store for a run's checkpoints (``--storage``).

Every scheme uses fsspec, S3 uses s3fs, which resolves credentials, endpoint, region and profile as ``ckpt_tools`` does.
They are not sent to workers: each process reads its own environment, which workers of a local cluster inherit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsspec.core import url_to_fs

from ckpt_tools.errors import SourceNotFoundError, StoreError, UsageError


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of ``url`` without cached listings, and the path in it. Raises UsageError."""
    try:
        fs, path = url_to_fs(url, use_listings_cache=False)
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
        with asking(url):
            fs.call_s3("head_bucket", Bucket=bucket)
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"there is no bucket {bucket}", path=url) from error


@contextmanager
def asking(url: str) -> Iterator[None]:
    """Within the block a failure of the service, whose libraries have no common error class, raises StoreError;
    FileNotFoundError is passed on."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise StoreError(f"the store failed with {type(error).__name__}: {error}", path=url) from error
