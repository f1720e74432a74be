"""A folder of the local file system.

Reads and writes are positional (``preadv``, ``pwrite``) on descriptors shared by all threads, straight into and out of
the caller's buffers. A new file is allocated in full before the first byte, so that a full disk is known at once and
the file system can keep it contiguous.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.errors import IncompleteError, SourceNotFoundError, StoreError, UnsafeError
from ckpt_tools.stores.marker_files import is_shown
from ckpt_tools.stores.source import Buffer, FillableStore, checked_name

MAX_OPEN_FILES = 128
"""Descriptors kept open for reading: far under the usual limit of 1,024, and reopening costs 10 microseconds."""


WRITE_BYTES = 512 << 10
"""Most bytes of one system call.

ext4 takes its page cache in pieces as large as the call and its alignment allow, and where memory is in pieces the
largest cost more than all copying. 4.2 GB by a C program of 2 threads, calls that straddle their alignment, medians of
6 on a machine that had worked for ten hours, where ``cp -r`` took 1.10 s: 2.60 s by 1 MiB (0.72 s when it was fresh),
0.73 s by 512 KiB, 1.08 s by 256 and 128 KiB. Calls of 1 MiB aligned to it took 6.3 s."""

_STRADDLE_BYTES = 4 << 10
"""Offset of the end of each call from a multiple of ``WRITE_BYTES``: one page."""


@contextmanager
def reporting(what: str, path: str | Path | None) -> Iterator[None]:
    """Raises StoreError for an OSError within; without a ``path``, of the file that the error names."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {error.strerror}", path=str(path or error.filename)) from error


class _Descriptor:
    """An open file, closed when the last thread lets go of it."""

    __slots__ = ("number", "path")

    def __init__(self, path: Path) -> None:
        """Raises OSError, FileNotFoundError also for what is no regular file: opening a pipe would wait forever."""
        self.path = path
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(self.number).st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def __del__(self) -> None:
        """Nothing was written, so an error of closing loses nothing; raised here, it would only be printed."""
        if hasattr(self, "number"):
            with suppress(OSError):
                os.close(self.number)


