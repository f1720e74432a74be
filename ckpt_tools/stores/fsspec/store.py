"""Anything that fsspec opens, as a store to read from."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import (
    CkptError,
    IncompleteError,
    SourceNotFoundError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.stores.output_names import split_visible_objects
from ckpt_tools.stores.retry import RetryPolicy, TransientError, host_of, is_transient, retry_transient
from ckpt_tools.stores.source import Store, check_file_name

Result = TypeVar("Result")


_POLICY = RetryPolicy()

NO_RETRY = RetryPolicy(attempts=1)
"""For a call that must not be repeated."""


def is_hub(url: str) -> bool:
    """True for a URL of the Hugging Face Hub."""
    return url.startswith("hf://")


def open_file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of ``url`` and the path in it.

    Raises:
        UsageError: a package that it needs is missing, or the options are not its own.
        UnsupportedError: there is no such scheme.
        StoreError: the file that another scheme reads, as in ``zip://a::b``, cannot be opened.
    """
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url, **options)
    except ImportError as error:
        if is_hub(url):
            raise UsageError(f"{url} needs huggingface_hub: pip install 'ckpt-tools[hub]'") from error
        raise UsageError(f"{url} needs a package that is not installed: {error}") from error
    except TypeError as error:
        raise UsageError(f"{format_option('storage_options')} does not fit: {error}") from error
    except ValueError as error:
        raise UnsupportedError(f"{url}: {error}") from error
    except OSError as error:
        raise StoreError(f"{url}: {error}") from error
    return fs, str(path).rstrip("/")


def call_with_retry(url: str, call: Callable[[], Result], policy: RetryPolicy | None = None) -> Result:
    """Result of ``call`` of a file system, repeated after failures of the network.

    Raises:
        StoreError: it failed. FileNotFoundError is the caller's.
    """

    def attempt() -> Result:
        try:
            return call()
        except CkptError:
            raise
        except Exception as error:
            translated = _translate_error(error, url)
            if translated is error:
                raise
            raise translated from error

    return retry_transient(attempt, policy or _POLICY)


@dataclass(slots=True)
class FsspecStore(Store):
    """The files below ``root`` of a file system; with ``only_file``, a single one of them. ``query`` follows the name
    of a file in a web address: a signature or a token. ``range_options`` are the file system's, for reading a range."""

    fs: Any
    root: str
    only_file: str | None = None
    query: str = field(default="", repr=False)
    range_options: Mapping[str, Any] = field(default_factory=dict)
    _modified_times: dict[str, float] = field(default_factory=dict, repr=False)
    _versions: dict[str, str] = field(default_factory=dict, repr=False)
    _hidden_files: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        return str(self.fs.unstrip_protocol(self._full_path(self.only_file) if self.only_file else self.root))

    def _full_path(self, path: str) -> str:
        return f"{self.root}/{path}{self.query}" if self.root else path

    def list(self) -> Mapping[str, int]:
        try:
            sizes = call_with_retry(self.url, self._list_sizes_once)
        except FileNotFoundError as error:
            raise SourceNotFoundError(f"there is no file or folder {self.url}") from error
        visible, self._hidden_files = split_visible_objects(sizes, self.only_file)
        return visible

    def list_hidden(self) -> Mapping[str, int]:
        """Those of the listing."""
        return self._hidden_files

    def _list_sizes_once(self) -> dict[str, int]:
        self.fs.invalidate_cache()
        if self.only_file is not None:
            infos = {self.only_file: self.fs.info(self._full_path(self.only_file))}
        else:
            listing = self.fs.find(self.root, detail=True)
            infos = {str(path).removeprefix(self.root).lstrip("/"): info for path, info in listing.items()}
        self._modified_times = {name: when for name, info in infos.items() if (when := _time_of(info)) is not None}
        self._versions = {name: _version_of(info) for name, info in infos.items()}
        return {name: size_of_info(info, self.url) for name, info in infos.items()}

    def version(self, path: str) -> str:
        """The version in the listing."""
        return self._versions.get(path, "")

    def modified_time(self, path: str) -> float | None:
        """The time in the listing."""
        return self._modified_times.get(path)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        full_path = self._full_path(check_file_name(path))
        try:
            if len(buffer):
                call_with_retry(full_path, lambda: self._read_once(full_path, start, buffer))
            elif start > size_of_info(call_with_retry(full_path, lambda: self.fs.info(full_path)), full_path):
                raise IncompleteError(f"the file ends before byte {start:,}", path=full_path)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise IncompleteError("this file of the checkpoint is missing", path=full_path) from error

    def _read_once(self, full_path: str, start: int, buffer: memoryview) -> None:
        """fsspec cuts a range at the end of the file, and does not say so."""
        data: bytes = self.fs.cat_file(full_path, start=start, end=start + len(buffer), **self.range_options)
        if len(data) == len(buffer):
            buffer[:] = data
            return
        size = size_of_info(self.fs.info(full_path), full_path)
        if size < start + len(buffer):
            raise IncompleteError(f"the file ends at byte {size:,}", path=full_path)
        if len(data) == size:
            raise StoreError(
                "its server sends the whole file where a part is asked for (it ignores the header Range), so nothing "
                "can be read from it in place; download the file first, or serve it from a server that sends parts",
                path=full_path,
            )
        raise EOFError(f"{len(data):,} bytes were received, but {len(buffer):,} were requested")


