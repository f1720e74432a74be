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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial as partial_call
from pathlib import PurePosixPath
from typing import Any

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import CkptError, StoreError, UsageError
from ckpt_tools.process.signals import allow_signals, defer_signals
from ckpt_tools.stores.destination import (
    NO_FILES,
    Claim,
    Destination,
    DestinationContents,
    Leftover,
    OutputLocation,
    check_free,
    check_no_unexpected_files,
    list_parent_folders,
)
from ckpt_tools.stores.fsspec.store import FsspecStore, call_with_retry, kind_of_path, open_file_system, size_of_info
from ckpt_tools.stores.output_names import PARTIAL_FOLDER_NAME, FolderForm, OutputKind, SingleFileForm, is_marker
from ckpt_tools.stores.source import Buffer, check_file_name

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


@dataclass(slots=True)
class FsspecClaim(Claim):
    """A location in a file system, being written to."""

    location: FsspecOutputLocation
    destination: FsspecDestination
    overwrite: bool
    log: NullLog = field(default_factory=NullLog)
    keeps_output: bool = False
    """True if publishing failed when old files may have been removed: the staged files may be all there is."""

    def publish_files(self, paths: Sequence[str], replaced: Mapping[str, int] = NO_FILES) -> None:
        """Like ``Claim.publish_files``. If moving fails, what was moved is removed, or moved back and kept if old
        files were removed for it."""
        location = self.location
        location.check_free(overwrite=self.overwrite)
        check_no_unexpected_files(location.list_contents(), location.url, replaced)
        # Markers first: without them the rest is no checkpoint.
        replaced_names = sorted({*replaced} - {location.form.file_name}, key=lambda path: not is_marker(path))
        moved_names: list[str] = []
        try:
            location.remove_files([replaced_names])
            for path in paths:
                moved_names.append(path)
                self.publish_companion_file(path)
        except CkptError as error:
            self.keeps_output = bool(replaced_names)
            for path in moved_names:
                if path in replaced_names or path not in replaced:
                    self._undo_move(path)
            if replaced_names:
                error.message += (
                    "; the old checkpoint is being replaced, and the new one is kept in "
                    f"{location.fs.unstrip_protocol(self.destination.root)}: move its files to {location.url} yourself"
                )
            raise

    def publish_companion_file(self, path: str) -> None:
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

    def _undo_move(self, path: str) -> None:
        """Undo a move that succeeded or failed halfway."""
        (staged_path, final_path), fs = self._staged_and_final_path(path), self.location.fs
        with suppress(Exception):
            if self.keeps_output and not fs.exists(staged_path):
                fs.mv(final_path, staged_path)
            elif fs.exists(final_path):
                fs.rm_file(final_path)


@dataclass(frozen=True, slots=True)
class FsspecOutputLocation(OutputLocation):
    """A path of a file system, as the location of an output."""

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
        return call_with_retry(
            self.url, self._list_file if isinstance(self.form, SingleFileForm) else self._list_folder
        )

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
        return DestinationContents(FsspecStore(self.fs, self.path), files, others) if files or others else None

    def _partial_folders(self) -> list[str]:
        """Folders of unfinished output, for both forms, because the form of an earlier output is unknown."""
        return [self.with_form(FolderForm())._partial_folder, self.as_single_file()._partial_folder]

    @property
    def root(self) -> str:
        """The folder in which the files of an output are named."""
        return self.form.root_folder_of(self.path)

    @property
    def _partial_folder(self) -> str:
        return f"{self.root}/{self.form.partial_name}"

    def check_free(self, *, overwrite: bool) -> None:
        """Raises DestinationExistsError if the location may not, or cannot, be taken."""
        self.fs.invalidate_cache()
        is_file = kind_of_path(self.fs, self.path, self.url) == "file"
        is_folder = call_with_retry(self.url, self._list_folder) is not None
        existing: dict[OutputKind, bool] = {"file": is_file, "folder": is_folder}
        existing_kinds = [kind for kind, found in existing.items() if found]
        check_free(
            self.url, self.form.kind, is_taken=bool(existing_kinds), existing_kinds=existing_kinds, overwrite=overwrite
        )

    @contextmanager
    def claim(self, *, overwrite: bool, resume: bool, fsync: bool = False) -> Iterator[Claim]:
        """As ``OutputLocation.claim``, but two processes may claim it at once: file systems have no common lock.

        Services answer when bytes are safe, so ``fsync`` changes nothing.

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
        partial_folder = self._partial_folder
        self._remove_staged_folders(partial_folder)
        destination = FsspecDestination(self.fs, f"{partial_folder}/{secrets.token_hex(_TOKEN_BYTES)}")
        claim = FsspecClaim(self, destination, overwrite)
        with defer_signals():
            try:
                with allow_signals():
                    yield claim
            finally:
                destination.close_open_files()
                if not claim.keeps_output:
                    with suppress(CkptError):
                        self._remove_staged_folders(partial_folder)

    def _remove_staged_folders(self, partial_folder: str) -> None:
        for folder in call_with_retry(self.url, lambda: self._list_staged_folders(partial_folder)):
            with suppress(FileNotFoundError):
                call_with_retry(self.url, partial_call(self.fs.rm, folder, recursive=True))
        self._remove_empty_folder(partial_folder)

    def _list_staged_folders(self, partial_folder: str) -> list[str]:
        self.fs.invalidate_cache()
        try:
            child_paths = [str(path).rstrip("/") for path in self.fs.ls(partial_folder, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path for path in child_paths if _TOKEN_FORM.fullmatch(path.rpartition("/")[2])]

    def list_leftovers(self) -> Sequence[Leftover]:
        def find_leftovers() -> list[Leftover]:
            infos: dict[str, Any] = {}
            for folder in (each for partial in self._partial_folders() for each in self._list_staged_folders(partial)):
                with suppress(FileNotFoundError):
                    infos |= self.fs.find(folder, detail=True)
            return [
                Leftover("unfinished output", str(self.fs.unstrip_protocol(path)), int(info.get("size") or 0))
                for path, info in infos.items()
            ]

        return call_with_retry(self.url, find_leftovers)

    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        names = [name for batch in batches for name in batch]

        def remove_all() -> None:
            self.fs.invalidate_cache()
            for name in names:
                with suppress(FileNotFoundError):
                    self.fs.rm_file(f"{self.root}/{name}")
            for folder in list_parent_folders(names):
                self._remove_empty_folder(f"{self.root}/{folder}")

        call_with_retry(self.url, remove_all)

    def _remove_empty_folder(self, path: str) -> None:
        """Remove a folder if it is empty. Services without folders, and full folders, raise errors of many kinds."""
        with suppress(Exception):
            self.fs.rmdir(path)

    def remove_leftovers(self) -> Sequence[Leftover]:
        found = self.list_leftovers()
        for partial in self._partial_folders():
            self._remove_staged_folders(partial)
        return found