@dataclass(slots=True)
class LocalStore(FillableStore):
    """The files below ``root``; with ``only``, a single one of them.

    With ``replaces``, a new file replaces an old one of its name, which a killed run left. With ``fsync``, a file is on
    the disk once it is closed.
    """

    root: Path
    only: str | None = None
    replaces: bool = False
    fsync: bool = False
    _open: OrderedDict[str, _Descriptor] = field(default_factory=OrderedDict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def url(self) -> str:
        return str(self.root / self.only if self.only else self.root)

    def list(self) -> Mapping[str, int]:
        with reporting("listing failed", None):
            return dict(self._walk() if self.only is None else self._single(self.only))

    def _single(self, name: str) -> Iterator[tuple[str, int]]:
        path = self.root / name
        if not path.is_file():
            raise SourceNotFoundError(f"there is no file {path}")
        yield name, path.stat().st_size

    def hidden(self) -> Mapping[str, int]:
        if self.only is not None:
            return {}
        with reporting("listing failed", None):
            return {path: size for path, size in self._walk(with_hidden=True) if not is_shown(path)}

    def _walk(self, *, with_hidden: bool = False) -> Iterator[tuple[str, int]]:
        if not self.root.is_dir():
            raise SourceNotFoundError(f"there is no folder {self.root}")
        for folder, folders, names in os.walk(self.root, onerror=_raise):
            folders[:] = [name for name in folders if with_hidden or not name.startswith(".")]
            for name in names:
                path = Path(folder, name)
                if path.is_file():
                    yield path.relative_to(self.root).as_posix(), path.stat().st_size

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        descriptor = self._descriptor(path)
        done = 0
        with reporting("reading failed", descriptor.path):
            while done < len(buffer):
                count = os.preadv(descriptor.number, [buffer[done:]], start + done)
                if count == 0:
                    raise IncompleteError(f"the file ends at byte {start + done:,}", path=str(descriptor.path))
                done += count

    def size(self, path: str) -> int:
        descriptor = self._descriptor(path)
        with reporting("reading the file's size failed", descriptor.path):
            return os.fstat(descriptor.number).st_size

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
        with _needing(inside, "opening failed"):
            return _Descriptor(inside)

    def _confines(self, path: str) -> Path:
        """The folder that links may lead into: the store, or the blobs of the hub cache that it is a snapshot of.

        A file that the user named may itself be a link.
        """
        if path == self.only:
            return _resolved(self.root / path).parent
        root = _resolved(self.root)
        return root.parent.parent if root.parent.name == "snapshots" else root

    def version(self, path: str) -> str:
        """When the file was last written and changed, its inode and its size. ``cp -p`` and ``rsync -t`` set the time
        of writing, and cannot set that of the change."""
        file = self.root / checked_name(path)
        with _needing(file, "reading the file's size failed"):
            found = file.stat()
            return f"{found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino} {found.st_size}"

    def changed(self, path: str) -> float | None:
        file = self.root / checked_name(path)
        with _needing(file, "reading the file's time failed"):
            return file.stat().st_ctime

    def modified(self, path: str) -> float | None:
        file = self.root / checked_name(path)
        with reporting("reading the file's time failed", file), suppress(FileNotFoundError):
            return file.stat().st_mtime
        return None

    def check_room(self, num_bytes: int) -> None:
        """Like ``FillableStore.check_room``, so that a conversion that cannot end is not begun."""
        free = math.inf
        with suppress(OSError):  # creating the first file says why
            free = _free_bytes(os.statvfs(self.root))
        if num_bytes > free:
            raise StoreError(
                f"there is no room for the output: it needs {num_bytes:,} bytes, and {int(free):,} are free; "
                "free some space or write elsewhere",
                path=str(self.root),
            )

    def create(self, path: str, size_bytes: int) -> LocalWriter:
        target = self.root / checked_name(path)
        with reporting("creating failed", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if self.replaces:
                target.unlink(missing_ok=True)
                with self._lock:
                    self._open.pop(path, None)  # or it would keep the removed file's room
            number = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        writer = LocalWriter(target, number, self.fsync)
        writer.allocate(size_bytes)
        return writer

    def reopen(self, path: str) -> LocalWriter:
        target = self.root / checked_name(path)
        with reporting("opening failed", target):
            return LocalWriter(target, os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), self.fsync)

    def __reduce__(self) -> tuple[object, ...]:
        return LocalStore, (self.root, self.only, self.replaces, self.fsync)


@contextmanager
def _needing(file: Path, what: str) -> Iterator[None]:
    """``reporting``, with IncompleteError if there is no such file."""
    try:
        with reporting(what, file):
            yield
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise IncompleteError("this file of the checkpoint is missing", path=str(file)) from error.__cause__
        raise


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
    fsync: bool = False

    def allocate(self, size_bytes: int) -> None:
        """Reserve the whole file; where the file system cannot, only set its size.

        Raises:
            StoreError: there is no room; the file is closed. ext4 would take all that is left before it says so, and
            others who write there would fail meanwhile, so that the room is looked up first.
        """
        try:
            if size_bytes > _free_bytes(os.fstatvfs(self.number)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if size_bytes:
                _reserve(self.number, size_bytes)
        except OSError as error:
            os.close(self.number)
            raise StoreError(
                f"there is no room for {size_bytes:,} bytes: {error.strerror}; free some space or write elsewhere",
                path=str(self.path),
            ) from error

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of ``data``; with ``fsync`` the disk begins with it at once. Raises StoreError."""
        view, position = memoryview(data), offset
        with reporting("writing failed", self.path):
            while len(view):
                num_bytes = WRITE_BYTES - (position - _STRADDLE_BYTES) % WRITE_BYTES
                count = os.pwrite(self.number, view[:num_bytes], position)
                view, position = view[count:], position + count
            if self.fsync:
                _send_to_disk(self.number, offset, len(data))

    def close(self) -> None:
        """Raises StoreError if the bytes did not reach the disk, which network file systems report only here."""
        with reporting("writing failed", self.path):
            try:
                if self.fsync:
                    os.fsync(self.number)
            finally:
                os.close(self.number)

    def abandon(self) -> None:
        """Like ``close``, without waiting for the disk."""
        with reporting("writing failed", self.path):
            os.close(self.number)


def _free_bytes(room: os.statvfs_result) -> float:
    """Bytes that this process may still write; a file system without a size does not say."""
    return room.f_bavail * room.f_frsize if room.f_blocks else math.inf


def _send_to_disk(number: int, start: int, num_bytes: int) -> None:
    """Begin to write these bytes out, and do not wait.

    Linux does so when it is told that dirty pages are not needed, and keeps them while it writes. Otherwise it begins
    at a tenth of the memory, or with fsync. 4.2 GB by a C program of 2 threads, with fsync at the end: 1.76 s, and so
    1.32 s, where ``cp -r`` and fsync took 1.95 s.
    """
    with suppress(OSError):
        os.posix_fadvise(number, start, num_bytes, os.POSIX_FADV_DONTNEED)


def _reserve(number: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(number, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
            raise
        os.ftruncate(number, size_bytes)
