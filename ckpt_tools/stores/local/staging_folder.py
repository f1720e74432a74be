"""Files of a run beside a local destination: names in a staging folder, and removal by name.

Files are removed by name only. The names of an output are written down before its files are made, and those of a
folder that it replaces before the two are swapped, so that the next run after a kill knows which files are a run's. A
file whose name is not written down stays.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.stores.destination import format_names, list_parent_folders
from ckpt_tools.stores.local.contents import contents_of_folder, is_real_folder, is_regular_file, open_folder
from ckpt_tools.stores.local.store import wrap_os_errors
from ckpt_tools.stores.output_names import SHARED_TOKEN_NAME

STAGING_SUFFIX = ".ckpt-tools-partial"
REPLACED_SUFFIX = ".ckpt-tools-replaced"
OUTPUT_FOLDER_NAME = "output"
"""In the staging folder: the folder that becomes the destination, or holds the file that does."""

OWNED_NAMES_FILE = "names"
"""In the staging folder: the names of the files of the output, and of those that it replaces, a line of JSON each."""

_LOG_NAME_FORM = re.compile(r"\d+\.log")


@dataclass(slots=True)
class OwnedNames:
    """The list of names in the file ``path``.

    A name is added before the file of that name is made. So every file of a run is in the list, and a file that is not
    in the list was made by somebody else and is never removed.
    """

    path: Path

    def add_names(self, names: Iterable[str]) -> None:
        with wrap_os_errors("writing failed", self.path):
            descriptor = os.open(
                self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
            )
            with open(descriptor, "ab", buffering=0) as file:  # noqa: PTH123 - a descriptor has no path
                # The break is in front: a full disk may have cut off the line before.
                data = "".join(f"\n{json.dumps(name)}" for name in names).encode()
                while data:
                    data = data[file.write(data) :]

    def read_names(self) -> frozenset[str]:
        """All names. A line that was cut off is left out: no file was made after it."""
        json_values: list[object] = []
        with suppress(FileNotFoundError):
            for line in self.path.read_bytes().splitlines():
                with suppress(ValueError):
                    json_values.append(json.loads(line))
        return frozenset(name for name in json_values if isinstance(name, str))


def owned_names_of(folder: Path) -> OwnedNames:
    return OwnedNames(folder / OWNED_NAMES_FILE)


def remove_other_output_files(folder: Path, kept_paths: Sequence[str]) -> None:
    """Remove the run's other files from the output. Raises DestinationExistsError if it contains unknown files."""
    output, kept_names = folder / OUTPUT_FOLDER_NAME, {*kept_paths}
    owned_names = owned_names_of(folder).read_names() | kept_names
    check_only_known_files(output, owned_names)
    remove_files_by_name(output, owned_names - kept_names)


def staging_folder_of(target: Path) -> Path:
    return target.with_name(f".{target.name}{STAGING_SUFFIX}")


def prepare_staging_folder(folder: Path, *, resume: bool) -> None:
    """Prepare the staging folder: keep the output of a killed run if ``resume``; else make an empty one.

    Raises:
        DestinationExistsError: there are files that no run wrote.
    """
    output = folder / OUTPUT_FOLDER_NAME
    _refuse_unknown_files(folder, sorted(path.name for path in folder.iterdir() if not is_own_staging_entry(path)))
    if is_real_folder(output):
        check_only_known_files(output, owned_names_of(folder).read_names())
    if not (resume and is_real_folder(output) and journal_path(folder).is_file()):
        _empty_staging_folder(folder)
        output.mkdir()


def is_own_staging_entry(path: Path) -> bool:
    """True if a run makes a file or folder of this name and kind in its staging folder."""
    if path.name == OUTPUT_FOLDER_NAME:
        return is_real_folder(path)
    has_owned_name = (
        path.name in (OWNED_NAMES_FILE, SHARED_TOKEN_NAME) or _LOG_NAME_FORM.fullmatch(path.name) is not None
    )
    return has_owned_name and stat.S_ISREG(path.lstat().st_mode)


def check_only_known_files(folder: Path, owned_names: Collection[str]) -> None:
    """Raises DestinationExistsError if the folder contains other files than these."""
    _refuse_unknown_files(folder, list_unknown_files(folder, owned_names))


def _refuse_unknown_files(folder: Path, names: list[str]) -> None:
    if names:
        raise DestinationExistsError(
            f"{folder} is the staging folder, but it contains files that ckpt-tools did not write: "
            f"{format_names(names)}; "
            "move them away"
        )


def list_unknown_files(folder: Path, known_names: Collection[str]) -> list[str]:
    """Everything in a folder except files of these names and their parent folders."""
    folders = set(list_parent_folders(known_names))
    contents = contents_of_folder(folder)
    if contents is None:
        return []
    others = [name for name in contents.others if name.removesuffix("/") not in folders]
    return sorted([*others, *(name for name in contents.files if name not in known_names)])


def journal_path(folder: Path) -> Path:
    """The log of the folder ``output`` that is there now, named by its inode.

    A run may be killed after it swapped its output with the folder that it replaces, and before it removed that folder.
    Such a folder has another inode and so no log, and is not taken for unfinished output.
    """
    return folder / f"{folder.joinpath(OUTPUT_FOLDER_NAME).lstat().st_ino}.log"


def _empty_staging_folder(folder: Path) -> None:
    """Remove the run's files from a staging folder, the list of names last; other files stay."""
    output, owned_names = folder / OUTPUT_FOLDER_NAME, owned_names_of(folder).read_names()
    if is_real_folder(output):
        remove_files_by_name(output, owned_names)
        with suppress(OSError):
            output.rmdir()
    for path in folder.iterdir():
        if path.name not in (OUTPUT_FOLDER_NAME, OWNED_NAMES_FILE) and is_own_staging_entry(path):
            path.unlink()
    target = folder.with_name(folder.name.removeprefix(".").removesuffix(STAGING_SUFFIX))
    if not output.exists() and not is_real_folder(moved_aside_path(target)):
        owned_names_of(folder).path.unlink(missing_ok=True)


def remove_staging_folder(folder: Path) -> None:
    """Remove a staging folder; it stays if it contains other files, or if the list of names is still needed. Raises
    OSError."""
    _empty_staging_folder(folder)
    with suppress(OSError):
        folder.rmdir()


def remove_files_by_name(folder: Path, names: Collection[str]) -> None:
    """Remove files by name, then the folders that became empty. A folder or a link of such a name stays. Raises
    OSError."""
    for name in names:
        path = folder / name
        if is_regular_file(path):
            path.unlink()
    for inner in list_parent_folders(names):
        with suppress(OSError):
            folder.joinpath(inner).rmdir()


def moved_aside_path(target: Path) -> Path:
    return target.with_name(f".{target.name}{REPLACED_SUFFIX}")


def create_and_lock_folder(folder: Path) -> int:
    """Make ``folder`` and lock it. The returned descriptor holds the lock, until it is closed or the process ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # Until the lock is taken, its holder may rename or remove the folder at any time. The lock is then on a folder
        # that is no longer at this path, so that the two are compared, and this starts again. The lock belongs to the
        # open folder: it lasts until the duplicate is closed too.
        with suppress(FileExistsError):
            folder.mkdir()
        with suppress(FileNotFoundError), open_folder(folder, os.O_NOFOLLOW) as descriptor:
            lock_folder(descriptor, folder)
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return os.dup(descriptor)


def lock_folder(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DestinationExistsError(f"another process is writing into {folder}; wait for it to end") from error
