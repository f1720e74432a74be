"""Renames that put a finished folder in the place of another, or a file in its place, and undo a step cut short.

    one step (Linux)          out        <->  output                        then the old files are removed there
    two steps (NFS, Lustre)   out         ->  .out.ckpt-tools-replaced      killed here: put back by the next run
                              output      ->  out                           killed here: removed by the next run
    a single file             output/out  ->  out                           refused if an unexpected one is there

The folder ``output`` is in the staging folder, ``.out.ckpt-tools-partial``.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping
from pathlib import Path

from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.stores.destination import already_exists_error, format_names
from ckpt_tools.stores.local.contents import contents_of_folder, open_folder
from ckpt_tools.stores.local.staging_folder import StagingFolder, list_unknown_files, remove_files_by_name

_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
"""fcntl.h and linux/fs.h."""


def recover_moved_aside(staging: StagingFolder) -> None:
    """Put back, or remove, the folder that ``_replace_in_two_steps`` moved aside before its process was killed: the
    target is missing if it was killed between the two steps.

    Raises:
        DestinationExistsError: it contains unknown files.
    """
    aside_folder = staging.aside_path
    if staging.is_target_moved_aside:
        aside_folder.rename(staging.target)
        return
    if not staging.has_aside_folder:
        return
    owned_names = staging.owned_names.read_names()
    if unknown_files := list_unknown_files(aside_folder, owned_names):
        raise DestinationExistsError(
            f"{aside_folder} is the temporary folder of a replaced checkpoint, but it contains other files: "
            f"{format_names(unknown_files)}; move it away"
        )
    remove_files_by_name(aside_folder, owned_names)
    aside_folder.rmdir()


def replace_folder(staging: StagingFolder, replaced: Mapping[str, int]) -> Path:
    """Put the output in the place of the target folder, which holds ``replaced`` and nothing else. Returns the path
    that the old folder has then.

    Raises:
        DestinationExistsError: files were added to it meanwhile; everything is as it was.
    """
    output, target = staging.output, staging.target
    if not _exchange_paths(output, target):
        return _replace_in_two_steps(staging, replaced)
    try:
        _refuse_added_files(output, target, replaced)
    except DestinationExistsError:
        _exchange_paths(output, target)
        raise
    return output


def remove_replaced_folder(old_folder: Path, staging: StagingFolder, replaced: Mapping[str, int]) -> None:
    """Remove the old folder by the names in it; if that fails, the next run does it.

    Raises:
        DestinationExistsError: something came into it even now, by a process that had it open; it stays.
    """
    try:
        remove_files_by_name(old_folder, replaced)
        old_folder.rmdir()
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            # What is left there is not ours, whatever it is called.
            staging.owned_names.path.unlink(missing_ok=True)
            raise DestinationExistsError(
                f"{staging.target} is written; files that were added to the old one meanwhile are kept in "
                f"{old_folder}; move them away"
            ) from error


def _refuse_added_files(old_folder: Path, target: Path, known_files: Mapping[str, int]) -> None:
    contents = contents_of_folder(old_folder)
    if contents is not None and (added_files := contents.find_unexpected_files(known_files)):
        raise DestinationExistsError(
            f"{target} is unchanged, because files were added to it meanwhile: {format_names(added_files)}"
        )


def _exchange_paths(a: Path, b: Path) -> bool:
    """Swap two names in one step, or False where the system cannot (NFS, Lustre)."""
    return _rename_with_flag(a, b, _RENAME_EXCHANGE)


def rename_without_replacing(old: Path, new: Path) -> bool:
    """Give a file a name that nothing has. False where the system cannot make sure of that.

    Raises:
        DestinationExistsError: something has the name.
    """
    try:
        return _rename_with_flag(old, new, _RENAME_NOREPLACE)
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


def _replace_in_two_steps(staging: StagingFolder, replaced: Mapping[str, int]) -> Path:
    """``replace_folder`` where two names cannot be swapped."""
    target, aside_folder = staging.target, staging.aside_path
    target.rename(aside_folder)
    try:
        _refuse_added_files(aside_folder, target, replaced)
        staging.output.rename(target)
    except (OSError, DestinationExistsError):
        aside_folder.rename(target)
        raise
    return aside_folder


def fsync_folders(*folders: str | Path) -> None:
    for folder in folders:
        with open_folder(Path(folder)) as descriptor:
            os.fsync(descriptor)
