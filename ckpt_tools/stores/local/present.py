"""Lists what exists at a local path. Nothing here changes anything."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_tools.errors import UsageError
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.output_form import Kind, OutputForm, SingleFile
from ckpt_tools.stores.present import Present, check_free


def resolved(target: Path, form: OutputForm) -> Path:
    """The path without links. The last part of a file's path is kept: a link to a file is itself replaced."""
    is_file = isinstance(form, SingleFile)
    return Path(os.path.realpath(target.parent), target.name) if is_file else Path(os.path.realpath(target))


def present_at(path: Path, form: OutputForm) -> Present | None:
    """What exists at a path. Links are not followed, but a link to a file counts as the file. Raises OSError."""
    return file_at(path) if isinstance(form, SingleFile) else folder_at(path)


def file_at(path: Path) -> Present | None:
    store = LocalStore(path.parent, only=path.name)
    if not is_there(path):
        return None
    return Present(store, {path.name: path.stat().st_size}) if path.is_file() else Present(store, {}, [path.name])


def folder_at(path: Path) -> Present | None:
    if not path.is_dir():
        return None
    files, others = contents_of(path)
    return Present(LocalStore(path), files, others) if files or others else None


def contents_of(root: Path) -> tuple[dict[str, int], list[str]]:
    """Files by relative name with their sizes, and the names of links, empty folders and special files."""
    files: dict[str, int] = {}
    others: list[str] = []
    left = [""]
    while left:
        prefix = left.pop()
        with os.scandir(root / prefix) as entries:
            is_empty = True
            for entry in entries:
                is_empty, name = False, prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    left.append(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    files[name] = entry.stat(follow_symlinks=False).st_size
                else:
                    others.append(name)
        if is_empty and prefix:
            others.append(prefix)
    return files, others


def size_of(folder: Path) -> int:
    return sum(contents_of(folder)[0].values())


def check_path_free(place: Path, form: OutputForm, *, overwrite: bool) -> None:
    """Raises DestinationExistsError or UsageError where ``place`` may not, or cannot, be taken."""
    if os.path.ismount(place):
        raise UsageError(f"{place} is a mount point and cannot be replaced as a whole; name a folder inside it")
    # A folder that may not be listed is looked into only if that decides.
    is_taken = not overwrite and is_there(place) and (place.is_file() or is_full_folder(place))
    kinds: list[Kind] = ["folder" if place.is_dir() else "file"] if place.exists() else []
    check_free(str(place), form.kind, is_taken=is_taken, kinds=kinds, overwrite=overwrite)


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def is_there(place: Path) -> bool:
    """True if the path is a file, a folder or a link. Raises OSError where ``os.path`` would say False."""
    return place.is_symlink() or place.exists()


def is_full_folder(place: Path) -> bool:
    return place.is_dir() and any(place.iterdir())


@contextmanager
def open_folder(folder: Path, flags: int = 0) -> Iterator[int]:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield number
    finally:
        os.close(number)


def is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
