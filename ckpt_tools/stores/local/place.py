"""A local destination that is absent, old, or complete, never half written.

A conversion writes into a hidden folder beside its destination, which holds the output and a log of its progress.
Publishing renames the output, or the one file in it, into place in one step (``publish``); any failure removes the
folder, unless it is to be resumed. The folder is locked while a process writes, so that a second writer gets an error,
and leftovers of a killed one can be told apart. Files are removed by name only (``owned``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.signals import allow_signals, defer_signals
from ckpt_tools.stores.destination import Claim, Leftover, Place
from ckpt_tools.stores.file_destination import StoreDestination
from ckpt_tools.stores.local.owned import (
    NAMES_NAME,
    OUTPUT_NAME,
    aside_of,
    claim_folder,
    is_ours,
    keep_only,
    lock_folder,
    log_path,
    names_in,
    prepare,
    remove_named,
    remove_ours,
    staging_folder,
    unknown_in,
)
from ckpt_tools.stores.local.present import (
    check_path_free,
    contents_of,
    file_at,
    folder_at,
    is_folder,
    is_full_folder,
    is_there,
    open_folder,
    present_at,
    resolved,
    size_of,
)
from ckpt_tools.stores.local.publish import (
    recover,
    remove_replaced,
    rename_new,
    replace_folder,
    sync,
)
from ckpt_tools.stores.local.store import LocalStore, LocalWriter, reporting
from ckpt_tools.stores.output_form import Folder, OutputForm, SingleFile
from ckpt_tools.stores.present import NOTHING, Present, already_exists, check_only


@dataclass(frozen=True, slots=True)
class LocalPlace(Place):
    """A path of the local file system, as the place of an output."""

    path: Path

    @property
    def url(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def present(self) -> Present | None:
        """What exists there; an output that a killed run moved aside counts, because the next claim puts it back."""
        with reporting("looking failed", self.path):
            place = resolved(self.path, self.form)
            aside = aside_of(place)
            return present_at(aside if not is_there(place) and is_folder(aside) else place, self.form)

    def check_free(self, *, overwrite: bool) -> None:
        with reporting("looking failed", self.path):
            place = resolved(self.path, self.form)
            if not overwrite and not is_there(place) and is_folder(aside_of(place)):
                raise already_exists(str(place))
            check_path_free(place, self.form, overwrite=overwrite)

    def claim(self, *, overwrite: bool, resume: bool, fsync: bool = False) -> AbstractContextManager[Staging]:
        return staged(self.path, self.form, overwrite=overwrite, resume=resume, fsync=fsync)

    def leftovers(self) -> Sequence[Leftover]:
        with reporting("looking failed", self.path):
            return [left for place in self._places() for left in find_leftovers(place)]

    def remove_leftovers(self) -> Sequence[Leftover]:
        found = self.leftovers()
        with reporting("removing failed", self.path):
            for place in filter(find_leftovers, self._places()):
                folder = staging_folder(place)
                lock = claim_folder(folder)
                try:
                    recover(place)
                    remove_ours(folder)
                finally:
                    os.close(lock)
        return found

    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        with reporting("removing failed", self.path):
            remove_named(resolved(self.path, Folder()), [name for batch in batches for name in batch])

    def _places(self) -> list[Path]:
        """Paths whose staging folders are looked for: the path as a file, and as a folder."""
        return list(dict.fromkeys(resolved(self.path, form) for form in (SingleFile(self.name), Folder())))


@dataclass(slots=True)
class LocalLog:
    """A file that is appended to, open from the first time until ``close``."""

    path: Path
    _number: int | None = None

    def read(self) -> bytes:
        with reporting("reading failed", self.path), suppress(FileNotFoundError):
            return self.path.read_bytes()
        return b""

    def append(self, data: bytes) -> None:
        with reporting("writing failed", self.path):
            if self._number is None:
                self._number = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            while data:
                data = data[os.write(self._number, data) :]

    def clear(self) -> None:
        self.close()
        with reporting("removing failed", self.path):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Appended bytes are in the kernel already, so errors of closing lose nothing and are ignored."""
        if self._number is not None:
            with suppress(OSError):
                os.close(self._number)
            self._number = None


@dataclass(slots=True)
class _OutputStore(LocalStore):
    """An output; the name of each file is written down beside it before the file is made."""

    def create(self, path: str, size_bytes: int) -> LocalWriter:
        names_in(self.root.parent).add([path])
        # Without arguments it would look for the class that the decorator replaced.
        return super(_OutputStore, self).create(path, size_bytes)


