"""A folder of the local file system.

Reads and writes are positional (``preadv``, ``pwrite``) on descriptors shared by all threads, straight into and out
of the caller's buffers. A new file is allocated in full before the first byte, so that a full disk is known at once
and the file system lays it out in one piece.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.errors import IncompleteError, SourceNotFoundError, StoreError, UnsafeError
from ckpt_tools.stores.base import Buffer, checked_name

MAX_OPEN_FILES = 128
"""Descriptors kept open for reading: far under the usual limit of 1,024, and reopening costs 10 microseconds."""


WRITE_BYTES = 1 << 20
"""Most bytes of one system call.

ext4 takes its page cache in pieces as large as the call and its alignment allow, and the largest cost more than all
copying. Medians of 3 for 4.2 GB by 2 threads, where ``cp -r`` took 1.03 s: 6.3 s by calls of 1 MiB aligned to it,
1.74 s by 2 MiB, 0.72 s by 1 MiB that straddle their alignment, 0.78 s by 512 KiB, 0.99 s by 256 KiB. Sizes of reads
and of buffers made less difference."""

_STRADDLE_BYTES = 4 << 10
"""How far beyond a multiple of ``WRITE_BYTES`` each call ends: one page."""


class _Descriptor:
    """An open file, closed when the last thread lets go of it."""

    __slots__ = ("number",)

    def __init__(self, path: Path) -> None:
        """Raises OSError, FileNotFoundError also for what is no regular file: opening a pipe would wait forever."""
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(self.number).st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@dataclass(slots=True)
class LocalStore:
    """The files below ``root``; with ``only``, a single one of them.

    With ``replaces``, a file of the name of a new one goes: a killed run left it.
    """

    root: Path
    only: str | None = None
    replaces: bool = False
    _open: OrderedDict[str, _Descriptor] = field(default_factory=OrderedDict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def url(self) -> str:
        return str(self.root / self.only if self.only else self.root)

    def list(self) -> Mapping[str, int]:
        try:
            return dict(self._walk() if self.only is None else self._single(self.only))
        except OSError as error:
            raise StoreError(f"listing failed: {error.strerror}", path=error.filename) from error

    def _single(self, name: str) -> Iterator[tuple[str, int]]:
        path = self.root / name
        if not path.is_file():
            raise SourceNotFoundError(f"there is no file {path}")
        yield name, path.stat().st_size

    def _walk(self) -> Iterator[tuple[str, int]]:
        if not self.root.is_dir():
            raise SourceNotFoundError(f"there is no folder {self.root}")
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
        if not _resolved(inside).is_relative_to(self._confines(path)):
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
            return _resolved(self.root / path).parent
        root = _resolved(self.root)
        return root.parent.parent if root.parent.name == "snapshots" else root

    def version(self, path: str) -> str:
        """When the file was last written, and its size."""
        try:
            found = (self.root / checked_name(path)).stat()
        except FileNotFoundError as error:
            raise IncompleteError("this file of the checkpoint is missing", path=str(self.root / path)) from error
        except OSError as error:
            raise StoreError(f"looking failed: {error.strerror}", path=str(self.root / path)) from error
        return f"{found.st_mtime_ns} {found.st_size}"

    def create(self, path: str, size_bytes: int) -> LocalWriter:
        target = self.root / checked_name(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if self.replaces:
                target.unlink(missing_ok=True)
                with self._lock:
                    self._open.pop(path, None)  # or it would keep the removed file's room
            number = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(f"creating failed: {error.strerror}", path=str(target)) from error
        writer = LocalWriter(target, number)
        writer.allocate(size_bytes)
        return writer

    def reopen(self, path: str) -> LocalWriter:
        target = self.root / checked_name(path)
        try:
            return LocalWriter(target, os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except OSError as error:
            raise StoreError(f"opening failed: {error.strerror}", path=str(target)) from error

    def __reduce__(self) -> tuple[object, ...]:
        """In another process: the same folder, no file open."""
        return LocalStore, (self.root, self.only, self.replaces)


def _raise(error: OSError) -> None:
    raise error


def _resolved(path: Path) -> Path:
    """The path without links. ``Path.resolve`` raises RuntimeError for links in a circle; opening them, an OSError."""
    return Path(os.path.realpath(path))


@dataclass(slots=True)
class LocalWriter:
    """A local file being filled."""

    path: Path
    number: int

    def allocate(self, size_bytes: int) -> None:
        """Reserve the whole file; where the file system cannot, only set its size.

        Raises:
            StoreError: there is no room; the file is closed. ext4 would take all that is left before it says so, and
            others who write there would fail meanwhile, so that the room is looked up first.
        """
        try:
            room = os.fstatvfs(self.number)
            if room.f_blocks and size_bytes > room.f_bavail * room.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if size_bytes:
                _reserve(self.number, size_bytes)
        except OSError as error:
            os.close(self.number)
            raise StoreError(
                f"no room for {size_bytes:,} bytes: {error.strerror}; free some or write elsewhere", path=str(self.path)
            ) from error

    def write_at(self, offset: int, data: Buffer) -> None:
        view = memoryview(data)
        while len(view):
            try:
                count = os.pwrite(self.number, view[: _until_next_call(offset)], offset)
            except OSError as error:
                raise StoreError(f"writing failed: {error.strerror}", path=str(self.path)) from error
            view, offset = view[count:], offset + count

    def close(self, *, fsync: bool) -> None:
        """Raises StoreError: what was written did not reach the disk, which network file systems say only here."""
        try:
            if fsync:
                os.fsync(self.number)
        except OSError as error:
            os.close(self.number)
            raise StoreError(f"writing failed: {error.strerror}", path=str(self.path)) from error
        try:
            os.close(self.number)
        except OSError as error:
            raise StoreError(f"writing failed: {error.strerror}", path=str(self.path)) from error


def _until_next_call(offset: int) -> int:
    return WRITE_BYTES - (offset - _STRADDLE_BYTES) % WRITE_BYTES


def _reserve(number: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(number, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
            raise
        os.ftruncate(number, size_bytes)
