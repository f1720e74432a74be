"""A folder of the local file system.

Reads and writes are positional (``preadv``, ``pwrite``) on descriptors shared by all threads, straight into and out
of the caller's buffers. A new file is allocated in full before the first byte, so that a full disk is known at once
and the file system lays it out in one piece.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.errors import IncompleteError, SourceNotFoundError, StoreError, UnsafeError
from ckpt_tools.stores.base import Buffer, checked_name

MAX_OPEN_FILES = 128
"""Descriptors kept open for reading: far under the usual limit of 1,024, and reopening costs 10 microseconds."""


class _Descriptor:
    """An open file, closed when the last thread lets go of it."""

    __slots__ = ("number",)

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@dataclass(slots=True)
class LocalStore:
    """The files below ``root``; with ``only``, a single one of them."""

    root: Path
    only: str | None = None
    _open: OrderedDict[str, _Descriptor] = field(default_factory=OrderedDict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def url(self) -> str:
        return str(self.root / self.only if self.only else self.root)

    def list(self) -> Mapping[str, int]:
        if self.only is not None:
            path = self.root / self.only
            if not path.is_file():
                raise SourceNotFoundError(f"there is no file {path}")
            return {self.only: path.stat().st_size}
        if not self.root.is_dir():
            raise SourceNotFoundError(f"there is no file or folder {self.root}")
        return dict(self._walk())

    def _walk(self) -> Iterator[tuple[str, int]]:
        for folder, folders, names in os.walk(self.root, onerror=_raise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(folder, name)
                if path.is_file():
                    yield path.relative_to(self.root).as_posix(), path.stat().st_size

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        descriptor = self._descriptor(path)
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(descriptor.number, [buffer[done:]], start + done)
            except OSError as error:
                raise StoreError(f"reading failed: {error.strerror}", path=str(self.root / path)) from error
            if count == 0:
                raise IncompleteError(f"the file ends at byte {start + done:,}", path=str(self.root / path))
            done += count

    def _descriptor(self, path: str) -> _Descriptor:
        with self._lock:
            found = self._open.get(path)
            if found is None:
                found = self._open[path] = self._opened(path)
                if len(self._open) > MAX_OPEN_FILES:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(path)
            return found

    def _opened(self, path: str) -> _Descriptor:
        inside = self.root / checked_name(path)
        if not inside.resolve().is_relative_to(self._confines(path)):
            raise UnsafeError(f"{inside} is a link to a file outside of the checkpoint; it was not opened")
        try:
            return _Descriptor(inside)
        except FileNotFoundError as error:
            raise IncompleteError("this file of the checkpoint is missing", path=str(inside)) from error
        except OSError as error:
            raise StoreError(f"opening failed: {error.strerror}", path=str(inside)) from error

    def _confines(self, path: str) -> Path:
        """The folder that links may lead into: the store, or the blobs of the hub cache that it is a snapshot of.

        A file that the user named may itself be a link.
        """
        if path == self.only:
            return (self.root / path).resolve().parent
        root = self.root.resolve()
        return root.parent.parent if root.parent.name == "snapshots" else root

    def create(self, path: str, size_bytes: int) -> LocalWriter:
        target = self.root / checked_name(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(f"creating failed: {error.strerror}", path=str(target)) from error
        writer = LocalWriter(target, number)
        writer.allocate(size_bytes)
        return writer


def _raise(error: OSError) -> None:
    raise StoreError(f"listing failed: {error.strerror}", path=error.filename) from error


@dataclass(slots=True)
class LocalWriter:
    """A local file being filled."""

    path: Path
    number: int

    def allocate(self, size_bytes: int) -> None:
        """Reserve the whole file; where the file system cannot, only set its size."""
        try:
            if size_bytes:
                os.posix_fallocate(self.number, 0, size_bytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
                os.ftruncate(self.number, size_bytes)
                return
            os.close(self.number)
            raise StoreError(
                f"no room for {size_bytes:,} bytes: {error.strerror}; free some or write elsewhere", path=str(self.path)
            ) from error

    def write_at(self, offset: int, data: Buffer) -> None:
        view = memoryview(data)
        while len(view):
            try:
                count = os.pwrite(self.number, view, offset)
            except OSError as error:
                raise StoreError(f"writing failed: {error.strerror}", path=str(self.path)) from error
            view, offset = view[count:], offset + count

    def close(self, *, fsync: bool) -> None:
        try:
            if fsync:
                os.fsync(self.number)
        except OSError as error:
            raise StoreError(f"writing failed: {error.strerror}", path=str(self.path)) from error
        finally:
            os.close(self.number)
