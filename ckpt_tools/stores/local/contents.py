"""Lists what exists at a local path. Nothing here changes anything."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_tools.errors import UsageError
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.output_names import OutputForm, OutputKind
from ckpt_tools.stores.publishing import DestinationContents, check_free


def resolve_target(target: Path, form: OutputForm) -> Path:
    """The path without links. The last part of a file's path is kept: a link to a file is itself replaced."""
    is_folder = form.file_name is None
    return Path(os.path.realpath(target)) if is_folder else Path(os.path.realpath(target.parent), target.name)


def list_contents_at(path: Path, form: OutputForm) -> DestinationContents | None:
    """What exists at a path. Links are not followed, but a link to a file counts as the file. Raises OSError."""
    return contents_of_folder(path) if form.file_name is None else contents_of_file(path)


def contents_of_file(path: Path) -> DestinationContents | None:
    if not exists_or_link(path):
        return None
    files = {path.name: path.stat().st_size} if path.is_file() else {}
    return DestinationContents(LocalStore(path.parent, only_file=path.name), files, () if files else (path.name,))


def contents_of_folder(path: Path) -> DestinationContents | None:
    if not path.is_dir():
        return None
    return DestinationContents.of_folder(LocalStore(path), *scan_folder(path))


def scan_folder(root: Path) -> tuple[dict[str, int], list[str]]:
    """Files by relative name with their sizes, and the names of links, empty folders and special files."""
    files: dict[str, int] = {}
    others: list[str] = []
    folders_left = [""]
    while folders_left:
        prefix = folders_left.pop()
        with os.scandir(root / prefix) as entries:
            is_empty = True
            for entry in entries:
                is_empty, name = False, prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders_left.append(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    files[name] = entry.stat(follow_symlinks=False).st_size
                else:
                    others.append(name)
        if is_empty and prefix:
            others.append(prefix)
    return files, others


def folder_size(folder: Path) -> int:
    return sum(scan_folder(folder)[0].values())


def check_path_free(target: Path, form: OutputForm, *, overwrite: bool) -> None:
    """Raises DestinationExistsError or UsageError if ``target`` may not, or cannot, be taken."""
    if os.path.ismount(target):
        raise UsageError(f"{target} is a mount point and cannot be replaced as a whole; name a folder inside it")
    # A folder that may not be listed is looked into only if that decides.
    is_taken = not overwrite and exists_or_link(target) and (target.is_file() or is_nonempty_folder(target))
    existing_kinds: list[OutputKind] = ["folder" if target.is_dir() else "file"] if target.exists() else []
    check_free(str(target), form.kind, is_taken=is_taken, existing_kinds=existing_kinds, overwrite=overwrite)


def is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def exists_or_link(path: Path) -> bool:
    """True if the path is a file, a folder or a link, broken or not. Raises OSError if it cannot be determined."""
    return path.is_symlink() or path.exists()


def is_nonempty_folder(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


@contextmanager
def open_folder(folder: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_regular_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
