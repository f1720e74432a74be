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

from ckpt_tools.signals import allow_signals, defer_signals
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
    exists_or_link,
    folder_size,
    is_nonempty_folder,
    is_real_folder,
    list_contents_at,
    open_folder,
    resolve_target,
    scan_folder,
)
from ckpt_tools.stores.local.publish import (
    fsync_folders,
    recover_moved_aside,
    remove_replaced_folder,
    rename_without_replacing,
    replace_folder,
)
from ckpt_tools.stores.local.staging_folder import (
    OUTPUT_FOLDER_NAME,
    OWNED_NAMES_FILE,
    create_and_lock_folder,
    is_own_staging_entry,
    journal_path,
    list_unknown_files,
    lock_folder,
    moved_aside_path,
    owned_names_of,
    prepare_staging_folder,
    remove_files_by_name,
    remove_other_output_files,
    remove_staging_folder,
    staging_folder_of,
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
            target = resolve_target(self.path, self.form)
            aside_folder = moved_aside_path(target)
            return list_contents_at(
                aside_folder if not exists_or_link(target) and is_real_folder(aside_folder) else target, self.form
            )

    def check_free(self, *, overwrite: bool) -> None:
        with wrap_os_errors("looking failed", self.path):
            target = resolve_target(self.path, self.form)
            if not overwrite and not exists_or_link(target) and is_real_folder(moved_aside_path(target)):
                raise already_exists_error(str(target))
            check_path_free(target, self.form, overwrite=overwrite)

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
                target = resolve_target(self.path, self.form)
                folder = staging_folder_of(target)
                check_path_free(target, self.form, overwrite=overwrite)
                lock_descriptor = create_and_lock_folder(folder)
            claim, keeps_output = None, resume
            try:
                with wrap_os_errors("cannot write there", target.parent):
                    recover_moved_aside(target)
                    check_path_free(target, self.form, overwrite=overwrite)
                    prepare_staging_folder(folder, resume=resume)
                    claim = LocalClaim(folder, target, self.form, overwrite, fsync)
                with allow_signals():
                    yield claim
                keeps_output = False
            finally:
                if claim is not None:
                    claim.log.close()
                with suppress(OSError):
                    if claim is None:
                        folder.rmdir()  # if it was new, nothing was begun in it
                    elif not keeps_output or claim.is_published:
                        remove_staging_folder(folder)
                with suppress(OSError):
                    os.close(lock_descriptor)

    def list_leftovers(self) -> Sequence[Leftover]:
        with wrap_os_errors("looking failed", self.path):
            return [left for target in self._candidate_targets() for left in find_leftovers(target)]

    def remove_leftovers(self) -> Sequence[Leftover]:
        leftovers = self.list_leftovers()
        with wrap_os_errors("removing failed", self.path):
            for target in filter(find_leftovers, self._candidate_targets()):
                folder = staging_folder_of(target)
                lock_descriptor = create_and_lock_folder(folder)
                try:
                    recover_moved_aside(target)
                    remove_staging_folder(folder)
                finally:
                    os.close(lock_descriptor)
        return leftovers

    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        with wrap_os_errors("removing failed", self.path):
            remove_files_by_name(resolve_target(self.path, FolderForm()), [name for batch in batches for name in batch])

    def _candidate_targets(self) -> list[Path]:
        """Paths whose staging folders are looked for: the path as a file, and as a folder."""
        return list(
            dict.fromkeys(resolve_target(self.path, form) for form in (SingleFileForm(self.name), FolderForm()))
        )


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
        owned_names_of(self.root.parent).add_names([path])
        # Without arguments it would look for the class that the decorator replaced.
        return super(_NameRecordingStore, self).create(path, size_bytes)


@dataclass(slots=True)
class LocalClaim(Claim):
    """The hidden folder, the store in it to write into, and the path that the output will have."""

    staging_folder: Path
    target: Path
    form: OutputForm
    overwrite: bool
    fsync: bool = False
    is_published: bool = False
    store: LocalStore = field(init=False)
    destination: StoreDestination = field(init=False)
    log: LocalLog = field(init=False)

    def __post_init__(self) -> None:
        self.store = _NameRecordingStore(
            self.staging_folder / OUTPUT_FOLDER_NAME, replaces_existing=True, fsync=self.fsync
        )
        self.destination = StoreDestination(self.store)
        self.log = LocalLog(journal_path(self.staging_folder))

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
                remove_other_output_files(self.staging_folder, paths)
            if self.fsync:
                fsync_folders(*(folder for folder, _, _ in os.walk(output)))
            check_path_free(self.target, self.form, overwrite=self.overwrite)
            if isinstance(self.form, SingleFileForm):
                self._publish_file_and_companions(paths or [self.form.name], replaced)
            elif is_nonempty_folder(self.target):
                check_no_unexpected_files(contents_of_folder(self.target), str(self.target), replaced)
                owned_names_of(self.staging_folder).add_names(replaced)
                old_folder = replace_folder(output, self.target, replaced)
                self.is_published = True
                remove_replaced_folder(old_folder, self.staging_folder, self.target, replaced)
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


def find_leftovers(target: Path) -> list[Leftover]:
    """Leftovers beside ``target`` that are known to be from a run."""
    leftovers, folder, aside_folder = [], staging_folder_of(target), moved_aside_path(target)
    if _is_unused_staging_folder(folder) and (size := _unfinished_bytes(folder)) is not None:
        leftovers.append(Leftover("unfinished output", str(folder), size))
    if is_real_folder(aside_folder) and not exists_or_link(target):
        leftovers.append(Leftover("output moved aside, to be put back", str(aside_folder), folder_size(aside_folder)))
    elif is_real_folder(aside_folder) and not list_unknown_files(aside_folder, owned_names_of(folder).read_names()):
        leftovers.append(Leftover("replaced output", str(aside_folder), folder_size(aside_folder)))
    return leftovers


def _is_unused_staging_folder(folder: Path) -> bool:
    """True if the folder exists and no process writes into it. Raises DestinationExistsError if one does."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    with suppress(FileNotFoundError), open_folder(folder, os.O_NOFOLLOW) as number:
        lock_folder(number, folder)
        return True
    return False


def _unfinished_bytes(folder: Path) -> int | None:
    """Size of the run's files in a staging folder; None if it contains only other files."""
    own_paths = [path for path in folder.iterdir() if is_own_staging_entry(path)]
    if not own_paths and any(folder.iterdir()):
        return None
    other_sizes = [
        path.lstat().st_size for path in own_paths if path.name not in (OUTPUT_FOLDER_NAME, OWNED_NAMES_FILE)
    ]
    output, owned_names = folder / OUTPUT_FOLDER_NAME, owned_names_of(folder).read_names()
    output_sizes = scan_folder(output)[0] if output in own_paths else {}
    return sum(other_sizes) + sum(size for name, size in output_sizes.items() if name in owned_names)
