"""Anything that fsspec opens: as a source, and as a destination for files that are written from front to back.

fsspec has no common way to send a file in parts from several processes. A file is therefore one stream, into which
parts go in order; a part that comes early waits for those before it, in the buffer that it was made in. Files are
written below ``.ckpt-tools-partial/<16 hex digits>/`` and moved when all are whole, the last one last. Where the
service cannot rename, a move is a copy; where a move is interrupted, files are missing at the destination and none is
half: the one without which a folder is no checkpoint comes last.

Of what was there before, the files that the caller names are removed, one by one, and nothing else. Of the folder
``.ckpt-tools-partial``, the folders with such a number for a name are ours.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial as partial_call
from pathlib import PurePosixPath
from typing import Any, TypeVar

from ckpt_tools.errors import (
    CkptError,
    DestinationExistsError,
    IncompleteError,
    SourceNotFoundError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.signals import held_back, let_through
from ckpt_tools.stores.destination import Leftover, PartRules
from ckpt_tools.stores.fsspec import errors as fsspec_errors
from ckpt_tools.stores.fsspec.errors import shown
from ckpt_tools.stores.marker_files import PARTIAL, is_marker, is_shown
from ckpt_tools.stores.present import NOTHING, Present, check_only, folders_of
from ckpt_tools.stores.retry import RetryPolicy, retried
from ckpt_tools.stores.source import Buffer, checked_name

Result = TypeVar("Result")

_POLICY = RetryPolicy()

_TOKEN_BYTES = 8
_TOKEN = re.compile(f"[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
"""The name of a folder in which one run stages its output."""


def file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of ``url`` and the path in it.

    Raises:
        UsageError: a package that it needs is missing, or the options are not its own.
        UnsupportedError: there is no such scheme.
    """
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url, **options)
    except ImportError as error:
        raise UsageError(f"{url} needs a package that is not installed: {error}") from error
    except TypeError as error:
        raise UsageError(f"--storage-option: {error}") from error
    except ValueError as error:
        raise UnsupportedError(f"{url}: {error}") from error
    return fs, str(path).rstrip("/")


def asked(url: str, call: Callable[[], Result]) -> Result:
    """What ``call`` of a file system gives, tried again where the network failed.

    Raises:
        StoreError: it failed. FileNotFoundError is the caller's.
    """
    return retried(lambda: _asked_once(url, call), _POLICY)


def _asked_once(url: str, call: Callable[[], Result]) -> Result:
    try:
        return call()
    except CkptError:
        raise
    except Exception as error:
        judged = fsspec_errors.judged(error, url)
        if judged is error:
            raise
        raise judged from error


@dataclass(slots=True)
class FsspecStore:
    """The files below ``root`` of a file system; with ``only``, a single one of them."""

    fs: Any
    root: str
    only: str | None = None

    @property
    def url(self) -> str:
        return str(self.fs.unstrip_protocol(self._path(self.only) if self.only else self.root))

    def _path(self, path: str) -> str:
        return f"{self.root}/{path}" if self.root else path

    def list(self) -> Mapping[str, int]:
        try:
            return asked(self.url, self._sizes)
        except FileNotFoundError as error:
            raise SourceNotFoundError(f"there is no file or folder {shown(self.url)}") from error

    def _sizes(self) -> dict[str, int]:
        self.fs.invalidate_cache()
        if self.only is not None:
            return {self.only: _size(self.fs.info(self._path(self.only)), self.url)}
        found = self.fs.find(self.root, detail=True)
        names = {str(path).removeprefix(self.root).lstrip("/"): info for path, info in found.items()}
        return {name: _size(info, self.url) for name, info in names.items() if is_shown(name)}

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        full = self._path(checked_name(path))
        try:
            if len(buffer):
                asked(full, lambda: self._read_once(full, start, buffer))
            elif start > _size(asked(full, lambda: self.fs.info(full)), full):
                raise IncompleteError(f"the file ends before byte {start:,}", path=full)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise IncompleteError("this file of the checkpoint is missing", path=full) from error

    def _read_once(self, full: str, start: int, buffer: memoryview) -> None:
        """fsspec cuts a range at the end of the file, and does not say so."""
        data = self.fs.cat_file(full, start=start, end=start + len(buffer))
        if len(data) == len(buffer):
            buffer[:] = data
            return
        size = _size(self.fs.info(full), full)
        if size < start + len(buffer):
            raise IncompleteError(f"the file ends at byte {size:,}", path=full)
        if len(data) == size:
            raise StoreError(
                "its server sends the whole file where a part is asked for (it ignores the header Range), so nothing "
                "can be read from it in place; download the file first, or serve it from a server that sends parts",
                path=shown(full),
            )
        raise EOFError(f"{len(data):,} bytes were received, but {len(buffer):,} were requested")


def _size(info: Mapping[str, Any], url: str) -> int:
    if info.get("type") == "directory":
        raise FileNotFoundError(url)
    if info.get("size") is None:
        raise StoreError("its service does not say how large it is; download it first", path=url)
    return int(info["size"])


