"""A local destination that is absent, old, or complete, never half written.

A conversion writes into a hidden folder beside its destination, which holds the output and a log of its progress.
Publishing renames the output, or the one file in it, into place in one step (``publish_files``); any failure removes
the folder, unless it is to be resumed. The folder is locked while a process writes, so that a second writer gets an
error, and leftovers of a killed one can be told apart. Files are removed by name only (``staging_folder``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.process.signals import allow_signals, defer_signals
from ckpt_tools.stores.destination import (
    NO_FILES,
    Claim,
    DestinationContents,
    Leftover,
    OutputLocation,
    already_exists_error,
    check_no_unexpected_files,
)
from ckpt_tools.stores.file_destination import StoreDestination
from ckpt_tools.stores.local.contents import (
    check_path_free,
    contents_of_file,
    contents_of_folder,
    folder_size,
    is_nonempty_folder,
    list_contents_at,
    resolve_target,
)
from ckpt_tools.stores.local.publish import (
    fsync_folders,
    recover_moved_aside,
    remove_replaced_folder,
    rename_without_replacing,
    replace_folder,
)
from ckpt_tools.stores.local.staging_folder import (
    OWNED_NAMES_FILE,
    OwnedNames,
    StagingFolder,
    list_unknown_files,
    remove_files_by_name,
)
from ckpt_tools.stores.local.store import LocalFileWriter, LocalStore, wrap_os_errors
from ckpt_tools.stores.output_names import FolderForm, OutputForm, SingleFileForm


@dataclass(frozen=True, slots=True)
class LocalOutputLocation(OutputLocation):
    """A path of the local file system, as the location of an output."""

    path: Path

    @property
    def url(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def list_contents(self) -> DestinationContents | None:
        """What exists there. An output that a killed run moved aside counts, because the next claim puts it back."""
        with wrap_os_errors("looking failed", self.path):
            staging = self._staging_folder
            return list_contents_at(staging.aside_path if staging.is_target_moved_aside else staging.target, self.form)

    def check_free(self, *, overwrite: bool) -> None:
        with wrap_os_errors("looking failed", self.path):
            staging = self._staging_folder
            if not overwrite and staging.is_target_moved_aside:
                raise already_exists_error(str(staging.target))
            check_path_free(staging.target, self.form, overwrite=overwrite)

    @property
    def _staging_folder(self) -> StagingFolder:
        return StagingFolder(resolve_target(self.path, self.form))

    @contextmanager
    def claim(self, *, overwrite: bool, resume: bool, fsync: bool = False) -> Iterator[LocalClaim]:
        """A staging folder for the output; on leaving, it is removed with all output that was not published.

        With ``resume`` it holds the output of a killed run, and stays for the next one if this one fails. With
        ``fsync`` the published output outlives a power failure.

        Raises:
            DestinationExistsError: the path exists and ``overwrite`` is False, another process is writing it, or other
            files are in the staging folder. UsageError: the path is a mount point. StoreError: the folder cannot be
            made.
        """
        # A signal interrupts the block, but not the making and the removal of the folder.
        with defer_signals():
            with wrap_os_errors("cannot write there", self.path.parent):
                staging = self._staging_folder
                check_path_free(staging.target, self.form, overwrite=overwrite)
                lock_descriptor = staging.create_and_lock()
            claim, keeps_output = None, resume
            try:
                with wrap_os_errors("cannot write there", staging.target.parent):
                    recover_moved_aside(staging)
                    check_path_free(staging.target, self.form, overwrite=overwrite)
                    staging.prepare(resume=resume)
                    claim = LocalClaim(staging, self.form, overwrite, fsync)
                with allow_signals():
                    yield claim
                keeps_output = False
            finally:
                if claim is not None:
                    claim.log.close()
                with suppress(OSError):
                    if claim is None:
                        staging.path.rmdir()  # if it was new, nothing was begun in it
                    elif not keeps_output or claim.is_published:
                        staging.remove()
                with suppress(OSError):
                    os.close(lock_descriptor)

    def list_leftovers(self) -> Sequence[Leftover]:
        with wrap_os_errors("looking failed", self.path):
            return [left for staging in self._candidate_folders() for left in _find_leftovers(staging)]

    def remove_leftovers(self) -> Sequence[Leftover]:
        leftovers = self.list_leftovers()
        with wrap_os_errors("removing failed", self.path):
            for staging in filter(_find_leftovers, self._candidate_folders()):
                lock_descriptor = staging.create_and_lock()
                try:
                    recover_moved_aside(staging)
                    staging.remove()
                finally:
                    os.close(lock_descriptor)
        return leftovers

    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        with wrap_os_errors("removing failed", self.path):
            remove_files_by_name(resolve_target(self.path, FolderForm()), [name for batch in batches for name in batch])

    def _candidate_folders(self) -> list[StagingFolder]:
        """Folders in which output may be left: for the path as a file, and as a folder."""
        forms = (SingleFileForm(self.name), FolderForm())
        return [StagingFolder(target) for target in dict.fromkeys(resolve_target(self.path, form) for form in forms)]


@dataclass(slots=True)
class LocalLog:
    """A log in a file, which is open from the first ``append`` until ``close``."""

    path: Path
    _descriptor: int | None = None

    def read(self) -> bytes:
        with wrap_os_errors("reading failed", self.path), suppress(FileNotFoundError):
            return self.path.read_bytes()
        return b""

    def append(self, data: bytes) -> None:
        with wrap_os_errors("writing failed", self.path):
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            while data:
                data = data[os.write(self._descriptor, data) :]

    def clear(self) -> None:
        self.close()
        with wrap_os_errors("removing failed", self.path):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Appended bytes are in the kernel already, so errors of closing lose nothing and are ignored."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


@dataclass(slots=True)
class _NameRecordingStore(LocalStore):
    """An output folder. The name of each file is written down beside the folder before the file is made."""

    def create(self, path: str, size_bytes: int) -> LocalFileWriter:
        OwnedNames(self.root.with_name(OWNED_NAMES_FILE)).add_names([path])
        # Without arguments it would look for the class that the decorator replaced.
        return super(_NameRecordingStore, self).create(path, size_bytes)


@dataclass(slots=True)
class LocalClaim(Claim):
    """The hidden folder, and the store in it to write into."""

    staging: StagingFolder
    form: OutputForm
    overwrite: bool
    fsync: bool = False
    is_published: bool = False
    store: LocalStore = field(init=False)
    destination: StoreDestination = field(init=False)
    log: LocalLog = field(init=False)

    def __post_init__(self) -> None:
        self.store = _NameRecordingStore(self.staging.output, replaces_existing=True, fsync=self.fsync)
        self.destination = StoreDestination(self.store)
        self.log = LocalLog(self.staging.journal_path)

    @property
    def target(self) -> Path:
        """The path that the output will have."""
        return self.staging.target

    @property
    def finished_store(self) -> LocalStore:
        return self.store

    def publish_files(self, paths: Sequence[str] = (), replaced: Mapping[str, int] = NO_FILES) -> None:
        """Put the finished output in its place in one step. If it is a file, the other ``paths`` follow beside it.

        If ``paths`` are given, nothing else is published: a killed run may have left more, such as digests that are not
        wanted now. ``replaced`` are the existing files that may be removed.

        Raises:
            DestinationExistsError: there is something else, which is kept, or was added during publishing.
            StoreError: renaming failed.
        """
        output = self.store.root
        with wrap_os_errors("publishing failed", self.target):
            if paths:
                self.staging.remove_other_output_files(paths)
            if self.fsync:
                fsync_folders(*(folder for folder, _, _ in os.walk(output)))
            check_path_free(self.target, self.form, overwrite=self.overwrite)
            if isinstance(self.form, SingleFileForm):
                self._publish_file_and_companions(paths or [self.form.name], replaced)
            elif is_nonempty_folder(self.target):
                check_no_unexpected_files(contents_of_folder(self.target), str(self.target), replaced)
                self.staging.owned_names.add_names(replaced)
                old_folder = replace_folder(self.staging, replaced)
                self.is_published = True
                remove_replaced_folder(old_folder, self.staging, replaced)
            else:
                output.rename(self.target)
            self.is_published = True
            if self.fsync:
                fsync_folders(self.target.parent)

    def _publish_file_and_companions(self, paths: Sequence[str], replaced: Mapping[str, int]) -> None:
        """Rename all files into one folder: the requested one, then those that describe it, such as its digests. Old
        companions are removed first, so that none ever describes another file."""
        name = self.target.name
        companion_targets = {path: self.target.with_name(path) for path in paths if path != name}
        for target in (self.target, *companion_targets.values()):
            check_no_unexpected_files(contents_of_file(target), str(target), replaced)
        remove_files_by_name(self.target.parent, replaced.keys() - {name})
        output_folder = self.store.root
        if name in replaced or not rename_without_replacing(output_folder / name, self.target):
            output_folder.joinpath(name).rename(self.target)
        self.is_published = True
        for path, target in companion_targets.items():
            with wrap_os_errors(f"{self.target} is written, but this file beside it is not", target):
                if not rename_without_replacing(output_folder / path, target):
                    output_folder.joinpath(path).rename(target)


def _find_leftovers(staging: StagingFolder) -> list[Leftover]:
    """Leftovers in the staging folder and beside it that are known to be from a run."""
    leftovers, aside_folder = [], staging.aside_path
    if staging.is_left_over() and (size := staging.find_unfinished_bytes()) is not None:
        leftovers.append(Leftover("unfinished output", str(staging.path), size))
    if staging.is_target_moved_aside:
        leftovers.append(Leftover("output moved aside, to be put back", str(aside_folder), folder_size(aside_folder)))
    elif staging.has_aside_folder and not list_unknown_files(aside_folder, staging.owned_names.read_names()):
        leftovers.append(Leftover("replaced output", str(aside_folder), folder_size(aside_folder)))
    return leftovers
