"""Classifies exceptions of fsspec file systems: not found, refused, or worth another attempt.

fsspec's HTTP file system turns everything that ``info`` meets, a refused connection too, into FileNotFoundError, and
keeps what happened as its cause (fsspec 2026.9.0, implementations/http.py ``_info``).
"""

from __future__ import annotations

import socket

from ckpt_tools.errors import CkptError, StoreError, without_secrets
from ckpt_tools.stores.retry import TransientError, host_of, is_transient

_GONE = (404, 410)
_REFUSED = (401, 403, 407)


def judged(error: Exception, url: str) -> Exception:
    """Exception to raise: ``error`` itself if it is a FileNotFoundError for a missing file; else a StoreError, or a
    TransientError with one."""
    cause = _cause(error)
    if isinstance(cause, CkptError):
        return cause
    if status := _status(cause):
        return _answered(status, cause, error, url)
    if isinstance(cause, FileNotFoundError | IsADirectoryError):
        return error
    if isinstance(cause, PermissionError | NotImplementedError):
        return StoreError(f"it was refused: {cause or type(cause).__name__}", path=without_secrets(url))
    if _is_of_network(cause):
        return _unanswered(cause, url)
    # Each service's library has a root of its own; what it means by it cannot be told apart here.
    return StoreError(f"it failed: {type(cause).__name__}: {cause}", path=without_secrets(url))


def _cause(error: Exception) -> BaseException:
    """The first cause of a FileNotFoundError that fsspec made of a failed request; other errors are their own cause."""
    cause = error.__cause__
    if cause is None or not isinstance(error, FileNotFoundError):
        return error
    return cause if _status(cause) or _is_of_network(cause) else error


def _status(error: BaseException) -> int:
    """The status of an HTTP answer; 0 where it is not one."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else 0


def _answered(status: int, cause: BaseException, error: Exception, url: str) -> Exception:
    host = host_of(url)
    if status in _GONE:
        return error if isinstance(error, FileNotFoundError) else FileNotFoundError(without_secrets(url))
    reason = f"{host} answers {status} {getattr(cause, 'message', '')}".rstrip()
    if is_transient(status, ""):
        return TransientError(StoreError(reason, path=without_secrets(url)), f"{host} answers {status}")
    if status in _REFUSED:
        return StoreError(f"access was refused: {reason}", path=without_secrets(url))
    return StoreError(reason, path=without_secrets(url))


def _is_of_network(cause: BaseException) -> bool:
    """aiohttp's errors are not all of OSError: a server that hangs up is not."""
    return isinstance(cause, OSError | EOFError) or type(cause).__module__.startswith("aiohttp")


def _unanswered(cause: BaseException, url: str) -> Exception:
    host = host_of(url)
    if _is_unknown_host(cause):
        return StoreError(f"there is no host {host}: its name cannot be resolved", path=without_secrets(url))
    failed = StoreError(f"no answer from {host}: {cause or type(cause).__name__}", path=without_secrets(url))
    return TransientError(failed, f"no answer from {host} yet")


def _is_unknown_host(cause: BaseException) -> bool:
    """The name service answered that there is no such name; where it did not answer, it may later."""
    found = getattr(cause, "os_error", cause)
    return isinstance(found, socket.gaierror) and found.errno in (socket.EAI_NONAME, _EAI_NODATA)


_EAI_NODATA = getattr(socket, "EAI_NODATA", socket.EAI_NONAME)