def _is_link(info: Mapping[str, Any]) -> bool:
    return bool(info.get("islink")) or info.get("type") not in ("file", "directory")


def _is_plain(info: Mapping[str, Any]) -> bool:
    return info.get("type") == "file" and not _is_link(info)


def open_fsspec_store(url: str, options: Mapping[str, Any]) -> FsspecStore | None:
    """What is at ``url``: a file, or a folder; None where there is nothing.

    Raises:
        StoreError: it cannot be asked; others as ``file_system`` says.
    """
    fs, path = file_system(url, options)
    kind = kind_at(fs, path, url)
    if kind == "file":
        folder, _, name = path.rpartition("/")
        return FsspecStore(fs, folder, only=name)
    return None if kind is None else FsspecStore(fs, path)


def kind_at(fs: Any, path: str, url: str) -> str | None:
    """``file`` or ``directory``; None where nothing is.

    ``isfile``, ``isdir`` and ``exists`` of fsspec say no where the service could not be asked, and ``info`` of some
    services knows nothing of a folder that is only the beginning of other names.

    Raises:
        StoreError: it cannot be asked.
    """
    try:
        return str(asked(url, lambda: fs.info(path))["type"])
    except FileNotFoundError:
        return "directory" if asked(url, lambda: fs.exists(path)) else None


@dataclass(slots=True)
class _Stream:
    """A file being written from front to back."""

    file: Any
    next: int = 0
    turn: threading.Condition = field(default_factory=threading.Condition)


