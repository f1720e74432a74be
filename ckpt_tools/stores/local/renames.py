"""Renames that a file system may not have, and what makes them last."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from ckpt_tools.stores.local.contents import open_folder
from ckpt_tools.stores.publishing import already_exists_error

_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
"""fcntl.h and linux/fs.h."""


def exchange_paths(a: Path, b: Path) -> bool:
    """Swap two names in one step, or False where the system cannot (NFS, Lustre)."""
    return _rename_with_flag(a, b, _RENAME_EXCHANGE)


def rename_to_free_name(old: Path, new: Path) -> None:
    """Give a file a name that nothing has; where the system cannot make sure of that, a file there is replaced.

    Raises:
        DestinationExistsError: something has the name.
    """
    try:
        if not _rename_with_flag(old, new, _RENAME_NOREPLACE):
            old.rename(new)
    except FileExistsError as error:
        raise already_exists_error(str(new)) from error


def _rename_with_flag(a: Path, b: Path, flag: int) -> bool:
    """``renameat2``; False where the system or the file system does not have it. Raises OSError."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), flag) == 0:
        return True
    error_number = ctypes.get_errno()
    if error_number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error_number, os.strerror(error_number))


def fsync_folders(*folders: str | Path) -> None:
    for folder in folders:
        with open_folder(Path(folder)) as descriptor:
            os.fsync(descriptor)
