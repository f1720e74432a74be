"""The public ``claim``: the lock that ``convert`` takes on a URL, for other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.arguments import api_function
from ckpt_tools.credentials import mask_raised_errors
from ckpt_tools.errors import CkptError
from ckpt_tools.stores.remote import lock_of_url
from ckpt_tools.stores.s3.lock import ObjectLock


@dataclass(frozen=True, slots=True)
class UrlClaim:
    """A URL below which this process alone writes."""

    _lock: ObjectLock = field(repr=False)

    def check(self) -> None:
        """Raises StoreError if another process was seen to take over. Costs nothing: a thread looks."""
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
    with mask_raised_errors():
        lock = lock_of_url(url, storage_options or {})
        lock.acquire_lock()
    try:
        with lock.keep_alive():
            yield UrlClaim(lock)
    finally:
        with suppress(CkptError):
            lock.release_lock()
