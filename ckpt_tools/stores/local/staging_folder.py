"""The driver of local outputs: a hidden folder beside the destination, locked while a process writes, and renamed.

    one step (Linux)          out        <->  output                        then the old files are removed there
    two steps (NFS, Lustre)   out         ->  .out.ckpt-tools-replaced      killed here: put back by the next run
                              output      ->  out                           killed here: removed by the next run
    a single file             output/out  ->  out                           refused if an unexpected one is there

Files are removed by name only. The names of an output are written down before its files are made, and those of a
folder that it replaces before the two are swapped, so that the next run after a kill knows which files are a run's. A
file whose name is not written down stays.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.stores.destination import JournalLog, StoreDestination
from ckpt_tools.stores.local.contents import (
    contents_of_file,
    contents_of_folder,
    exists_or_link,
    folder_size,
    is_nonempty_folder,
    is_real_folder,
    is_regular_file,
    open_folder,
    scan_folder,
)
from ckpt_tools.stores.local.renames import exchange_paths, fsync_folders, rename_to_free_name
from ckpt_tools.stores.local.store import LocalFileWriter, LocalStore, wrap_os_errors
from ckpt_tools.stores.output_names import PARTIAL_FOLDER_NAME, SHARED_TOKEN_NAME, OutputForm
from ckpt_tools.stores.publishing import check_no_unexpected_files, format_names, list_parent_folders
from ckpt_tools.stores.staging import Leftover, Staging

REPLACED_SUFFIX = ".ckpt-tools-replaced"
OUTPUT_FOLDER_NAME = "output"
OWNED_NAMES_FILE = "names"

_LOG_NAME_FORM = re.compile(r"\d+\.log")
PART_FILE_FORM = re.compile(r"(?P<number>\d+)-of-(?P<count>\d+)\.(?P<kind>log|names)")
"""Files of one part of a conversion that several processes make together (``part_staging``)."""


def _append_bytes(path: Path, data: bytes) -> None:
    """Raises StoreError. Written bytes are in the kernel, so an error of closing would lose nothing."""
    with wrap_os_errors("writing failed", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            with suppress(OSError):
                os.close(descriptor)


@dataclass(slots=True)
class OwnedNames:
    """The list of names in the file ``path``.

    A name is added before the file of that name is made. So every file of a run is in the list, and a file that is not
    in the list is another program's and is never removed.
    """

    path: Path

    def add_names(self, names: Iterable[str]) -> None:
        # The break is in front: a full disk may have cut off the line before.
        _append_bytes(self.path, "".join(f"\n{json.dumps(name)}" for name in names).encode())

    def read_names(self) -> frozenset[str]:
        """All names. A line that was cut off is left out: no file was made after it."""
        json_values: list[object] = []
        with suppress(FileNotFoundError):
            for line in self.path.read_bytes().splitlines():
                with suppress(ValueError):
                    json_values.append(json.loads(line))
        return frozenset(name for name in json_values if isinstance(name, str))


@dataclass(slots=True)
class _NameRecordingStore(LocalStore):
    """An output folder. The name of each file is written down beside the folder before the file is made."""

    def create(self, path: str, size_bytes: int) -> LocalFileWriter:
        OwnedNames(self.root.with_name(OWNED_NAMES_FILE)).add_names([path])
        # Without arguments it would look for the class that the decorator replaced.
        return super(_NameRecordingStore, self).create(path, size_bytes)


@dataclass(slots=True)
class LocalLog:
    """A log in a file."""

    path: Path

    def read(self) -> bytes:
        with wrap_os_errors("reading failed", self.path), suppress(FileNotFoundError):
            return self.path.read_bytes()
        return b""

    def append(self, data: bytes) -> None:
        _append_bytes(self.path, data)

    def clear(self) -> None:
        with wrap_os_errors("removing failed", self.path):
            self.path.unlink(missing_ok=True)


@dataclass(slots=True)
class LocalStaging(Staging):
    """The hidden folder beside ``target`` in which its output is written, and the one in which an old output may be.

    .out.ckpt-tools-partial/      locked while a process writes
        output/                   becomes the folder ``out``, or holds the file ``out``
        names                     ``OwnedNames``: the files of the output, and those that it replaces
        123.log                   the journal; 123 is the inode of ``output``
    3-of-64.log               the journal of a part of it
        seen                      a token: other machines see by it that they share the folder
    .out.ckpt-tools-replaced/     the replaced output, where two folders cannot be swapped in one step
    """

    target: Path
    form: OutputForm
    fsync: bool = False
    path: Path = field(init=False)
    output: Path = field(init=False)
    aside_path: Path = field(init=False)
    owned_names: OwnedNames = field(init=False)
    store: LocalStore = field(init=False)
    destination: StoreDestination = field(init=False)
    log: JournalLog = field(init=False)
    _old_folder: Path | None = field(default=None, init=False)
    """Where the old output is that was swapped with the new one."""

    def __post_init__(self) -> None:
        # The root folder, which has no name, is refused later.
        self.path = self.target.parent / f".{self.target.name}{PARTIAL_FOLDER_NAME}"
        self.output = self.path / OUTPUT_FOLDER_NAME
        self.aside_path = self.target.parent / f".{self.target.name}{REPLACED_SUFFIX}"
        self.owned_names = OwnedNames(self.path / OWNED_NAMES_FILE)
        self.store = self._make_store()
        self.destination = StoreDestination(self.store)

    def _make_store(self) -> LocalStore:
        return _NameRecordingStore(self.output, replaces_existing=True, fsync=self.fsync)

    @property
    def finished_store(self) -> LocalStore:
        return self.store

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

    @contextmanager
    def hold(self) -> Iterator[None]:
        with wrap_os_errors("cannot write there", self.target.parent):
            lock_descriptor = self._create_and_lock()
        try:
            with wrap_os_errors("cannot write there", self.target.parent):
                self._recover_moved_aside()
            yield
        finally:
            with suppress(OSError):
                self.path.rmdir()  # it stays if it has files
            with suppress(OSError):
                os.close(lock_descriptor)

    def _create_and_lock(self) -> int:
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

    def _recover_moved_aside(self) -> None:
        """Put back, or remove, the folder that ``_replace_in_two_steps`` moved aside before its process was killed: the
        target is missing if it was killed between the two steps.

        Raises:
            DestinationExistsError: it contains unknown files.
        """
        if self.is_target_moved_aside:
            self.aside_path.rename(self.target)
        elif self.has_aside_folder:
            owned_names = self.owned_names.read_names()
            if unknown_files := list_unknown_files(self.aside_path, owned_names):
                raise DestinationExistsError(
                    f"{self.aside_path} is the temporary folder of a replaced checkpoint, but it contains other files: "
                    f"{format_names(unknown_files)}; move it away"
                )
            remove_files_by_name(self.aside_path, owned_names)
            self.aside_path.rmdir()

    def prepare(self, *, resume: bool) -> None:
        with wrap_os_errors("cannot write there", self.target.parent):
            self.refuse_unknown_files()
            if not (resume and is_real_folder(self.output) and self.journal_path.is_file()):
                self._remove_own_files()
                self.output.mkdir()
            self.log = LocalLog(self.journal_path)

    def refuse_unknown_files(self) -> None:
        """Raises DestinationExistsError if other files than a run's are in the folder."""
        unknown_paths = [path for path in self.path.iterdir() if not _is_own_entry(path)]
        _refuse_unknown_files(self.path, sorted(path.name for path in unknown_paths))
        if is_real_folder(self.output):
            _refuse_unknown_files(self.output, list_unknown_files(self.output, self.owned_names.read_names()))

    def discard(self) -> None:
        """Remove the run's files; the list of names stays if it is still needed."""
        with wrap_os_errors("removing failed", self.target):
            self._remove_own_files()

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

    def list_leftovers(self) -> Iterator[Leftover]:
        """Files of an ended run in the folder and beside it."""
        with wrap_os_errors("looking failed", self.target):
            aside_folder = self.aside_path
            if self._is_left_over() and (size := self._find_unfinished_bytes()) is not None:
                yield Leftover("unfinished output", str(self.path), size)
            if self.is_target_moved_aside:
                yield Leftover("output moved aside, to be put back", str(aside_folder), folder_size(aside_folder))
            elif self.has_aside_folder and not list_unknown_files(aside_folder, self.owned_names.read_names()):
                yield Leftover("replaced output", str(aside_folder), folder_size(aside_folder))

    def _is_left_over(self) -> bool:
        """True if the folder exists and no process writes into it. Raises DestinationExistsError if one does."""
        if not is_real_folder(self.path):
            return False
        with suppress(FileNotFoundError), open_folder(self.path, os.O_NOFOLLOW) as descriptor:
            self._lock(descriptor)
            return True
        return False

    def _find_unfinished_bytes(self) -> int | None:
        """Size of the run's files; None if the folder has only other files."""
        own_paths = [path for path in self.path.iterdir() if _is_own_entry(path)]
        if not own_paths and any(self.path.iterdir()):
            return None
        other_paths = [path for path in own_paths if path.name not in (OUTPUT_FOLDER_NAME, OWNED_NAMES_FILE)]
        output_sizes = scan_folder(self.output)[0] if self.output in own_paths else {}
        owned_names = self.owned_names.read_names()
        own_output_bytes = sum(size for name, size in output_sizes.items() if name in owned_names)
        return own_output_bytes + sum(path.lstat().st_size for path in other_paths)

    def note_publishing(self, paths: Sequence[str], replaced: Mapping[str, int]) -> Collection[str]:
        """Nothing goes before: folders are swapped. A killed run may have left more than ``paths``, such as digests
        that are not wanted now."""
        with wrap_os_errors("publishing failed", self.target):
            own_names = self.owned_names.read_names() | {*paths}
            _refuse_unknown_files(self.output, list_unknown_files(self.output, own_names))
            remove_files_by_name(self.output, own_names - {*paths})
            if self.fsync:
                fsync_folders(*(folder for folder, _, _ in os.walk(self.output)))
            for target in self._companion_targets(paths).values():
                check_no_unexpected_files(contents_of_file(target), str(target), replaced)
            if self.form.file_name is not None:
                # Old companions go first, so that none ever describes another file.
                return replaced.keys() - {self.form.file_name}
            if replaced:
                self.owned_names.add_names(replaced)
            return ()

    def _companion_targets(self, paths: Sequence[str]) -> dict[str, Path]:
        """By name, the paths of the files that describe a single file, such as its digests."""
        is_file = self.form.file_name is not None
        return {path: self.target.with_name(path) for path in paths if is_file and path != self.form.file_name}

    def show_files(self, paths: Sequence[str], replaced: Mapping[str, int]) -> None:
        with wrap_os_errors("publishing failed", self.target):
            if (file_name := self.form.file_name) is not None:
                rename = Path.rename if file_name in replaced else rename_to_free_name
                rename(self.output / file_name, self.target)
            elif is_nonempty_folder(self.target):
                self._old_folder = self._replace_folder(replaced)
            else:
                self.output.rename(self.target)

    def _replace_folder(self, replaced: Mapping[str, int]) -> Path:
        """Put the output in the place of the target folder, which holds ``replaced`` and nothing else. Returns the path
        that the old folder has then.

        Raises:
            DestinationExistsError: files were added to it meanwhile; everything is as it was.
        """
        if not exchange_paths(self.output, self.target):
            return self._replace_in_two_steps(replaced)
        try:
            self._refuse_added_files(self.output, replaced)
        except DestinationExistsError:
            exchange_paths(self.output, self.target)
            raise
        return self.output

    def _replace_in_two_steps(self, replaced: Mapping[str, int]) -> Path:
        """``_replace_folder`` where two names cannot be swapped."""
        self.target.rename(self.aside_path)
        try:
            self._refuse_added_files(self.aside_path, replaced)
            self.output.rename(self.target)
        except (OSError, DestinationExistsError):
            self.aside_path.rename(self.target)
            raise
        return self.aside_path

    def _refuse_added_files(self, old_folder: Path, known_files: Mapping[str, int]) -> None:
        contents = contents_of_folder(old_folder)
        if contents is not None and (added_files := contents.find_unexpected_files(known_files)):
            raise DestinationExistsError(
                f"{self.target} is unchanged, because files were added to it meanwhile: {format_names(added_files)}"
            )

    def finish_publishing(self, paths: Sequence[str], replaced: Mapping[str, int]) -> None:
        """Show the files beside a file, and remove the folder that was replaced."""
        with wrap_os_errors("publishing failed", self.target):
            for path, target in self._companion_targets(paths).items():
                with wrap_os_errors(f"{self.target} is written, but this file beside it is not", target):
                    rename_to_free_name(self.output / path, target)
            if self._old_folder is not None:
                self._remove_old_folder(self._old_folder, replaced)
            if self.fsync:
                fsync_folders(self.target.parent)

    def _remove_old_folder(self, old_folder: Path, replaced: Mapping[str, int]) -> None:
        """Remove the old folder by the names in it; if that fails, the next run does it.

        Raises:
            DestinationExistsError: something came into it even now, by a process that had it open; it stays.
        """
        try:
            remove_files_by_name(old_folder, replaced)
            old_folder.rmdir()
        except OSError as error:
            if error.errno == errno.ENOTEMPTY and _has_more_than_folders(old_folder, replaced):
                # What is left there is not ours, whatever it is called.
                self.owned_names.path.unlink(missing_ok=True)
                raise DestinationExistsError(
                    f"{self.target} is written; files that were added to the old one meanwhile are kept in "
                    f"{old_folder}; move them away"
                ) from error


def _has_more_than_folders(old_folder: Path, removed_names: Collection[str]) -> bool:
    """True if a folder whose files were removed by name holds more than folders of these names, which could not be
    removed: a file in it is another's, whatever it is called."""
    contents, known_folders = (
        contents_of_folder(old_folder),
        {f"{each}/" for each in list_parent_folders(removed_names)},
    )
    return contents is not None and (bool(contents.files) or not known_folders.issuperset(contents.others))


def _is_own_entry(path: Path) -> bool:
    """True if a run makes a file or folder of this name and kind in its staging folder."""
    if path.name == OUTPUT_FOLDER_NAME:
        return is_real_folder(path)
    has_own_name = path.name in (OWNED_NAMES_FILE, SHARED_TOKEN_NAME) or any(
        form.fullmatch(path.name) is not None for form in (_LOG_NAME_FORM, PART_FILE_FORM)
    )
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
