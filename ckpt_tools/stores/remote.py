"""URLs of stores that are not local: which store each scheme is, with which options, and the lock of a URL.

S3 has a store of our own. Everything else, and nothing of S3, goes through fsspec; the Hub by commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from ckpt_tools.arguments import api_function
from ckpt_tools.errors import SourceNotFoundError, UsageError
from ckpt_tools.process.credentials import mask_raised_errors
from ckpt_tools.stores.fsspec.hub import HubOutputLocation, open_hub_store
from ckpt_tools.stores.fsspec.location import FsspecOutputLocation
from ckpt_tools.stores.fsspec.lock import FsspecLockObjects
from ckpt_tools.stores.fsspec.store import is_hub, open_file_system, open_fsspec_store
from ckpt_tools.stores.object_lock import ObjectLock
from ckpt_tools.stores.output_names import PARTIAL_FOLDER_NAME
from ckpt_tools.stores.read_ahead import BlockCache
from ckpt_tools.stores.s3.location import S3OutputLocation
from ckpt_tools.stores.s3.options import S3Options
from ckpt_tools.stores.s3.store import bucket_of, open_s3_store
from ckpt_tools.stores.source import Source, Store


def open_remote_source(url: str, options: Mapping[str, Any]) -> Source:
    """Source at ``url``: a folder, or one file alone; small reads are served from blocks read ahead.

    Raises:
        SourceNotFoundError: nothing is there. StoreError: it cannot be reached. UsageError: unknown options, or a
        missing package.
    """
    store: Store | None
    if _is_s3(url):
        store = open_s3_store(*bucket_of(url, S3Options.parse(options)))
    else:
        store = (open_hub_store if is_hub(url) else open_fsspec_store)(url, options)
    if store is None:
        raise SourceNotFoundError(f"there is no file or folder {url}")
    source = Source.open(store)
    return replace(source, store=BlockCache(store, source.files))


def open_remote_location(url: str, options: Mapping[str, Any]) -> S3OutputLocation | FsspecOutputLocation:
    """Location of an output; nothing is read or written. Raises UsageError."""
    if not _is_s3(url):
        return (HubOutputLocation if is_hub(url) else FsspecOutputLocation).of(url, options)
    bucket, key = bucket_of(url, S3Options.parse(options))
    if ".." in PurePosixPath(key).parts or "//" in key:
        raise UsageError(f"{url}: the destination must not contain .. or empty names")
    return S3OutputLocation(bucket, key)


def locate_on_service(url: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the service of ``url``, ``file`` for local folders, and the path there. Raises UsageError."""
    if _is_s3(url):
        return "s3", url.partition("://")[2]
    fs, path = open_file_system(url, options)
    while hasattr(fs, "fs"):  # one that keeps copies of another's files
        fs = fs.fs
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else {*fs.protocol}
    copying_protocols = sorted(protocols & {"file", "s3"})
    return (copying_protocols or sorted(protocols))[0], path


@dataclass(frozen=True, slots=True)
class UrlClaim:
    """A URL below which this process alone writes."""

    _lock: ObjectLock = field(repr=False)

    def check(self) -> None:
        """Raises StoreError if another process was seen to take over. Sends no request: a thread looks regularly."""
        if self._lock.is_lost:
            raise self._lock.taken_over_error()


@api_function
@contextmanager
def claim(url: str, *, storage_options: Mapping[str, Any] | None = None) -> Iterator[UrlClaim]:
    """Hold ``url``, a folder of a store, while the block runs: no other program that asks can hold it too.

    A small object, ``URL/.ckpt-tools-partial/lock``, says who holds it, and is written again every 15 seconds. The
    lock of a process of this machine that has ended is taken over at once, any other after a minute without a sign of
    life. S3 has conditions that decide between two who begin at once; on other stores both may believe to be first.

    Args:
        url: A URL of a store that can be written to, such as ``s3://bucket/run``. Not a local path.
        storage_options: How the store is reached (credentials, ``endpoint_url``). Default: the environment's.

    Returns:
        A context manager that gives a ``UrlClaim``; its ``check()`` raises ``StoreError`` if another process has
        taken over.

    Raises:
        DestinationExistsError: another process holds it.
        StoreError: the store failed.
        UsageError: ``url`` is not a URL of a store that can be written to.

    Example:
        >>> import ckpt_tools
        >>> with ckpt_tools.claim("memory://examples/run") as claim:
        ...     claim.check()
    """
    with ExitStack() as exit_stack:
        with mask_raised_errors():
            lock = _open_lock(url, storage_options or {})
            exit_stack.enter_context(lock.hold())
        yield UrlClaim(lock)


def _open_lock(url: str, options: Mapping[str, Any]) -> ObjectLock:
    """The lock of a folder, not taken yet; nothing is read or written. Raises UsageError."""
    location = open_remote_location(url, options)
    if isinstance(location, S3OutputLocation):
        return location.stage().lock
    if is_hub(url):
        raise UsageError(
            f"{url}: the Hub has no locks; to remove a checkpoint there, run: hf repos delete-files NAME FOLDER/"
        )
    return ObjectLock(FsspecLockObjects(location.fs), f"{location.path}/{PARTIAL_FOLDER_NAME}/lock", url)


def _is_s3(url: str) -> bool:
    return url.startswith("s3://")
