"""A folder of the local file system.

Reads and writes are positional (``preadv``, ``pwrite``) on descriptors shared by all threads, straight into and out of
the caller's buffers, through the page cache or past it (``direct``). A new file is allocated in full before the first
byte, so that a full disk is known at once and the file system can keep it contiguous.
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
from ckpt_tools.stores.output_names import is_visible_file
from ckpt_tools.stores.source import Buffer, FillableStore, check_file_name

MAX_OPEN_FILES = 128
"""Descriptors kept open for reading: far under the usual limit of 1,024, and reopening costs 10 microseconds."""


WRITE_BYTES = 512 << 10
"""Most bytes of one system call.

ext4 takes its page cache in pieces as large as the call and its alignment allow, and where memory is in pieces the
largest cost more than all copying. 4.2 GB by a C program of 2 threads, calls that straddle their alignment, medians of
6 on a machine that had worked for ten hours, where ``cp -r`` took 1.10 s: 2.60 s by 1 MiB (0.72 s when it was fresh),
0.73 s by 512 KiB, 1.08 s by 256 and 128 KiB. Calls of 1 MiB aligned to it took 6.3 s."""

_WRITE_END_OFFSET = 4 << 10
"""Offset of the end of each call from a multiple of ``WRITE_BYTES``: one page."""


@contextmanager
def wrap_os_errors(failure: str, path: str | Path | None) -> Iterator[None]:
    """Raises StoreError for an OSError within, about ``path`` or, if that is None, the file that the error names."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{failure}: {error.strerror}", path=str(path or error.filename)) from error


class _OpenFile:
    """An open file, closed when the last thread lets go of it."""

    __slots__ = ("direct_number", "number", "path")

    def __init__(self, path: Path) -> None:
        """Raises OSError, FileNotFoundError also for what is no regular file: opening a pipe would wait forever."""
        self.path = path
        self.direct_number: int | None = None
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(self.number).st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def __del__(self) -> None:
        """Nothing was written, so an error of closing loses nothing; raised here, it would only be printed."""
        for number in (getattr(self, "number", None), self.direct_number):
            if number is not None:
                with suppress(OSError):
                    os.close(number)


