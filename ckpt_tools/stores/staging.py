"""A destination that is absent, old, or complete, never half.

A conversion writes into a hidden folder beside its destination. Publishing renames that folder, or the one file in
it, into place; any failure removes it. The folder is locked while a process writes, so that a second writer is told,
and what a killed one left is known to be nobody's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.errors import DestinationExistsError, StoreError
from ckpt_tools.stores.local import LocalStore

STAGING_SUFFIX = ".ckpt-tools-partial"


@dataclass(slots=True)
class Staging:
    """The hidden folder, as a store to write into, and the place it will take."""

    store: LocalStore
    target: Path
    is_file: bool
    published: bool = False

    def publish(self, *, fsync: bool) -> None:
        """Put the finished output in its place, in one rename. Raises StoreError."""
        finished = self.store.root / self.target.name if self.is_file else self.store.root
        try:
            if fsync:
                _sync_folders(self.store.root)
            _replace(finished, self.target)
            if fsync:
                _sync_folder(self.target.parent)
        except OSError as error:
            raise StoreError(f"publishing failed: {error.strerror}", path=str(self.target)) from error
        self.published = True


@contextmanager
def staged(target: Path, *, is_file: bool, overwrite: bool) -> Iterator[Staging]:
    """A staging folder for ``target``; on leaving, it is gone unless it was published.

    Raises:
        DestinationExistsError: the target exists and ``overwrite`` is False, or another process is writing it.
        StoreError: the folder cannot be made.
    """
    if not overwrite and _occupied(target):
        raise DestinationExistsError(f"{target} exists; choose another destination, or replace it with --overwrite")
    if target.exists() and target.is_dir() == is_file:
        kind = "folder" if is_file else "file"
        raise DestinationExistsError(f"{target} is a {kind}, which this output cannot replace; remove it first")
    folder = target.parent / f".{target.name}{STAGING_SUFFIX}"
    lock = _claim(folder)
    staging = Staging(LocalStore(folder), target, is_file)
    try:
        yield staging
    finally:
        if not staging.published or is_file:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _occupied(target: Path) -> bool:
    return target.exists() and not (target.is_dir() and not any(target.iterdir()))


def _claim(folder: Path) -> int:
    """An empty, locked folder; the lock goes with the process that holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"cannot write there: {error.strerror}", path=str(folder.parent)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise DestinationExistsError(f"another process is writing into {folder}; wait for it to end") from error
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return lock


def _replace(finished: Path, target: Path) -> None:
    """Rename over a file or an empty folder at once; a full folder is first moved aside, then removed."""
    aside = target.parent / f".{target.name}.ckpt-tools-replaced"
    if target.is_dir() and any(target.iterdir()):
        target.rename(aside)
        try:
            finished.rename(target)
        except OSError:
            aside.rename(target)
            raise
        shutil.rmtree(aside)
    else:
        finished.rename(target)


def _sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        _sync_folder(Path(folder))


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
