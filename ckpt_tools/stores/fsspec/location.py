"""A path of a file system of fsspec, as the location of an output.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial as partial_call
from pathlib import PurePosixPath
from typing import Any, ClassVar

from ckpt_tools.errors import CkptError, StoreError, UsageError
from ckpt_tools.stores.destination import Destination
from ckpt_tools.stores.fsspec.store import FsspecStore, call_with_retry, kind_of_path, open_file_system, size_of_info
from ckpt_tools.stores.output_names import PARTIAL_FOLDER_NAME
from ckpt_tools.stores.publishing import DestinationContents, OutputLocation, list_parent_folders
from ckpt_tools.stores.source import Buffer, check_file_name
from ckpt_tools.stores.staging import Leftover, Staging

_TOKEN_BYTES = 8
_TOKEN_FORM = re.compile(f"[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
"""The name of a folder in which one run stages its output."""


def _is_link(info: Mapping[str, Any]) -> bool:
    return bool(info.get("islink")) or info.get("type") not in ("file", "directory")


@dataclass(slots=True)
class _PartStream:
    file: Any
    next_part: int = 0
    part_written: threading.Condition = field(default_factory=threading.Condition)


@dataclass(slots=True)
class FsspecDestination(Destination):
    """Files below ``root``, each one stream. It cannot be sent to another process."""

    fs: Any
    root: str
    _streams: dict[str, _PartStream] = field(default_factory=dict, repr=False)
    _errors: list[BaseException] = field(default_factory=list, repr=False)

    def begin_file(self, path: str, size_bytes: int) -> str:
        full_path = f"{self.root}/{check_file_name(path)}"

        call_with_retry(full_path, lambda: self.fs.makedirs(full_path.rpartition("/")[0], exist_ok=True))
        self._streams[path] = _PartStream(call_with_retry(full_path, lambda: self.fs.open(full_path, "wb")))
        return ""

    def write_part(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        # Parts come in any order, and the stream takes them in order only: each waits until the one before is written,
        # or until ``fail_waiting_writers`` says that a part will not come.
        stream = self._streams[path]
        with stream.part_written:
            stream.part_written.wait_for(lambda: stream.next_part == number or self._errors)
            if self._errors:
                raise self._errors[0]
            # Not tried again: a stream does not say how much of a failed write it took.
            _wrap_write_errors(path, lambda: stream.file.write(data))
            stream.next_part += 1
            stream.part_written.notify_all()
        return ""

    def fail_waiting_writers(self, error: BaseException) -> None:
        self._errors.append(error)
        for stream in list(self._streams.values()):
            with stream.part_written:
                stream.part_written.notify_all()

    def has_part(
        self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str
    ) -> bool:
        """Never: a stream ends with the process that wrote it."""
        return False

    def finish_file(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        _wrap_write_errors(path, self._streams.pop(path).file.close)

    def close_open_files(self) -> None:
        for stream in self._streams.values():
            with suppress(Exception):
                stream.file.discard() if hasattr(stream.file, "discard") else stream.file.close()
        self._streams.clear()

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError("only one process can write to this destination; name a path or an s3:// URL")


def _wrap_write_errors(path: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        raise StoreError(f"writing failed: {error or type(error).__name__}", path=path) from error


@dataclass(slots=True)
class NullLog:
    """An empty log: unfinished streams cannot be continued by a later run."""

    def read(self) -> bytes:
        return b""

    def append(self, data: bytes) -> None:
        """Does nothing: the log is never read."""

    def clear(self) -> None:
        """Does nothing: the log is empty."""


@dataclass(frozen=True, slots=True)
class FsspecOutputLocation(OutputLocation):
    """A path of a file system, as the location of an output."""

    can_resume: ClassVar[bool] = False
    fs: Any
    path: str

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> FsspecOutputLocation:
        fs, path = open_file_system(url, options)
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

    def list_contents(self) -> DestinationContents | None:
        return call_with_retry(self.url, self._list_folder if self.form.file_name is None else self._list_file)

    def _list_file(self) -> DestinationContents | None:
        self.fs.invalidate_cache()
        folder = self.path.rpartition("/")[0]
        store = FsspecStore(self.fs, folder, only_file=self.name)
        kind = kind_of_path(self.fs, self.path, self.url)
        if kind != "file":
            return None if kind is None else DestinationContents(store, {}, [self.name])
        return DestinationContents(store, {self.name: size_of_info(self.fs.info(self.path), self.url)})

    def _list_folder(self) -> DestinationContents | None:
        self.fs.invalidate_cache()
        if kind_of_path(self.fs, self.path, self.url) != "directory":
            return None
        listing = self.fs.find(self.path, withdirs=True, detail=True)
        infos = {str(path).removeprefix(self.path).strip("/"): info for path, info in listing.items()}
        infos = {path: info for path, info in infos.items() if path and path.partition("/")[0] != PARTIAL_FOLDER_NAME}
        file_names = [path for path, info in infos.items() if info.get("type") == "file" and not _is_link(info)]
        files = {path: size_of_info(infos[path], self.url) for path in file_names}
        nonempty_folders = set(list_parent_folders(infos))
        more = ((path, info) for path, info in infos.items() if path not in files)
        others = [path for path, info in more if path not in nonempty_folders or _is_link(info)]
        return DestinationContents.of_folder(FsspecStore(self.fs, self.path), files, others)

    @property
    def root(self) -> str:
        """The folder in which the files of an output are named."""
        return self.form.root_folder_of(self.path)

    def stage(self, *, resume: bool = False, fsync: bool = False) -> Staging:
        return FsspecStaging(self)

    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        names = [name for batch in batches for name in batch]

        def remove_all() -> None:
            self.fs.invalidate_cache()
            for name in names:
                with suppress(FileNotFoundError):
                    self.fs.rm_file(f"{self.root}/{name}")
            for folder in list_parent_folders(names):
                self.remove_empty_folder(f"{self.root}/{folder}")

        call_with_retry(self.url, remove_all)

    def remove_empty_folder(self, path: str) -> None:
        """Remove a folder if it is empty. Services without folders, and full folders, raise errors of many kinds."""
        with suppress(Exception):
            self.fs.rmdir(path)


@dataclass(slots=True)
class FsspecStaging(Staging):
    """Files below ``partial_folder``, in a folder of this run alone. Two processes may write at once: file systems have
    no common lock."""

    location: FsspecOutputLocation
    partial_folder: str = field(init=False)
    destination: FsspecDestination = field(init=False)
    log: NullLog = field(default_factory=NullLog, init=False)

    def __post_init__(self) -> None:
        self.partial_folder = f"{self.location.root}/{self.location.form.partial_name}"
        run_folder = f"{self.partial_folder}/{secrets.token_hex(_TOKEN_BYTES)}"
        self.destination = FsspecDestination(self.location.fs, run_folder)

    @property
    def rescue_hint(self) -> str:
        run_folder = self.location.fs.unstrip_protocol(self.destination.root)
        return f"the new one is kept in {run_folder}: move its files to {self.location.url} yourself"

    def discard(self) -> None:
        """Remove the staged files of all runs."""
        url, fs = self.location.url, self.location.fs
        for folder in call_with_retry(url, self._list_staged_folders):
            with suppress(FileNotFoundError):
                call_with_retry(url, partial_call(fs.rm, folder, recursive=True))
        self.location.remove_empty_folder(self.partial_folder)

    def _list_staged_folders(self) -> list[str]:
        fs = self.location.fs
        fs.invalidate_cache()
        try:
            child_paths = [str(path).rstrip("/") for path in fs.ls(self.partial_folder, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path for path in child_paths if _TOKEN_FORM.fullmatch(path.rpartition("/")[2])]

    def list_leftovers(self) -> Sequence[Leftover]:
        fs = self.location.fs

        def find_leftovers() -> list[Leftover]:
            infos: dict[str, Any] = {}
            for folder in self._list_staged_folders():
                with suppress(FileNotFoundError):
                    infos |= fs.find(folder, detail=True) or {folder: {}}
            return [
                Leftover("unfinished output", str(fs.unstrip_protocol(path)), int(info.get("size") or 0))
                for path, info in infos.items()
            ]

        return call_with_retry(self.location.url, find_leftovers)

    def note_publishing(self, paths: Sequence[str], replaced: Mapping[str, int]) -> Collection[str]:
        return sorted(replaced.keys() - {self.location.form.file_name})

    def show_files(self, paths: Sequence[str], replaced: Mapping[str, int]) -> None:
        """Move the files. If one cannot be moved, those before are removed again, or moved back where old files are
        gone: the new ones may be all there is."""
        moved_names: list[str] = []
        try:
            for path in paths:
                moved_names.append(path)
                self._move_into_place(path)
        except CkptError:
            file_name = self.location.form.file_name
            for path in moved_names:
                if path != file_name or path not in replaced:
                    self._undo_move(path, moves_back=file_name is None and bool(replaced))
            raise

    def _move_into_place(self, path: str) -> None:
        staged_path, final_path = self._staged_and_final_path(path)

        def move_into_place() -> None:
            fs = self.location.fs
            fs.makedirs(final_path.rpartition("/")[0], exist_ok=True)
            if fs.exists(staged_path):
                fs.mv(staged_path, final_path)
            elif not fs.exists(final_path):
                raise StoreError("it disappeared before it was published", path=staged_path)

        call_with_retry(final_path, move_into_place)

    def _staged_and_final_path(self, path: str) -> tuple[str, str]:
        """Path of the file while it is written, and its path after the move."""
        return f"{self.destination.root}/{path}", f"{self.location.root}/{path}"

    def _undo_move(self, path: str, *, moves_back: bool) -> None:
        """Undo a move that succeeded or failed halfway."""
        (staged_path, final_path), fs = self._staged_and_final_path(path), self.location.fs
        with suppress(Exception):
            if moves_back and not fs.exists(staged_path):
                fs.mv(final_path, staged_path)
            elif fs.exists(final_path):
                fs.rm_file(final_path)