@dataclass(slots=True)
class LocalStore(FillableStore):
    """The files below ``root``; with ``only_file``, a single one of them.

    With ``replaces_existing``, a new file replaces an old one of its name, which a killed run left. With ``fsync``, a
    file is on the disk once it is closed. With ``is_direct``, large reads and writes pass the page cache.
    """

    root: Path
    only_file: str | None = None
    replaces_existing: bool = False
    fsync: bool = False
    is_direct: bool = False
    _open_files: OrderedDict[str, _OpenFile] = field(default_factory=OrderedDict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def url(self) -> str:
        return str(self.root / self.only_file if self.only_file else self.root)

    def list(self) -> Mapping[str, int]:
        with wrap_os_errors("listing failed", None):
            if self.only_file is None:
                return dict(self._walk_files())
            path = self.root / self.only_file
            if not path.is_file():
                raise SourceNotFoundError(f"there is no file {path}")
            return {self.only_file: path.stat().st_size}

    def list_hidden(self) -> Mapping[str, int]:
        if self.only_file is not None:
            return {}
        with wrap_os_errors("listing failed", None):
            return {path: size for path, size in self._walk_files(with_hidden=True) if not is_visible_file(path)}

    def _walk_files(self, *, with_hidden: bool = False) -> Iterator[tuple[str, int]]:
        if not self.root.is_dir():
            raise SourceNotFoundError(f"there is no folder {self.root}")
        for folder, folders, names in os.walk(self.root, onerror=_raise_error):
            folders[:] = [name for name in folders if with_hidden or not name.startswith(".")]
            for name in names:
                path = Path(folder, name)
                if path.is_file():
                    yield path.relative_to(self.root).as_posix(), path.stat().st_size

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        descriptor = self._get_descriptor(path)
        with wrap_os_errors("reading failed", descriptor.path):
            bytes_read = self._try_read_direct(descriptor, start, buffer) if self.is_direct else 0
            while bytes_read < len(buffer):
                count = os.preadv(descriptor.number, [buffer[bytes_read:]], start + bytes_read)
                if count == 0:
                    raise IncompleteError(f"the file ends at byte {start + bytes_read:,}", path=str(descriptor.path))
                bytes_read += count

    def _try_read_direct(self, file: _OpenFile, start: int, buffer: memoryview) -> int:
        """Bytes that were read past the page cache: none of a short range, or of one that is in it."""
        from ckpt_tools.stores.local import direct

        if len(buffer) < direct.MIN_READ_BYTES or direct.is_in_page_cache(file.number, start, len(buffer)):
            return 0
        with self._lock:
            if file.direct_number is None:
                file.direct_number = direct.open_direct(file.path, os.O_RDONLY)
                self.is_direct = file.direct_number is not None
        return 0 if file.direct_number is None else direct.read_direct(file.direct_number, start, buffer)

    def bypass_page_cache(self) -> None:
        self.is_direct = True

    def size(self, path: str) -> int:
        descriptor = self._get_descriptor(path)
        with wrap_os_errors("reading the file's size failed", descriptor.path):
            return os.fstat(descriptor.number).st_size

    def _get_descriptor(self, path: str) -> _OpenFile:
        with self._lock:
            descriptor = self._open_files.get(path)
            if descriptor is None:
                descriptor = self._open_files[path] = self._open_descriptor(path)
                if len(self._open_files) > MAX_OPEN_FILES:
                    self._open_files.popitem(last=False)
            else:
                self._open_files.move_to_end(path)
            return descriptor

    def _open_descriptor(self, path: str) -> _OpenFile:
        full_path = self.root / check_file_name(path)
        # A file that the user named may itself be a link. Others may lead into the store, or, where the store is a
        # snapshot in the hub's cache, into the blobs beside its snapshots.
        if path != self.only_file:
            allowed_root = _real_path(self.root)
            if allowed_root.parent.name == "snapshots":
                allowed_root = allowed_root.parent.parent
            if not _real_path(full_path).is_relative_to(allowed_root):
                raise UnsafeError(f"{full_path} is a link to a file outside of the checkpoint; it was not opened")
        with _wrap_missing_file(full_path, "opening failed"):
            return _OpenFile(full_path)

    def version(self, path: str) -> str:
        """The file's time of writing, time of change, inode and size. ``cp -p`` and ``rsync -t`` set the time of
        writing, and cannot set that of the change."""
        file = self.root / check_file_name(path)
        with _wrap_missing_file(file, "reading the file's size failed"):
            status = file.stat()
            return f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino} {status.st_size}"

    def changed_time(self, path: str) -> float | None:
        file = self.root / check_file_name(path)
        with _wrap_missing_file(file, "reading the file's time failed"):
            return file.stat().st_ctime

    def modified_time(self, path: str) -> float | None:
        file = self.root / check_file_name(path)
        with wrap_os_errors("reading the file's time failed", file), suppress(FileNotFoundError):
            return file.stat().st_mtime
        return None

    def check_free_space(self, num_bytes: int) -> None:
        """Like ``FillableStore.check_free_space``, so that a conversion that cannot end is not begun."""
        free_bytes = math.inf
        with suppress(OSError):  # creating the first file says why
            free_bytes = _free_bytes(os.statvfs(self.root))
        if num_bytes > free_bytes:
            raise StoreError(
                f"there is no room for the output: it needs {num_bytes:,} bytes, and {int(free_bytes):,} are free; "
                "free some space or write elsewhere",
                path=str(self.root),
            )

    def create(self, path: str, size_bytes: int) -> LocalFileWriter:
        target = self.root / check_file_name(path)
        with wrap_os_errors("creating failed", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if self.replaces_existing:
                target.unlink(missing_ok=True)
                with self._lock:
                    self._open_files.pop(path, None)  # or it would keep the removed file's room
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        writer = LocalFileWriter(target, descriptor, self.fsync)
        writer.allocate_space(size_bytes)
        return self.open_direct_writer(writer, size_bytes)

    def reopen(self, path: str) -> LocalFileWriter:
        target = self.root / check_file_name(path)
        with wrap_os_errors("opening failed", target):
            writer = LocalFileWriter(target, os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), self.fsync)
            return self.open_direct_writer(writer, os.fstat(writer.descriptor).st_size)

    def open_direct_writer(self, writer: LocalFileWriter, size_bytes: int) -> LocalFileWriter:
        if not self.is_direct:
            return writer
        from ckpt_tools.stores.local import direct

        if size_bytes >= direct.MIN_WRITE_BYTES:
            with wrap_os_errors("opening failed", writer.path):
                writer.direct_descriptor = direct.open_direct(writer.path, os.O_WRONLY | os.O_NOFOLLOW)
            self.is_direct = writer.direct_descriptor is not None
        return writer

    def __reduce__(self) -> tuple[object, ...]:
        return LocalStore, (self.root, self.only_file, self.replaces_existing, self.fsync, self.is_direct)


