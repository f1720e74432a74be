"""Interface of stores, and a source as a reader sees it.

A store knows files by relative names, moves bytes exactly, and confines itself: a name that leaves the store is always
refused. It knows nothing of formats, staging or retries.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Protocol, TypeVar

from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import IncompleteError, MalformedError, UnsafeError

Buffer = bytes | bytearray | memoryview
Item = TypeVar("Item")
Result = TypeVar("Result")

_LARGE_BYTES = 1 << 20
"""Size from which a copy costs more memory than a second code path costs time."""


@dataclass(frozen=True, slots=True)
class CopySource:
    """A file as its service knows it, which can copy between its own files.

    ``service`` is equal for two files of one service; ``version`` changes when the file is written again.
    """

    service: Hashable
    name: str
    version: str


class Store(ABC):
    """A folder of files, local or remote. A store inherits it, and overrides its abilities beyond listing and reading.

    Callers use any of its methods without asking which kind it is.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def url(self) -> str:
        """URL of the store, for messages."""

    @abstractmethod
    def list(self) -> Mapping[str, int]:
        """Every file below the store by relative name, and its bytes. Raises SourceNotFoundError, StoreError."""

    @abstractmethod
    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``path`` from ``start``.

        Raises:
            IncompleteError: the file is missing or ends early.
            StoreError: reading failed.
        """

    def size(self, path: str) -> int:
        """Bytes of ``path``. Raises IncompleteError, StoreError: as ``read_into``."""
        return Source(self, self.list()).size(path)

    def version(self, path: str) -> str:
        """A text that changes if the file is written again; empty if the store cannot tell.

        Raises:
            IncompleteError, StoreError: as ``read_into``.
        """
        return ""

    def modified_time(self, path: str) -> float | None:
        """When a file that was listed was last written, in seconds since 1970; None if the store cannot tell.

        Raises:
            StoreError: looking failed.
        """
        return None

    def changed_time(self, path: str) -> float | None:
        """When a file was last written, renamed or given other times, in seconds since 1970 by the clock of the file
        system; None if the store cannot tell.

        Raises:
            IncompleteError, StoreError: as ``read_into``.
        """
        return None

    def list_hidden(self) -> Mapping[str, int]:
        """Files in hidden folders, which ``list`` leaves out, by name with their bytes. Raises as ``list``."""
        return {}

    def find_copy_source(self, path: str) -> CopySource | None:
        """The file as a service knows it that copies between its own files; None if there is no such service."""
        return None

    def count_stored_bytes(self, path: str, num_bytes: int) -> int:
        """Bytes of stored files that a read of ``num_bytes`` takes: other than these if the file is made as it is
        read."""
        return num_bytes

    def try_read_as(self, path: str, first: int, last: int, dtype: DType, out: memoryview) -> bool:
        """Fill ``out`` with elements ``[first, last)`` of a file that is made as it is read, as ``dtype``.

        Returns False, and does nothing, if the caller has to read and cast them.

        Raises:
            IncompleteError, StoreError: as ``read_into``.
        """
        return False

    def bypass_page_cache(self) -> None:  # noqa: B027 - only local files have one
        """From now on, move large ranges between disk and memory without keeping them in the system's page cache."""

    def prefetch(self, path: str, start: int, stop: int) -> None:  # noqa: B027 - nothing to do is the default
        """This thread is about to read most of these bytes: a distant store may read them at once.

        Raises:
            IncompleteError, StoreError: as ``read_into``.
        """

    def map_files(self, read: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Results of ``read``, which reads from this store, for each item in order. A distant store calls it in several
        threads. Raises what ``read`` raises first."""
        return map(read, items)


class StoreWrapper(Store):
    """A store in front of ``store``, to which it forwards everything. A wrapper overrides methods, or
    ``_resolve_file`` where files have other names or stores."""

    __slots__ = ()
    store: Store

    def _resolve_file(self, path: str) -> tuple[Store, str]:
        """The store that holds ``path``, and its name there."""
        return self.store, path

    @property
    def url(self) -> str:
        return self.store.url

    def list(self) -> Mapping[str, int]:
        return self.store.list()

    def list_hidden(self) -> Mapping[str, int]:
        return self.store.list_hidden()

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        store, name = self._resolve_file(path)
        store.read_into(name, start, buffer)

    def size(self, path: str) -> int:
        store, name = self._resolve_file(path)
        return store.size(name)

    def version(self, path: str) -> str:
        store, name = self._resolve_file(path)
        return store.version(name)

    def modified_time(self, path: str) -> float | None:
        store, name = self._resolve_file(path)
        return store.modified_time(name)

    def changed_time(self, path: str) -> float | None:
        store, name = self._resolve_file(path)
        return store.changed_time(name)

    def find_copy_source(self, path: str) -> CopySource | None:
        store, name = self._resolve_file(path)
        return store.find_copy_source(name)

    def count_stored_bytes(self, path: str, num_bytes: int) -> int:
        store, name = self._resolve_file(path)
        return store.count_stored_bytes(name, num_bytes)

    def try_read_as(self, path: str, first: int, last: int, dtype: DType, out: memoryview) -> bool:
        store, name = self._resolve_file(path)
        return store.try_read_as(name, first, last, dtype, out)

    def bypass_page_cache(self) -> None:
        self.store.bypass_page_cache()

    def prefetch(self, path: str, start: int, stop: int) -> None:
        store, name = self._resolve_file(path)
        store.prefetch(name, start, stop)

    def map_files(self, read: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return self.store.map_files(read, items)


class FileWriter(Protocol):
    """An output file being filled; positions may come in any order and from any thread."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at ``offset``. Raises StoreError."""

    def close(self) -> None:
        """The file is complete. Raises StoreError."""

    def abandon(self) -> None:
        """Close the file without checks. Raises StoreError."""


class FillableStore(Store):
    """A store whose files take bytes at any position: a local folder, or memory, but no object store."""

    __slots__ = ()

    def check_free_space(self, num_bytes: int) -> None:
        """Raises StoreError if new files of so many bytes in all do not fit."""

    @abstractmethod
    def create(self, path: str, size_bytes: int) -> FileWriter:
        """A new file of exactly ``size_bytes``. Raises StoreError, for example where the disk is full."""

    @abstractmethod
    def reopen(self, path: str) -> FileWriter:
        """A file that was created before, to continue writing. Raises StoreError."""


def check_file_name(path: str) -> str:
    """``path`` if it is a plain relative name that stays inside a store.

    Raises:
        UnsafeError: it is absolute, climbs out, is a URL, names a drive, holds a NUL or a backslash, or cannot be
        encoded as a file name.
    """
    parts = PurePosixPath(path).parts
    is_unsafe = (
        not parts
        or path.startswith("/")
        or ".." in parts
        or any(character in path for character in "\0\\")
        or "://" in path
        or (len(path) > 1 and path[1] == ":")
        or not _is_encodable_name(path)
    )
    if is_unsafe:
        raise UnsafeError(f"the checkpoint names a file {path!r} outside of itself; it was not opened")
    return path


def check_range(path: str, stop: int, size: int) -> None:
    """Raises IncompleteError if ``path``, a file of ``size`` bytes, ends before byte ``stop``."""
    if stop > size:
        raise IncompleteError(f"it ends at byte {size:,}, before byte {stop:,}", path=path)


def _is_encodable_name(path: str) -> bool:
    """False for lone surrogates, which JSON and pickles can hold and a file name cannot."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Source:
    """A store and its listing when it was opened."""

    store: Store
    files: Mapping[str, int] = field(repr=False)

    @classmethod
    def open(cls, store: Store) -> Source:
        return cls(store, dict(sorted(store.list().items())))

    @property
    def is_one_file(self) -> bool:
        """Whether a file was named, and not the folder that holds it."""
        return len(self.files) == 1 and self.store.url.endswith(f"/{next(iter(self.files))}")

    def select_below(self, prefix: str) -> Source:
        """The files whose paths begin with ``prefix``, under these paths."""
        return Source(self.store, {path: size for path, size in self.files.items() if path.startswith(prefix)})

    def size(self, path: str) -> int:
        """Bytes of ``path``. Raises IncompleteError where it is missing."""
        if path not in self.files:
            check_file_name(path)
            raise IncompleteError("this file of the checkpoint is missing", path=path)
        return self.files[path]

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of ``path``. Raises IncompleteError where the file ends before ``stop``."""
        if not 0 <= start <= stop <= self.size(path):
            raise IncompleteError(f"it ends at byte {self.size(path):,}, before byte {stop:,}", path=path)
        if stop - start >= _LARGE_BYTES:
            return self._read_without_copy(path, start, stop)
        buffer = bytearray(stop - start)
        self.store.read_into(path, start, memoryview(buffer))
        return bytes(buffer)

    def _read_without_copy(self, path: str, start: int, stop: int) -> bytes:
        """The same without a copy: ``getvalue`` hands out the bytes of the stream themselves."""
        stream = io.BytesIO()
        stream.seek(stop - start - 1)
        stream.write(b"\0")
        with stream.getbuffer() as buffer:
            self.store.read_into(path, start, buffer)
        return stream.getvalue()

    def map_files(self, read: Callable[[Source, str], Result], paths: Iterable[str]) -> Iterator[Result]:
        """Results of ``read`` for each file, as ``Store.map_files``."""
        return self.store.map_files(lambda path: read(self, path), paths)

    def read_all(self, path: str, *, limit_bytes: int) -> bytes:
        """The whole of a header file. Raises MalformedError where it is larger than any such file may be."""
        size = self.size(path)
        if size > limit_bytes:
            raise MalformedError(
                f"{size:,} bytes are too many for a file of this kind (at most {limit_bytes:,})", path=path
            )
        return self.read(path, 0, size)
