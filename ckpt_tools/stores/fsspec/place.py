"""A path of a file system of fsspec, as the place of an output.

fsspec has no common way to send a file in parts from several processes. A file is therefore one stream, into which
parts are written in order; a part that is early waits in its buffer for those before it.

Files are written below ``.ckpt-tools-partial/<16 hex digits>/`` and moved when all are complete, the marker file last.
If the service cannot rename, a move is a copy; if moving is interrupted, files are missing at the destination, and none
is half written.

Of the old files, those that the caller names are removed, one by one. In ``.ckpt-tools-partial``, the folders whose
names are such numbers are a run's.
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
from typing import Any

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import CkptError, StoreError, UsageError
from ckpt_tools.signals import allow_signals, defer_signals
from ckpt_tools.stores.destination import Claim, Destination, Leftover, Place
from ckpt_tools.stores.fsspec.store import FsspecStore, asked, file_system, kind_at, size_of
from ckpt_tools.stores.marker_files import PARTIAL, is_marker
from ckpt_tools.stores.output_form import Folder, Kind, SingleFile
from ckpt_tools.stores.present import NOTHING, Present, check_free, check_only, folders_of
from ckpt_tools.stores.source import Buffer, checked_name

_TOKEN_BYTES = 8
_TOKEN = re.compile(f"[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
"""The name of a folder in which one run stages its output."""


def _is_link(info: Mapping[str, Any]) -> bool:
    return bool(info.get("islink")) or info.get("type") not in ("file", "directory")


@dataclass(slots=True)
class _Stream:
    file: Any
    next: int = 0
    turn: threading.Condition = field(default_factory=threading.Condition)


@dataclass(slots=True)
class FsspecDestination(Destination):
    """Files below ``root``, each one stream. It cannot be sent to another process."""

    fs: Any
    root: str
    _streams: dict[str, _Stream] = field(default_factory=dict, repr=False)
    _errors: list[BaseException] = field(default_factory=list, repr=False)

    def begin(self, path: str, size_bytes: int) -> str:
        full = f"{self.root}/{checked_name(path)}"

        asked(full, lambda: self.fs.makedirs(full.rpartition("/")[0], exist_ok=True))
        self._streams[path] = _Stream(asked(full, lambda: self.fs.open(full, "wb")))
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
    """An empty log: unfinished streams cannot be continued by a later run."""

    def read(self) -> bytes:
        return b""

    def append(self, data: bytes) -> None:
        """Does nothing: the log is never read."""

    def clear(self) -> None:
        """Does nothing: the log is empty."""


@dataclass(slots=True)
class FsspecClaim(Claim):
    """A place of a file system, being written to."""

    place: FsspecPlace
    destination: FsspecDestination
    overwrite: bool
    log: FsspecLog = field(default_factory=FsspecLog)
    is_kept: bool = False
    """True if nothing else is left of what was to be published."""

    def publish(self, paths: Sequence[str], replaced: Mapping[str, int] = NOTHING) -> None:
        """Like ``Claim.publish``. If moving fails, what was moved is removed, or moved back and kept if old files were
        removed for it."""
        place = self.place
        place.check_free(overwrite=self.overwrite)
        check_only(place.present(), place.url, replaced)
        # What makes it a checkpoint first. The file system may know nothing of a folder but its files.
        removed = sorted({*replaced} - {place.form.file_name}, key=lambda path: not is_marker(path))
        begun: list[str] = []
        try:
            place.remove_files([removed])
            for path in paths:
                begun.append(path)
                self.add(path)
        except CkptError as error:
            self.is_kept = bool(removed)
            for path in begun:
                if path in removed or path not in replaced:
                    self._undo(path)
            if removed:
                error.message += (
                    "; the old checkpoint is being replaced, and the new one is kept in "
                    f"{place.fs.unstrip_protocol(self.destination.root)}: move its files to {place.url} yourself"
                )
            raise

    def add(self, path: str) -> None:
        old, new = self._ends(path)

        def move() -> None:
            fs = self.place.fs
            fs.makedirs(new.rpartition("/")[0], exist_ok=True)
            if fs.exists(old):
                fs.mv(old, new)
            elif not fs.exists(new):
                raise StoreError("it disappeared before it was published", path=old)

        asked(new, move)

    def _ends(self, path: str) -> tuple[str, str]:
        """Path of the file while it is written, and its path after the move."""
        return f"{self.destination.root}/{path}", f"{self.place.root}/{path}"

    def _undo(self, path: str) -> None:
        """Undo a move that succeeded or failed halfway."""
        (old, new), fs = self._ends(path), self.place.fs
        with suppress(Exception):
            if self.is_kept and not fs.exists(old):
                fs.mv(new, old)
            elif fs.exists(new):
                fs.rm_file(new)


@dataclass(frozen=True, slots=True)
class FsspecPlace(Place):
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

    def present(self) -> Present | None:
        return asked(self.url, self._file if isinstance(self.form, SingleFile) else self._folder)

    def _file(self) -> Present | None:
        self.fs.invalidate_cache()
        folder = self.path.rpartition("/")[0]
        store = FsspecStore(self.fs, folder, only=self.name)
        kind = kind_at(self.fs, self.path, self.url)
        if kind != "file":
            return None if kind is None else Present(store, {}, [self.name])
        return Present(store, {self.name: size_of(self.fs.info(self.path), self.url)})

    def _folder(self) -> Present | None:
        self.fs.invalidate_cache()
        if kind_at(self.fs, self.path, self.url) != "directory":
            return None
        found = self.fs.find(self.path, withdirs=True, detail=True)
        inside = {str(path).removeprefix(self.path).strip("/"): info for path, info in found.items()}
        inside = {path: info for path, info in inside.items() if path and path.partition("/")[0] != PARTIAL}
        plain = [path for path, info in inside.items() if info.get("type") == "file" and not _is_link(info)]
        files = {path: size_of(inside[path], self.url) for path in plain}
        full = set(folders_of(inside))
        others = [path for path, info in inside.items() if path not in files and (path not in full or _is_link(info))]
        return Present(FsspecStore(self.fs, self.path), files, others) if files or others else None

    def _partials(self) -> list[str]:
        """Folders of unfinished output, for both forms, because the form of an earlier output is unknown."""
        return [self.taken_as(Folder())._partial, self.as_file()._partial]

    @property
    def root(self) -> str:
        """The folder in which the files of an output are named."""
        return self.form.root_of(self.path)

    @property
    def _partial(self) -> str:
        return f"{self.root}/{self.form.partial_name}"

    def check_free(self, *, overwrite: bool) -> None:
        """Raises DestinationExistsError where the place may not, or cannot, be taken."""
        self.fs.invalidate_cache()
        is_file = kind_at(self.fs, self.path, self.url) == "file"
        is_there: dict[Kind, bool] = {"file": is_file, "folder": asked(self.url, self._folder) is not None}
        kinds = [kind for kind, found in is_there.items() if found]
        check_free(self.url, self.form.kind, is_taken=bool(kinds), kinds=kinds, overwrite=overwrite)

    @contextmanager
    def claim(self, *, overwrite: bool, resume: bool, fsync: bool = False) -> Iterator[Claim]:
        """Take the place; two who take it at once are not told apart, as file systems have no common lock.

        Services answer when bytes are safe, so that ``fsync`` asks for nothing more.

        Raises:
            UsageError: ``resume``, which this kind of store cannot do.
        """
        if resume:
            raise UsageError.of(
                "resume",
                f"{format_option('resume', True)}: what was written to {self.url} cannot be continued, "
                "only to paths and s3:// URLs",
            )
        self.check_free(overwrite=overwrite)
        partial = self._partial
        self._remove_ours(partial)
        destination = FsspecDestination(self.fs, f"{partial}/{secrets.token_hex(_TOKEN_BYTES)}")
        claim = FsspecClaim(self, destination, overwrite)
        with defer_signals():
            try:
                with allow_signals():
                    yield claim
            finally:
                destination.abandon()
                if not claim.is_kept:
                    with suppress(CkptError):
                        self._remove_ours(partial)

    def _remove_ours(self, partial: str) -> None:
        for folder in asked(self.url, lambda: self._staged(partial)):
            with suppress(FileNotFoundError):
                asked(self.url, partial_call(self.fs.rm, folder, recursive=True))
        self._remove_folder(partial)

    def _staged(self, partial: str) -> list[str]:
        self.fs.invalidate_cache()
        try:
            found = [str(path).rstrip("/") for path in self.fs.ls(partial, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path for path in found if _TOKEN.fullmatch(path.rpartition("/")[2])]

    def leftovers(self) -> Sequence[Leftover]:
        def find() -> list[Leftover]:
            found: dict[str, Any] = {}
            for folder in (each for partial in self._partials() for each in self._staged(partial)):
                with suppress(FileNotFoundError):
                    found |= self.fs.find(folder, detail=True)
            return [
                Leftover("unfinished output", str(self.fs.unstrip_protocol(path)), int(info.get("size") or 0))
                for path, info in found.items()
            ]

        return asked(self.url, find)

    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        names = [name for batch in batches for name in batch]

        def remove() -> None:
            self.fs.invalidate_cache()
            for name in names:
                with suppress(FileNotFoundError):
                    self.fs.rm_file(f"{self.root}/{name}")
            for folder in folders_of(names):
                self._remove_folder(f"{self.root}/{folder}")

        asked(self.url, remove)

    def _remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty. Services without folders, and full folders, raise errors of many kinds."""
        with suppress(Exception):
            self.fs.rmdir(path)

    def remove_leftovers(self) -> Sequence[Leftover]:
        found = self.leftovers()
        for partial in self._partials():
            self._remove_ours(partial)
        return found
