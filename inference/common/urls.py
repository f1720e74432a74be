"""File systems of URLs, through fsspec, with the storage options of ``ckpt_tools``."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from ckpt_tools.errors import CkptError, StoreError

from .errors import describe_error
from .training_package import storage


def is_url(place: object) -> bool:
    """Whether ``place`` is a URL of a store, and not a local path."""
    return "://" in str(place)


def find_file_system(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """fsspec's file system of a URL or a local path, and the path in it. Raises UsageError if the scheme is unknown, or
    its package is missing."""
    if not is_url(url):
        return LocalFileSystem(), os.path.abspath(url)  # noqa: PTH100  # names may be of any bytes
    result: tuple[Any, str] = storage.file_system(url, options)
    return result


@contextmanager
def open_file(url: str, options: Mapping[str, Any] | None = None) -> Iterator[BinaryIO]:
    """The file at a URL or a local path, opened at its beginning. Raises StoreError for errors of a store's client in
    the block, and OSError."""
    if not is_url(url):
        with open(url, "rb") as file:  # noqa: PTH123  # names may be of any bytes
            yield file
        return
    fs, path = find_file_system(url, options)
    # The files of some stores have a readline without a limit.
    with translate_store_errors(url), io.BufferedReader(fs.open(path, "rb")) as file:
        yield file


@contextmanager
def translate_store_errors(url: str) -> Iterator[None]:
    """Errors of a store's client in the block, of many classes, become StoreError; missing files stay."""
    try:
        yield
    except (CkptError, FileNotFoundError, IsADirectoryError, PermissionError, FileExistsError):
        raise
    except Exception as error:
        raise StoreError(f"{url}: the store failed ({describe_error(error)})") from error