@contextmanager
def _wrap_missing_file(file: Path, failure: str) -> Iterator[None]:
    """``wrap_os_errors``, with IncompleteError if there is no such file."""
    try:
        with wrap_os_errors(failure, file):
            yield
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise IncompleteError("this file of the checkpoint is missing", path=str(file)) from error.__cause__
        raise


def _raise_error(error: OSError) -> None:
    raise error


def _real_path(path: Path) -> Path:
    """The path without links. ``Path.resolve`` raises RuntimeError for links in a circle; opening them, an OSError."""
    return Path(os.path.realpath(path))


@dataclass(slots=True)
class LocalFileWriter:
    """A local file being filled."""

    path: Path
    descriptor: int
    fsync: bool = False
    direct_descriptor: int | None = None

    def allocate_space(self, size_bytes: int) -> None:
        """Reserve the whole file; where the file system cannot, only set its size.

        Raises:
            StoreError: there is no room; the file is closed. ext4 would take all that is left before it says so, and
            others who write there would fail meanwhile, so that the room is looked up first.
        """
        try:
            if size_bytes > _free_bytes(os.fstatvfs(self.descriptor)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if size_bytes:
                _reserve_space(self.descriptor, size_bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise StoreError(
                f"there is no room for {size_bytes:,} bytes: {error.strerror}; free some space or write elsewhere",
                path=str(self.path),
            ) from error

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of ``data``; with ``fsync`` the disk begins with it at once. Raises StoreError."""
        view = memoryview(data)
        with wrap_os_errors("writing failed", self.path):
            if self.direct_descriptor is None:
                self._write_buffered(offset, view)
                if self.fsync:
                    _start_writeback(self.descriptor, offset, len(data))
                return
            self._write_direct(self.direct_descriptor, offset, view)

    def _write_direct(self, descriptor: int, offset: int, view: memoryview) -> None:
        from ckpt_tools.stores.local import direct

        first, stop = direct.find_whole_blocks(view, offset)
        stop = first + direct.write_direct(descriptor, view[first:stop], offset + first)
        self._write_buffered(offset, view[:first])
        self._write_buffered(offset + stop, view[stop:])

    def _write_buffered(self, position: int, view: memoryview) -> None:
        while len(view):
            num_bytes = WRITE_BYTES - (position - _WRITE_END_OFFSET) % WRITE_BYTES
            count = os.pwrite(self.descriptor, view[:num_bytes], position)
            view, position = view[count:], position + count

    def close(self) -> None:
        """Raises StoreError if the bytes did not reach the disk, which network file systems report only here.

        A file that was written directly is synced in any case, which takes no time. Its pages in the cache are given
        up then: one that spans blocks which were written past it may have old bytes of them.
        """
        with wrap_os_errors("writing failed", self.path):
            try:
                if self.fsync or self.direct_descriptor is not None:
                    os.fsync(self.descriptor)
                if self.direct_descriptor is not None:
                    _start_writeback(self.descriptor, 0, 0)
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Like ``close``, without waiting for the disk."""
        with wrap_os_errors("writing failed", self.path):
            if self.direct_descriptor is not None:
                os.close(self.direct_descriptor)
            os.close(self.descriptor)


def _free_bytes(file_system_status: os.statvfs_result) -> float:
    """Bytes that this process may still write; a file system without a size does not say."""
    return file_system_status.f_bavail * file_system_status.f_frsize if file_system_status.f_blocks else math.inf


def _start_writeback(descriptor: int, start: int, num_bytes: int) -> None:
    """Begin to write these bytes out, and do not wait.

    Linux does so when it is told that dirty pages are not needed, and keeps them while it writes. Otherwise it begins
    at a tenth of the memory, or with fsync. 4.2 GB by a C program of 2 threads, with fsync at the end: 1.76 s, and so
    1.32 s, where ``cp -r`` and fsync took 1.95 s.
    """
    with suppress(OSError):
        os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)


def _reserve_space(descriptor: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
            raise
        os.ftruncate(descriptor, size_bytes)