def size_of_info(info: Mapping[str, Any], url: str) -> int:
    if info.get("type") == "directory":
        raise FileNotFoundError(url)
    if info.get("size") is None:
        raise StoreError("its service does not say how large it is; download it first", path=url)
    return int(info["size"])


_TIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
"""What file systems call the time at which a file was written; ``created`` is used by stores that never change one."""


_VERSION_KEYS = (
    *("ETag", "etag", "generation", "md5Hash", "content_md5", "Content-MD5", "version_id", "blob_id", "xet_hash"),
    "ino",
)
"""What file systems call a value that changes with the content of a file."""


def _version_of(info: Mapping[str, Any]) -> str:
    """All that identifies the content of a file, as one text; empty if the file system has only its size."""
    identifiers = [str(info[name]) for name in (*_VERSION_KEYS, *_TIME_KEYS) if info.get(name)]
    return " ".join([*identifiers, str(info.get("size"))]) if identifiers else ""


def _time_of(info: Mapping[str, Any]) -> float | None:
    """The time at which the file was written, in seconds since 1970; None if the file system does not give it."""
    modified = next((info[name] for name in _TIME_KEYS if info.get(name)), None)
    if isinstance(modified, str):
        with suppress(ValueError):
            modified = datetime.fromisoformat(modified)
    if isinstance(modified, datetime):
        return modified.timestamp()
    return float(modified) if isinstance(modified, int | float) else None


def open_fsspec_store(url: str, options: Mapping[str, Any]) -> FsspecStore | None:
    """Store at ``url``, a file or a folder; None if nothing exists there.

    Raises:
        StoreError: the service does not answer. Others as ``open_file_system``.
    """
    return open_store_at(*open_file_system(url, options), url)


def open_store_at(fs: Any, path: str, url: str, **range_options: Any) -> FsspecStore | None:
    """Store at ``path`` of a file system, as ``open_fsspec_store``."""
    kind = kind_of_path(fs, path, url)
    if kind == "file":
        address, mark, query = path.partition("?") if path.startswith(("http://", "https://")) else (path, "", "")
        folder, _, name = address.rpartition("/")
        return FsspecStore(fs, folder, name, f"{mark}{query}", range_options)
    return None if kind is None else FsspecStore(fs, path, range_options=range_options)