@dataclass(slots=True)
class FsspecDestination:
    """Files below ``root``, each one stream. It cannot be sent to another process."""

    fs: Any
    root: str
    _streams: dict[str, _Stream] = field(default_factory=dict, repr=False)
    _errors: list[BaseException] = field(default_factory=list, repr=False)

    def begin(self, path: str, size_bytes: int) -> str:
        full = f"{self.root}/{checked_name(path)}"

        def make() -> Any:
            self.fs.makedirs(full.rpartition("/")[0], exist_ok=True)
            return self.fs.open(full, "wb")

        self._streams[path] = _Stream(asked(full, make))
        return ""

    def write(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        stream = self._streams[path]
        with stream.turn:
            stream.turn.wait_for(lambda: stream.next == number or self._errors)
            if self._errors:
                raise self._errors[0]
            # Not tried again: a stream does not say how much of a failed write it took.
            _failing(path, lambda: stream.file.write(data))
            stream.next += 1
            stream.turn.notify_all()
        return ""

    def fail(self, error: BaseException) -> None:
        self._errors.append(error)
        for stream in list(self._streams.values()):
            with stream.turn:
                stream.turn.notify_all()

    def holds(self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str) -> bool:
        """Never: a stream ends with the process that wrote it."""
        return False

    def finish(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        _failing(path, self._streams.pop(path).file.close)

    def abandon(self) -> None:
        for stream in self._streams.values():
            with suppress(Exception):
                stream.file.discard() if hasattr(stream.file, "discard") else stream.file.close()
        self._streams.clear()

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError("only one process can write to this destination; name a path or an s3:// URL")


def _failing(path: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        raise StoreError(f"writing failed: {error or type(error).__name__}", path=path) from error


@dataclass(slots=True)
class FsspecLog:
    """Forgets at once what it is told: unfinished streams cannot be taken up by a later run."""

    def read(self) -> bytes:
        return b""

    def append(self, data: bytes) -> None:
        """Nobody could use it."""

    def clear(self) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class FsspecClaim:
    """A place of a file system, being written to."""

    place: FsspecPlace
    destination: FsspecDestination
    is_file: bool
    overwrite: bool
    log: FsspecLog = field(default_factory=FsspecLog)

    def publish(self, paths: Sequence[str], replaced: Mapping[str, int] = NOTHING) -> None:
        place = self.place
        place.check_free(is_file=self.is_file, overwrite=self.overwrite)
        check_only(place.present(is_file=self.is_file), place.url, replaced)
        if not self.is_file:
            asked(place.url, lambda: self._remove_old(replaced))
        into = place.path.rpartition("/")[0] if self.is_file else place.path
        for path in paths:
            self._move(f"{self.destination.root}/{path}", f"{into}/{path}")

    def _remove_old(self, replaced: Mapping[str, int]) -> None:
        """What makes it a checkpoint first. The file system may know nothing of a folder but its files."""
        fs, root = self.place.fs, self.place.path
        fs.invalidate_cache()
        for path in sorted(replaced, key=lambda path: not is_marker(path)):
            with suppress(FileNotFoundError):
                fs.rm_file(f"{root}/{path}")
        for folder in folders_of(replaced):
            with suppress(Exception):  # it holds more, or there are no folders here; each service says so otherwise
                fs.rmdir(f"{root}/{folder}")

    def _move(self, old: str, new: str) -> None:
        def move() -> None:
            fs = self.place.fs
            fs.makedirs(new.rpartition("/")[0], exist_ok=True)
            if fs.exists(old):
                fs.mv(old, new)
            elif not fs.exists(new):
                raise StoreError("it disappeared before it was published", path=old)

        asked(new, move)


@dataclass(frozen=True, slots=True)
class FsspecPlace:
    """A path of a file system, as the place of an output."""

    fs: Any
    path: str

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> FsspecPlace:
        fs, path = file_system(url, options)
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
        if not path or "http" in protocols:
            raise UsageError(f"{url}: nothing can be written there; choose another destination")
        return cls(fs, path)

    @property
    def url(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def parts(self) -> PartRules:
        return PartRules()

    def present(self, *, is_file: bool) -> Present | None:
        return asked(self.url, lambda: self._file() if is_file else self._folder())

    def _file(self) -> Present | None:
        self.fs.invalidate_cache()
        folder = self.path.rpartition("/")[0]
        store = FsspecStore(self.fs, folder, only=self.name)
        kind = kind_at(self.fs, self.path, self.url)
        if kind != "file":
            return None if kind is None else Present(store, {}, [self.name])
        return Present(store, {self.name: _size(self.fs.info(self.path), self.url)})

    def _folder(self) -> Present | None:
        """What is in the folder, but for what is staged there."""
        self.fs.invalidate_cache()
        if kind_at(self.fs, self.path, self.url) != "directory":
            return None
        found = self.fs.find(self.path, withdirs=True, detail=True)
        inside = {str(path).removeprefix(self.path).strip("/"): info for path, info in found.items()}
        inside = {path: info for path, info in inside.items() if path and path.partition("/")[0] != PARTIAL}
        files = {path: _size(info, self.url) for path, info in inside.items() if _is_plain(info)}
        full = set(folders_of(inside))
        others = [path for path, info in inside.items() if path not in files and (path not in full or _is_link(info))]
        return Present(FsspecStore(self.fs, self.path), files, others) if files or others else None

    def _partials(self) -> list[str]:
        return [self._partial(is_file=is_file) for is_file in (False, True)]

    def _partial(self, *, is_file: bool) -> str:
        return f"{self.path.rpartition('/')[0]}/.{self.name}{PARTIAL}" if is_file else f"{self.path}/{PARTIAL}"

    def check_free(self, *, is_file: bool, overwrite: bool) -> None:
        """Raises DestinationExistsError where the place may not, or cannot, be taken."""
        self.fs.invalidate_cache()
        single = kind_at(self.fs, self.path, self.url) == "file"
        inside = self.present(is_file=False) is not None
        if (single or inside) and not overwrite:
            raise DestinationExistsError(
                f"{self.url} exists; choose another destination, or replace it with --overwrite"
            )
        if inside if is_file else single:
            kind = "folder" if is_file else "file"
            raise DestinationExistsError(f"{self.url} is a {kind}, which this output cannot replace; remove it first")

    @contextmanager
    def claim(self, *, is_file: bool, overwrite: bool, resume: bool, fsync: bool = False) -> Iterator[FsspecClaim]:
        """Take the place; two who take it at once are not told apart, as file systems have no common lock.

        Services answer when bytes are safe, so that ``fsync`` asks for nothing more.

        Raises:
            UsageError: ``resume``, which this kind of store cannot do.
        """
        if resume:
            raise UsageError(
                f"--resume: output to {self.url} cannot be continued; only output to paths and s3:// URLs can"
            )
        self.check_free(is_file=is_file, overwrite=overwrite)
        partial = self._partial(is_file=is_file)
        self._remove_ours(partial)
        destination = FsspecDestination(self.fs, f"{partial}/{secrets.token_hex(_TOKEN_BYTES)}")
        with held_back():
            try:
                with let_through():
                    yield FsspecClaim(self, destination, is_file, overwrite)
            finally:
                destination.abandon()
                with suppress(CkptError):
                    self._remove_ours(partial)

    def _remove_ours(self, partial: str) -> None:
        for folder in asked(self.url, lambda: self._staged(partial)):
            with suppress(FileNotFoundError):
                asked(self.url, partial_call(self.fs.rm, folder, recursive=True))
        with suppress(Exception):  # it holds more, or there are no folders here; each service says so otherwise
            self.fs.rmdir(partial)

    def _staged(self, partial: str) -> list[str]:
        """The folders in ``partial`` that runs made."""
        self.fs.invalidate_cache()
        try:
            found = [str(path).rstrip("/") for path in self.fs.ls(partial, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path for path in found if _TOKEN.fullmatch(path.rpartition("/")[2])]

    def leftovers(self) -> Sequence[Leftover]:
        def find() -> list[Leftover]:
            self.fs.invalidate_cache()
            ours = [folder for partial in self._partials() for folder in self._staged(partial)]
            found = {path: info for folder in ours for path, info in self._find(folder).items()}
            return [
                Leftover("unfinished output", str(self.fs.unstrip_protocol(path)), int(info.get("size") or 0))
                for path, info in found.items()
            ]

        return asked(self.url, find)

    def _find(self, partial: str) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            return dict(self.fs.find(partial, detail=True))
        return {}

    def remove_leftovers(self) -> Sequence[Leftover]:
        found = self.leftovers()
        for partial in self._partials():
            self._remove_ours(partial)
        return found
