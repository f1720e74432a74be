"""File systems of URLs, through fsspec, with the storage options of ``ckpt_tools``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ckpt_tools.errors import CkptError, StoreError, UsageError

from .errors import one_line

SAME_IN_S3FS = ("key", "secret", "token", "profile", "anon", "endpoint_url")  # S3 options with the same name in s3fs


def is_url(place: object) -> bool:
    """Whether ``place`` is a URL of a store, and not a local path."""
    return "://" in str(place)


def file_system(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """fsspec's file system of a URL or a local path, and the path in it. Listings are not cached, because others write
    there. Raises UsageError if the scheme is unknown, or its package is missing."""
    if not is_url(url):
        return LocalFileSystem(), os.path.abspath(url)  # noqa: PTH100  # names may be of any bytes
    try:
        fs, path = url_to_fs(url, use_listings_cache=False, **_options_of_s3fs(url, options or {}))
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be used: {error}") from error
    return fs, str(path).rstrip("/")


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Errors of a store's client in the block, of many classes, become StoreError; missing files stay."""
    try:
        yield
    except (CkptError, FileNotFoundError, IsADirectoryError, PermissionError, FileExistsError):
        raise
    except Exception as error:
        raise StoreError(f"{url}: the store failed ({one_line(error)})") from error


def _options_of_s3fs(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """S3 options under the names of s3fs. Other stores take fsspec's options unchanged."""
    if not url.startswith("s3://"):
        return dict(options)
    found = {name: value for name, value in options.items() if name in SAME_IN_S3FS}
    if "region" in options:
        found["client_kwargs"] = {"region_name": options["region"]}
    return found