@dataclass(slots=True)
class Staging(Claim):
    """The hidden folder, the store in it to write into, and the place that the output will take."""

    folder: Path
    target: Path
    form: OutputForm
    overwrite: bool
    fsync: bool = False
    published: bool = False
    store: LocalStore = field(init=False)
    destination: StoreDestination = field(init=False)
    log: LocalLog = field(init=False)

    def __post_init__(self) -> None:
        self.store = _OutputStore(self.folder / OUTPUT_NAME, replaces=True, fsync=self.fsync)
        self.destination = StoreDestination(self.store)
        self.log = LocalLog(log_path(self.folder))

    @property
    def finished(self) -> LocalStore:
        return self.store

    def publish(self, paths: Sequence[str] = (), replaced: Mapping[str, int] = NOTHING) -> None:
        """Put the finished output in its place, in one step; other files of ``paths`` beside a file just after.

        A killed run may have left more than ``paths``, such as digests that are not wanted now; if they are given,
        nothing else is published. ``replaced`` are the existing files that may be removed.

        Raises:
            DestinationExistsError: there is something else, which is kept, or was added during publishing.
            StoreError: renaming failed.
        """
        output = self.store.root
        with reporting("publishing failed", self.target):
            if paths:
                keep_only(self.folder, paths)
            if self.fsync:
                sync(*(folder for folder, _, _ in os.walk(output)))
            check_path_free(self.target, self.form, overwrite=self.overwrite)
            if isinstance(self.form, SingleFile):
                self._publish_files(paths or [self.form.name], replaced)
            elif is_full_folder(self.target):
                check_only(folder_at(self.target), str(self.target), replaced)
                names_in(self.folder).add(replaced)
                old = replace_folder(output, self.target, replaced)
                self.published = True
                remove_replaced(old, self.folder, self.target, replaced)
            else:
                output.rename(self.target)
            self.published = True
            if self.fsync:
                sync(self.target.parent)

    def _publish_files(self, paths: Sequence[str], replaced: Mapping[str, int]) -> None:
        """Rename all files into one folder: the requested one, then those that describe it. Old ones of those are
        removed before, so that none ever describes another file."""
        name = self.target.name
        others = {path: self.target.with_name(path) for path in paths if path != name}
        for target in (self.target, *others.values()):
            check_only(file_at(target), str(target), replaced)
        remove_named(self.target.parent, replaced.keys() - {name})
        finished = self.store.root
        if name in replaced or not rename_new(finished / name, self.target):
            finished.joinpath(name).rename(self.target)
        self.published = True
        for path, target in others.items():
            with reporting(f"{self.target} is written, but this file beside it is not", target):
                if not rename_new(finished / path, target):
                    finished.joinpath(path).rename(target)


@contextmanager
def staged(
    target: Path, form: OutputForm, *, overwrite: bool, resume: bool = False, fsync: bool = False
) -> Iterator[Staging]:
    """A staging folder for ``target``; on leaving, it is removed with all output that was not published.

    With ``resume`` it holds the output of a killed run, and stays for the next one if this one fails. With ``fsync``
    the published output outlives a power failure.

    Raises:
        DestinationExistsError: the target exists and ``overwrite`` is False, another process is writing it, or other
        files are in the staging folder. UsageError: the target is a mount point. StoreError: the folder cannot be made.
    """
    # A signal interrupts the block, but not the making and the removal of the folder.
    with defer_signals():
        with reporting("cannot write there", target.parent):
            place = resolved(target, form)
            folder = staging_folder(place)
            check_path_free(place, form, overwrite=overwrite)
            lock = claim_folder(folder)
        staging, kept = None, resume
        try:
            with reporting("cannot write there", place.parent):
                recover(place)
                check_path_free(place, form, overwrite=overwrite)
                prepare(folder, resume=resume)
                staging = Staging(folder, place, form, overwrite, fsync)
            with allow_signals():
                yield staging
            kept = False
        finally:
            if staging is not None:
                staging.log.close()
            with suppress(OSError):
                if staging is None:
                    folder.rmdir()  # where it was new, nothing was begun in it
                elif not kept or staging.published:
                    remove_ours(folder)
            with suppress(OSError):
                os.close(lock)


def find_leftovers(place: Path) -> list[Leftover]:
    """Leftovers beside ``place`` that are known to be from a run."""
    found, folder, aside = [], staging_folder(place), aside_of(place)
    if _is_idle(folder) and (size := _unfinished_bytes(folder)) is not None:
        found.append(Leftover("unfinished output", str(folder), size))
    if is_folder(aside) and not is_there(place):
        found.append(Leftover("output moved aside, to be put back", str(aside), size_of(aside)))
    elif is_folder(aside) and not unknown_in(aside, names_in(folder).read()):
        found.append(Leftover("replaced output", str(aside), size_of(aside)))
    return found


def _is_idle(folder: Path) -> bool:
    """True if the folder exists and no process writes into it. Raises DestinationExistsError if one does."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    with suppress(FileNotFoundError), open_folder(folder, os.O_NOFOLLOW) as number:
        lock_folder(number, folder)
        return True
    return False


def _unfinished_bytes(folder: Path) -> int | None:
    """Size of the run's files in a staging folder; None if it contains only other files."""
    ours = [path for path in folder.iterdir() if is_ours(path)]
    if not ours and any(folder.iterdir()):
        return None
    files = [path.lstat().st_size for path in ours if path.name not in (OUTPUT_NAME, NAMES_NAME)]
    output, known = folder / OUTPUT_NAME, names_in(folder).read()
    inside = contents_of(output)[0] if output in ours else {}
    return sum(files) + sum(size for name, size in inside.items() if name in known)
