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
from ckpt_tools.stores.local.contents import (
    contents_of_folder,
    exists_or_link,
    is_real_folder,
    is_regular_file,
    open_folder,
    scan_folder,
)
from ckpt_tools.stores.local.store import wrap_os_errors
from ckpt_tools.stores.output_names import SHARED_TOKEN_NAME

STAGING_SUFFIX = ".ckpt-tools-partial"
REPLACED_SUFFIX = ".ckpt-tools-replaced"
OUTPUT_FOLDER_NAME = "output"
OWNED_NAMES_FILE = "names"

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


@dataclass(frozen=True, slots=True)
class StagingFolder:
    """The hidden folder beside ``target`` in which its output is written, and the one in which an old output may be.

    .out.ckpt-tools-partial/      locked while a process writes
        output/                   becomes the folder ``out``, or holds the file ``out``
        names                     ``OwnedNames``: the files of the output, and those that it replaces
        123.log                   the journal; 123 is the inode of ``output``
        seen                      by which other machines see that they share the folder
    .out.ckpt-tools-replaced/     the replaced output, where two folders cannot be swapped in one step
    """

    target: Path

    @property
    def path(self) -> Path:
        return self.target.with_name(f".{self.target.name}{STAGING_SUFFIX}")

    @property
    def output(self) -> Path:
        return self.path / OUTPUT_FOLDER_NAME

    @property
    def owned_names(self) -> OwnedNames:
        return OwnedNames(self.path / OWNED_NAMES_FILE)

    @property
    def aside_path(self) -> Path:
        return self.target.with_name(f".{self.target.name}{REPLACED_SUFFIX}")

    @property
    def has_aside_folder(self) -> bool:
        return is_real_folder(self.aside_path)

    @property
    def is_target_moved_aside(self) -> bool:
        """True if a run was killed after it moved the old output aside and before it put the new one there."""
        return not exists_or_link(self.target) and self.has_aside_folder

    @property
    def journal_path(self) -> Path:
        """The log of the folder ``output`` that is there now, named by its inode.

        A run may be killed after it swapped its output with the folder that it replaces, and before it removed that
        folder. Such a folder has another inode and so no log, and is not taken for unfinished output.
        """
        return self.path / f"{self.output.lstat().st_ino}.log"

    def create_and_lock(self) -> int:
        """Make the folder and lock it. The returned descriptor holds the lock, until it is closed or the process
        ends."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            # Until the lock is taken, its holder may rename or remove the folder at any time. The lock is then on a
            # folder that is no longer at this path, so that the two are compared, and this starts again. The lock
            # belongs to the open folder: it lasts until the duplicate is closed too.
            with suppress(FileExistsError):
                self.path.mkdir()
            with suppress(FileNotFoundError), open_folder(self.path, os.O_NOFOLLOW) as descriptor:
                self._lock(descriptor)
                if os.path.samestat(os.fstat(descriptor), self.path.stat()):
                    return os.dup(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DestinationExistsError(f"another process is writing into {self.path}; wait for it to end") from error

    def is_left_over(self) -> bool:
        """True if the folder exists and no process writes into it. Raises DestinationExistsError if one does."""
        if not is_real_folder(self.path):
            return False
        with suppress(FileNotFoundError), open_folder(self.path, os.O_NOFOLLOW) as descriptor:
            self._lock(descriptor)
            return True
        return False

    def prepare(self, *, resume: bool) -> None:
        """Keep the output of a killed run if ``resume``; else make an empty one.

        Raises:
            DestinationExistsError: there are files that no run wrote.
        """
        unknown_paths = [path for path in self.path.iterdir() if not _is_own_entry(path)]
        _refuse_unknown_files(self.path, sorted(path.name for path in unknown_paths))
        if is_real_folder(self.output):
            _refuse_unknown_files(self.output, list_unknown_files(self.output, self.owned_names.read_names()))
        if not (resume and is_real_folder(self.output) and self.journal_path.is_file()):
            self._remove_own_files()
            self.output.mkdir()

    def remove_other_output_files(self, kept_paths: Sequence[str]) -> None:
        """Remove the run's other files from the output. Raises DestinationExistsError if it has unknown files."""
        kept_names = {*kept_paths}
        owned_names = self.owned_names.read_names() | kept_names
        _refuse_unknown_files(self.output, list_unknown_files(self.output, owned_names))
        remove_files_by_name(self.output, owned_names - kept_names)

    def remove(self) -> None:
        """Remove the folder; it stays if it has other files, or if the list of names is still needed. Raises
        OSError."""
        self._remove_own_files()
        with suppress(OSError):
            self.path.rmdir()

    def _remove_own_files(self) -> None:
        """Remove the run's files, the list of names last; other files stay."""
        if is_real_folder(self.output):
            remove_files_by_name(self.output, self.owned_names.read_names())
            with suppress(OSError):
                self.output.rmdir()
        for path in self.path.iterdir():
            if path.name not in (OUTPUT_FOLDER_NAME, OWNED_NAMES_FILE) and _is_own_entry(path):
                path.unlink()
        if not self.output.exists() and not self.has_aside_folder:
            self.owned_names.path.unlink(missing_ok=True)

    def find_unfinished_bytes(self) -> int | None:
        """Size of the run's files; None if the folder has only other files."""
        own_paths = [path for path in self.path.iterdir() if _is_own_entry(path)]
        if not own_paths and any(self.path.iterdir()):
            return None
        other_paths = [path for path in own_paths if path.name not in (OUTPUT_FOLDER_NAME, OWNED_NAMES_FILE)]
        output_sizes = scan_folder(self.output)[0] if self.output in own_paths else {}
        owned_names = self.owned_names.read_names()
        own_output_bytes = sum(size for name, size in output_sizes.items() if name in owned_names)
        return own_output_bytes + sum(path.lstat().st_size for path in other_paths)


def _is_own_entry(path: Path) -> bool:
    """True if a run makes a file or folder of this name and kind in its staging folder."""
    if path.name == OUTPUT_FOLDER_NAME:
        return is_real_folder(path)
    has_own_name = path.name in (OWNED_NAMES_FILE, SHARED_TOKEN_NAME) or _LOG_NAME_FORM.fullmatch(path.name) is not None
    return has_own_name and stat.S_ISREG(path.lstat().st_mode)


def _refuse_unknown_files(folder: Path, names: list[str]) -> None:
    if names:
        raise DestinationExistsError(
            f"{folder} is the staging folder, but it contains files that ckpt-tools did not write: "
            f"{format_names(names)}; move them away"
        )


def list_unknown_files(folder: Path, known_names: Collection[str]) -> list[str]:
    """Everything in a folder except files of these names and their parent folders."""
    folders = set(list_parent_folders(known_names))
    contents = contents_of_folder(folder)
    if contents is None:
        return []
    others = [name for name in contents.others if name.removesuffix("/") not in folders]
    return sorted([*others, *(name for name in contents.files if name not in known_names)])


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
