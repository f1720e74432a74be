"""Renames that put a finished folder or file in its place, in one step if the system can, and undo a step cut short."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping
from pathlib import Path

from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.stores.local.owned import aside_of, names_in, remove_named, staging_folder, unknown_in
from ckpt_tools.stores.local.present import folder_at, is_folder, is_there, open_folder
from ckpt_tools.stores.present import already_exists, listed

_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
"""fcntl.h and linux/fs.h."""


def recover(place: Path) -> None:
    """Put back, or remove, the folder that ``_replace_in_two_steps`` moved aside before its process was killed.

    Raises:
        DestinationExistsError: it contains unknown files.
    """
    aside = aside_of(place)
    if not is_folder(aside):
        return
    if not is_there(place):
        aside.rename(place)
        return
    known = names_in(staging_folder(place)).read()
    if unknown := unknown_in(aside, known):
        raise DestinationExistsError(
            f"{aside} is the temporary folder of a replaced checkpoint, but it contains other files: "
            f"{listed(unknown)}; move it away"
        )
    remove_named(aside, known)
    aside.rmdir()


def replace_folder(finished: Path, target: Path, replaced: Mapping[str, int]) -> Path:
    """Put a folder in the place of a full one, which holds ``replaced`` and nothing else; the old one's new path.

    Raises:
        DestinationExistsError: files were added to it meanwhile; everything is as it was.
    """
    if not _exchange(finished, target):
        return _replace_in_two_steps(finished, target, replaced)
    try:
        _refuse_added(finished, target, replaced)
    except DestinationExistsError:
        _exchange(finished, target)
        raise
    return finished


def remove_replaced(old: Path, folder: Path, target: Path, replaced: Mapping[str, int]) -> None:
    """Remove the old folder by the names in it; if that fails, the next run does it.

    Raises:
        DestinationExistsError: something came into it even now, by a process that had it open; it stays.
    """
    try:
        remove_named(old, replaced)
        old.rmdir()
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            names_in(folder).path.unlink(missing_ok=True)  # what is left there is not ours, whatever it is called
            raise DestinationExistsError(
                f"{target} is written; files that were added to the old one meanwhile are kept in {old}; move them away"
            ) from error


def _refuse_added(old: Path, target: Path, known: Mapping[str, int]) -> None:
    found = folder_at(old)
    if found is not None and (unknown := found.beyond(known)):
        raise DestinationExistsError(
            f"{target} is unchanged, because files were added to it meanwhile: {listed(unknown)}"
        )


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step, or False where the system cannot (NFS, Lustre)."""
    return _rename_flagged(a, b, _RENAME_EXCHANGE)


def rename_new(old: Path, new: Path) -> bool:
    """Give a file a name that nothing has. False where the system cannot make sure of that.

    Raises:
        DestinationExistsError: something has the name.
    """
    try:
        return _rename_flagged(old, new, _RENAME_NOREPLACE)
    except FileExistsError as error:
        raise already_exists(str(new)) from error


def _rename_flagged(a: Path, b: Path, flag: int) -> bool:
    """``renameat2``; False where the system or the file system does not have it. Raises OSError."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number))


def _replace_in_two_steps(finished: Path, target: Path, replaced: Mapping[str, int]) -> Path:
    """Path of the old folder after both renames."""
    aside = aside_of(target)
    target.rename(aside)
    try:
        _refuse_added(aside, target, replaced)
        finished.rename(target)
    except (OSError, DestinationExistsError):
        aside.rename(target)
        raise
    return aside


def sync(*folders: str | Path) -> None:
    for folder in folders:
        with open_folder(Path(folder)) as number:
            os.fsync(number)
