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
from ckpt_tools.stores.local.present import folder_at, is_folder, is_regular, open_folder
from ckpt_tools.stores.local.store import reporting
from ckpt_tools.stores.marker_files import TOKEN_NAME
from ckpt_tools.stores.present import folders_of, listed

STAGING_SUFFIX = ".ckpt-tools-partial"
REPLACED_SUFFIX = ".ckpt-tools-replaced"
OUTPUT_NAME = "output"
"""In the staging folder: the folder that becomes the destination, or holds the file that does."""

NAMES_NAME = "names"
"""In the staging folder: the names of the files of the output, and of those that it replaces, a line of JSON each."""

_LOG_NAME = re.compile(r"\d+\.log")


@dataclass(slots=True)
class WrittenNames:
    """The names that were written down, by a file of them: one that is removed has to be among them."""

    path: Path

    def add(self, names: Iterable[str]) -> None:
        with reporting("writing failed", self.path):
            number = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            with open(number, "ab", buffering=0) as file:  # noqa: PTH123 - a descriptor has no path
                # The break is in front: a full disk may have cut off the line before.
                data = "".join(f"\n{json.dumps(name)}" for name in names).encode()
                while data:
                    data = data[file.write(data) :]

    def read(self) -> frozenset[str]:
        """An end that was cut off names nothing: no file was made after it."""
        found: list[object] = []
        with suppress(FileNotFoundError):
            for line in self.path.read_bytes().splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return frozenset(name for name in found if isinstance(name, str))


def names_in(folder: Path) -> WrittenNames:
    return WrittenNames(folder / NAMES_NAME)


def keep_only(folder: Path, paths: Sequence[str]) -> None:
    """Remove the run's other files from the output. Raises DestinationExistsError if it contains unknown files."""
    output, wanted = folder / OUTPUT_NAME, {*paths}
    ours = names_in(folder).read() | wanted
    check_ours(output, ours)
    remove_named(output, ours - wanted)


def staging_folder(place: Path) -> Path:
    return place.with_name(f".{place.name}{STAGING_SUFFIX}")


def prepare(folder: Path, *, resume: bool) -> None:
    """Prepare the staging folder: keep the output of a killed run if ``resume``; else make an empty one.

    Raises:
        DestinationExistsError: there are files that no run wrote.
    """
    output = folder / OUTPUT_NAME
    _refuse_strangers(folder, sorted(path.name for path in folder.iterdir() if not is_ours(path)))
    if is_folder(output):
        check_ours(output, names_in(folder).read())
    if not (resume and is_folder(output) and log_path(folder).is_file()):
        _empty(folder)
        output.mkdir()


def is_ours(path: Path) -> bool:
    """True if a run makes a file or folder of this name and kind in its staging folder."""
    if path.name == OUTPUT_NAME:
        return is_folder(path)
    is_named = path.name in (NAMES_NAME, TOKEN_NAME) or _LOG_NAME.fullmatch(path.name) is not None
    return is_named and stat.S_ISREG(path.lstat().st_mode)


def check_ours(folder: Path, ours: Collection[str]) -> None:
    """Raises DestinationExistsError if the folder contains other files than these."""
    _refuse_strangers(folder, unknown_in(folder, ours))


def _refuse_strangers(folder: Path, names: list[str]) -> None:
    if names:
        raise DestinationExistsError(
            f"{folder} is the staging folder, but it contains files that ckpt-tools did not write: {listed(names)}; "
            "move them away"
        )


def unknown_in(folder: Path, known: Collection[str]) -> list[str]:
    """Everything in a folder except files of these names and their parent folders."""
    folders = set(folders_of(known))
    found = folder_at(folder)
    if found is None:
        return []
    others = [name for name in found.others if name.removesuffix("/") not in folders]
    return sorted([*others, *(name for name in found.files if name not in known)])


def log_path(folder: Path) -> Path:
    """The log of the output that is there now, by the number of its folder.

    A run may be killed after it swapped its output with the folder that it replaces, and before it removed that one,
    which must not be taken for unfinished output.
    """
    return folder / f"{folder.joinpath(OUTPUT_NAME).lstat().st_ino}.log"


def _empty(folder: Path) -> None:
    """Remove the run's files from a staging folder, the list of names last; other files stay."""
    output, known = folder / OUTPUT_NAME, names_in(folder).read()
    if is_folder(output):
        remove_named(output, known)
        with suppress(OSError):
            output.rmdir()
    for path in folder.iterdir():
        if path.name not in (OUTPUT_NAME, NAMES_NAME) and is_ours(path):
            path.unlink()
    target = folder.with_name(folder.name.removeprefix(".").removesuffix(STAGING_SUFFIX))
    if not output.exists() and not is_folder(aside_of(target)):
        names_in(folder).path.unlink(missing_ok=True)


def remove_ours(folder: Path) -> None:
    """Remove a staging folder; it stays if it contains other files, or if the list of names is still needed. Raises
    OSError."""
    _empty(folder)
    with suppress(OSError):
        folder.rmdir()


def remove_named(folder: Path, names: Collection[str]) -> None:
    """Remove files by name, then the folders that became empty. A folder or a link of such a name stays. Raises
    OSError."""
    for name in names:
        path = folder / name
        if is_regular(path):
            path.unlink()
    for inner in folders_of(names):
        with suppress(OSError):
            folder.joinpath(inner).rmdir()


def aside_of(target: Path) -> Path:
    return target.with_name(f".{target.name}{REPLACED_SUFFIX}")


def claim_folder(folder: Path) -> int:
    """Make ``folder`` and lock it. The returned descriptor holds the lock, until it is closed or the process ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # Until the lock is taken, its holder may publish or remove the folder at any time; then this starts again.
        with suppress(FileExistsError):
            folder.mkdir()
        with suppress(FileNotFoundError), open_folder(folder, os.O_NOFOLLOW) as number:
            lock_folder(number, folder)
            if os.path.samestat(os.fstat(number), folder.stat()):
                return os.dup(number)


def lock_folder(number: int, folder: Path) -> None:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DestinationExistsError(f"another process is writing into {folder}; wait for it to end") from error
