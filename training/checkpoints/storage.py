"""Object store for a run's checkpoints (``--storage``).

Every scheme uses fsspec, S3 uses s3fs, which resolves credentials, endpoint, region and profile as ``ckpt_tools`` does.
They are not sent to workers: each process reads its own environment, which workers of a local cluster inherit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from ckpt_tools.errors import SourceNotFoundError, StoreError, UsageError

Result = TypeVar("Result")


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
        asked(url, lambda: fs.call_s3("head_bucket", Bucket=bucket))
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"there is no bucket {bucket}", path=url) from error


def asked(url: str, call: Callable[[], Result]) -> Result:
    """Result of ``call``. Raises StoreError if the service fails; FileNotFoundError is passed on."""
    try:
        return call()
    except FileNotFoundError:
        raise
    except Exception as error:
        # The libraries of the services have no common error class.
        raise StoreError(f"the store failed with {type(error).__name__}: {error}", path=url) from error