def kind_of_path(fs: Any, path: str, url: str) -> str | None:
    """``file`` or ``directory``; None where nothing is.

    ``isfile``, ``isdir`` and ``exists`` of fsspec return False if the service does not answer, and ``info`` of some
    services does not find a folder that is only the beginning of other names.

    Raises:
        StoreError: the service does not answer.
    """
    try:
        return str(call_with_retry(url, lambda: fs.info(path))["type"])
    except FileNotFoundError:
        return "directory" if call_with_retry(url, lambda: fs.exists(path)) else None


_HUB_NAME = "the Hugging Face Hub"

_HUB_ACCESS = (
    ". It does not exist, is private, or is gated: log in with `hf auth login` or set HF_TOKEN, and ask for access on "
    "its page"
)

_MISSING_STATUSES = (404, 410)
_REFUSED_STATUSES = (401, 403, 407)


def _translate_error(error: Exception, url: str) -> Exception:
    """An error of fsspec translated to one of ours: a StoreError, or a TransientError around one. A FileNotFoundError
    for a missing file is returned as it is.

    fsspec's HTTP file system turns everything that ``info`` meets, a refused connection too, into FileNotFoundError,
    and keeps what happened as its cause (fsspec 2026.9.0, implementations/http.py ``_info``).
    """
    cause: BaseException = error
    if isinstance(error, FileNotFoundError) and (direct_cause := error.__cause__) is not None:
        cause = direct_cause if _http_status(direct_cause) or _is_network_error(direct_cause) else error
    if isinstance(cause, CkptError):
        return cause
    if status := _http_status(cause):
        return _error_for_status(status, cause, error, url)
    if isinstance(cause, FileNotFoundError | IsADirectoryError):
        return error
    if isinstance(cause, PermissionError | NotImplementedError):
        return StoreError(f"it was refused: {cause or type(cause).__name__}", path=url)
    if not _is_network_error(cause):
        # Each service's library has exceptions of its own, whose meaning is not known here.
        return StoreError(f"it failed: {type(cause).__name__}: {cause}", path=url)
    host = _host_name(url, cause)
    network_error = getattr(cause, "os_error", cause)
    if isinstance(network_error, socket.gaierror) and network_error.errno in _UNKNOWN_HOST_ERRNOS:
        return StoreError(f"there is no host {host}: its name cannot be resolved", path=url)
    store_error = StoreError(f"no answer from {host}: {cause or type(cause).__name__}", path=url)
    return TransientError(store_error, f"no answer from {host} yet")


def _http_status(error: BaseException) -> int:
    """The status of an HTTP answer, as aiohttp's errors have it, or those of httpx and requests; 0 where it is not
    one."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else 0


def _error_for_status(status: int, cause: BaseException, error: Exception, url: str) -> Exception:
    host = _host_name(url, cause)
    if status in _MISSING_STATUSES:
        return error if isinstance(error, FileNotFoundError) else FileNotFoundError(url)
    reason = f"{host} answers {status} {getattr(cause, 'message', '')}".rstrip()
    if is_transient(status, ""):
        return TransientError(StoreError(reason, path=url), f"{host} answers {status}")
    if status in _REFUSED_STATUSES:
        reason = f"access was refused: {reason}{_HUB_ACCESS if host == _HUB_NAME else ''}"
    return StoreError(reason, path=url)


def _host_name(url: str, cause: BaseException) -> str:
    is_of_hub = is_hub(url) or type(cause).__module__.startswith("huggingface_hub")
    return _HUB_NAME if is_of_hub else host_of(url)


def _is_network_error(cause: BaseException) -> bool:
    """Errors of aiohttp and httpx are not all of OSError: a server that hangs up is not. A full disk is one that no
    time mends."""
    if isinstance(cause, OSError) and cause.errno in _PERMANENT_ERRNOS:
        return False
    return isinstance(cause, OSError | EOFError) or type(cause).__module__.startswith(("aiohttp", "httpx"))


_PERMANENT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


_UNKNOWN_HOST_ERRNOS = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""The name service's answer that there is no such name; if it gave no answer, it may do so later."""
