"""A destination that is absent, old, or complete, never half.

A conversion writes into a hidden folder beside its destination, which holds the output and a log of what was written of
it. Publishing renames the output, or the one file in it, into place in one step; any failure removes the folder, unless
it is to be resumed. The folder is locked while a process writes, so that a second writer is told, and what a killed one
left is known to be nobody's.

Nothing is removed but by its name. The names of an output are written down before its files are made, and those of a
folder that it replaces before the two are swapped; so whoever comes after a kill knows which files are ours. A file
whose name is not written down is somebody else's, wherever it lies, and stays.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.errors import DestinationExistsError, StoreError, UsageError
from ckpt_tools.signals import held_back, let_through
from ckpt_tools.stores.destination import Leftover, PartRules
from ckpt_tools.stores.file_destination import StoreDestination
from ckpt_tools.stores.local import LocalStore, LocalWriter
from ckpt_tools.stores.marker_files import TOKEN_NAME
from ckpt_tools.stores.present import NOTHING, Present, check_only, folders_of, listed

STAGING_SUFFIX = ".ckpt-tools-partial"
REPLACED_SUFFIX = ".ckpt-tools-replaced"
OUTPUT_NAME = "output"
"""In the staging folder: the folder that becomes the destination, or holds the file that does."""

NAMES_NAME = "names"
"""In the staging folder: the names of the files of the output, and of those that it replaces, a line of JSON each."""

_LOG_NAME = re.compile(r"\d+\.log")

_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
"""fcntl.h and linux/fs.h."""


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A path of the local file system, as the place of an output."""

    path: Path

    @property
    def url(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parts(self) -> PartRules:
        return PartRules()

    def present(self, *, is_file: bool) -> Present | None:
        """What was moved aside by a run that was killed stands there still: whoever claims the place puts it back."""
        with _reporting("looking failed", self.path):
            place = _place(self.path, is_file=is_file)
            aside = _aside(place)
            return _present(aside if not _is_there(place) and _is_folder(aside) else place, is_file=is_file)

    def check_free(self, *, is_file: bool, overwrite: bool) -> None:
        with _reporting("looking failed", self.path):
            place = _place(self.path, is_file=is_file)
            if not overwrite and not _is_there(place) and _is_folder(_aside(place)):
                raise _exists(place)
            _check_free(place, is_file=is_file, overwrite=overwrite)

    def claim(
        self, *, is_file: bool, overwrite: bool, resume: bool, fsync: bool = False
    ) -> AbstractContextManager[Staging]:
        return staged(self.path, is_file=is_file, overwrite=overwrite, resume=resume, fsync=fsync)

    def leftovers(self) -> Sequence[Leftover]:
        with _reporting("looking failed", self.path):
            return [left for place in self._places() for left in _leftovers(place)]

    def remove_leftovers(self) -> Sequence[Leftover]:
        found = self.leftovers()
        with _reporting("removing failed", self.path):
            for place in self._places():
                if _leftovers(place):
                    _remove_leftovers(place)
        return found

    def _places(self) -> list[Path]:
        """Where an output may have been staged: the path taken as a file, and as a folder."""
        return list(dict.fromkeys(_place(self.path, is_file=is_file) for is_file in (True, False)))


@dataclass(slots=True)
class LocalLog:
    """A file that is appended to, open from the first time until ``close``."""

    path: Path
    _number: int | None = None

    def read(self) -> bytes:
        with _reporting("reading failed", self.path), suppress(FileNotFoundError):
            return self.path.read_bytes()
        return b""

    def append(self, data: bytes) -> None:
        with _reporting("writing failed", self.path):
            if self._number is None:
                self._number = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            while data:
                data = data[os.write(self._number, data) :]

    def clear(self) -> None:
        self.close()
        with _reporting("removing failed", self.path):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """What was appended is with the kernel already, so that nothing can be lost, or needs to be raised."""
        if self._number is not None:
            with suppress(OSError):
                os.close(self._number)
            self._number = None


@dataclass(slots=True)
class _Names:
    """The names that were written down, by a file of them: one that is removed has to be among them."""

    path: Path

    def add(self, names: Iterable[str]) -> None:
        with _reporting("writing failed", self.path):
            number = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                data = "".join(f"{json.dumps(name)}\n" for name in names).encode()
                while data:
                    data = data[os.write(number, data) :]
            finally:
                os.close(number)

    def read(self) -> frozenset[str]:
        """An end that was cut off names nothing: no file was made after it."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return frozenset()
        return frozenset(name for line in lines if isinstance(name := _parsed(line), str))


def _parsed(line: bytes) -> object:
    with suppress(ValueError):
        return json.loads(line)
    return None


@dataclass(slots=True)
class _OutputStore(LocalStore):
    """An output, whose files are made after their names were written down beside it."""

    def create(self, path: str, size_bytes: int) -> LocalWriter:
        _names(self.root.parent).add([path])
        # Without arguments it would look for the class that the decorator replaced.
        return super(_OutputStore, self).create(path, size_bytes)


def _names(folder: Path) -> _Names:
    return _Names(folder / NAMES_NAME)


@dataclass(slots=True)
class Staging:
    """The hidden folder, the store in it to write into, and the place that the output will take."""

    folder: Path
    target: Path
    is_file: bool
    overwrite: bool
    fsync: bool = False
    published: bool = False
    store: LocalStore = field(init=False)
    destination: StoreDestination = field(init=False)
    log: LocalLog = field(init=False)

    def __post_init__(self) -> None:
        self.store = _OutputStore(self.folder / OUTPUT_NAME, replaces=True, fsync=self.fsync)
        self.destination = StoreDestination(self.store)
        self.log = LocalLog(_log_path(self.folder))

    @property
    def finished(self) -> LocalStore:
        return self.store

    def publish(self, paths: Sequence[str] = (), replaced: Mapping[str, int] = NOTHING) -> None:
        """Put the finished output in its place, in one step; what else of ``paths`` a file has beside it, just before.

        A killed run may have left more than ``paths`` where they are given, such as digests that are not asked for
        now; nothing else is published. Of what is there, ``replaced`` goes.

        Raises:
            DestinationExistsError: there is something else, which is kept, or came while the output took its place.
            StoreError: renaming failed.
        """
        output = self.store.root
        with _reporting("publishing failed", self.target):
            if paths:
                _keep_only(self.folder, paths)
            if self.fsync:
                _sync_folders(output)
            _check_free(self.target, is_file=self.is_file, overwrite=self.overwrite)
            if self.is_file:
                self._publish_files(paths or [self.target.name], replaced)
            elif _is_full_folder(self.target):
                check_only(_present(self.target, is_file=False), str(self.target), replaced)
                _names(self.folder).add(replaced)
                old = _replace(output, self.target, replaced)
                self.published = True
                _remove_replaced(old, self.folder, self.target, replaced)
            else:
                output.rename(self.target)
            self.published = True
            if self.fsync:
                _sync_folder(self.target.parent)

    def _publish_files(self, paths: Sequence[str], replaced: Mapping[str, int]) -> None:
        """All of them lie beside each other, the one that was asked for last."""
        ordered = [*(path for path in paths if path != self.target.name), self.target.name]
        targets = {path: self.target.with_name(path) for path in ordered}
        for target in targets.values():
            check_only(_present(target, is_file=True), str(target), replaced)
        for path, target in targets.items():
            finished = self.store.root / path
            if path in replaced or not _rename_new(finished, target):
                finished.rename(target)


def _keep_only(folder: Path, paths: Sequence[str]) -> None:
    """Remove what else is ours in the output. Raises DestinationExistsError where something is somebody else's."""
    output, wanted = folder / OUTPUT_NAME, {*paths}
    ours = _names(folder).read() | wanted
    _check_ours(output, ours)
    _remove_named(output, ours - wanted)


@contextmanager
def staged(
    target: Path, *, is_file: bool, overwrite: bool, resume: bool = False, fsync: bool = False
) -> Iterator[Staging]:
    """A staging folder for ``target``; on leaving, it is gone with what was not published.

    With ``resume`` it holds what a killed run left there, and stays for the next one where this one fails. With
    ``fsync`` what is published outlives a power failure.

    A target that is a link to a folder stands for that folder; one that is a link to a file is replaced itself.

    Raises:
        DestinationExistsError: the target exists and ``overwrite`` is False, or another process is writing it, or
        somebody else's files are where the output is to be staged. UsageError: the target is a mount point.
        StoreError: the folder cannot be made.
    """
    # A signal ends what is done with the folder, and neither its making nor its removal.
    with held_back():
        with _reporting("cannot write there", target.parent):
            place = _place(target, is_file=is_file)
            folder = _staging_folder(place)
            _check_free(place, is_file=is_file, overwrite=overwrite)
            lock = _claim(folder)
        staging, kept = None, resume
        try:
            with _reporting("cannot write there", place.parent):
                _recover(place)
                _check_free(place, is_file=is_file, overwrite=overwrite)
                _prepare(folder, resume=resume)
                staging = Staging(folder, place, is_file, overwrite, fsync)
            with let_through():
                yield staging
            kept = False
        finally:
            if staging is not None:
                staging.log.close()
            if staging is None:
                with suppress(OSError):
                    folder.rmdir()  # where it was new, nothing was begun in it
            elif not kept or staging.published:
                with suppress(OSError):
                    _remove_ours(folder)
            with suppress(OSError):
                os.close(lock)


def _place(target: Path, *, is_file: bool) -> Path:
    return Path(os.path.realpath(target.parent), target.name) if is_file else Path(os.path.realpath(target))


def _staging_folder(place: Path) -> Path:
    return place.with_name(f".{place.name}{STAGING_SUFFIX}")


def _prepare(folder: Path, *, resume: bool) -> None:
    """What a killed run left, where it is to be resumed; else nothing but a place for the output.

    Raises:
        DestinationExistsError: there are files that no run wrote.
    """
    output = folder / OUTPUT_NAME
    strangers = sorted(path.name for path in folder.iterdir() if not _is_our_name(path))
    if strangers:
        raise _strangers(folder, strangers)
    if _is_folder(output):
        _check_ours(output, _names(folder).read())
    if not (resume and _is_folder(output) and _log_path(folder).is_file()):
        _empty(folder)
        output.mkdir()


def _is_our_name(path: Path) -> bool:
    """Whether it is something that a run makes in the staging folder, of the kind that it makes."""
    if path.name == OUTPUT_NAME:
        return _is_folder(path)
    is_named = path.name in (NAMES_NAME, TOKEN_NAME) or _LOG_NAME.fullmatch(path.name) is not None
    return is_named and stat.S_ISREG(path.lstat().st_mode)


def _check_ours(folder: Path, ours: Collection[str]) -> None:
    """Raises DestinationExistsError where a folder of ours holds anything but the files that are."""
    unknown = _unknown(folder, ours)
    if unknown:
        raise _strangers(folder, unknown)


def _strangers(folder: Path, names: list[str]) -> DestinationExistsError:
    return DestinationExistsError(
        f"{folder} is the staging folder, but it contains files that ckpt-tools did not write: {listed(names)}; "
        "move them away"
    )


def _unknown(folder: Path, known: Collection[str]) -> list[str]:
    """All that is in a folder but for files of these names, and for the folders that hold, or would hold, them."""
    folders = set(folders_of(known))
    found = _present(folder, is_file=False)
    if found is None:
        return []
    others = [name for name in found.others if name.removesuffix("/") not in folders]
    return sorted([*others, *(name for name in found.files if name not in known)])


def _present(path: Path, *, is_file: bool) -> Present | None:
    """What is at a path, links not followed; but a link to a file stands for the file. Raises OSError."""
    if is_file:
        store = LocalStore(path.parent, only=path.name)
        if not _is_there(path):
            return None
        return Present(store, {path.name: path.stat().st_size}) if path.is_file() else Present(store, {}, [path.name])
    if not path.is_dir():
        return None
    files, others = _contents(path)
    return Present(LocalStore(path), files, others) if files or others else None


def _contents(root: Path) -> tuple[dict[str, int], list[str]]:
    """Files by relative name, and the names of all that is neither a file nor a folder with something in it."""
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


def _log_path(folder: Path) -> Path:
    """The log of the output that is there now, by the number of its folder.

    A run may be killed after it swapped its output with the folder that it replaces, and before it removed that one,
    which must not be taken for unfinished output.
    """
    return folder / f"{folder.joinpath(OUTPUT_NAME).lstat().st_ino}.log"


def _leftovers(place: Path) -> list[Leftover]:
    """What a run left, as far as it can be known to be a run's."""
    found, folder, aside = [], _staging_folder(place), _aside(place)
    if _is_idle(folder) and (size := _num_bytes(folder)) is not None:
        found.append(Leftover("unfinished output", str(folder), size))
    if _is_folder(aside) and not _is_there(place):
        found.append(Leftover("output moved aside, to be put back", str(aside), _size(aside)))
    elif _is_folder(aside) and not _unknown(aside, _names(folder).read()):
        found.append(Leftover("replaced output", str(aside), _size(aside)))
    return found


def _is_idle(folder: Path) -> bool:
    """Whether it is there and no process writes into it. Raises DestinationExistsError where one does."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    with suppress(FileNotFoundError), _descriptor(folder, os.O_NOFOLLOW) as number:
        _lock(number, folder)
        return True
    return False


def _num_bytes(folder: Path) -> int | None:
    """Of what is ours in a staging folder; None where it holds something, and nothing of ours."""
    ours = [path for path in folder.iterdir() if _is_our_name(path)]
    if not ours and any(folder.iterdir()):
        return None
    files = [path.lstat().st_size for path in ours if path.name not in (OUTPUT_NAME, NAMES_NAME)]
    output, known = folder / OUTPUT_NAME, _names(folder).read()
    inside = _contents(output)[0] if output in ours else {}
    return sum(files) + sum(size for name, size in inside.items() if name in known)


def _size(folder: Path) -> int:
    return sum(_contents(folder)[0].values())


def _remove_leftovers(place: Path) -> None:
    folder = _staging_folder(place)
    lock = _claim(folder)
    try:
        _recover(place)
        _remove_ours(folder)
    finally:
        os.close(lock)


@contextmanager
def _reporting(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {error.strerror}", path=str(path)) from error


def _check_free(place: Path, *, is_file: bool, overwrite: bool) -> None:
    """Raises DestinationExistsError or UsageError where ``place`` may not, or cannot, be taken."""
    if os.path.ismount(place):
        raise UsageError(f"{place} is a mount point and cannot be replaced as a whole; name a folder inside it")
    if not overwrite and _is_there(place) and (place.is_file() or _is_full_folder(place)):
        raise _exists(place)
    if place.exists() and place.is_dir() == is_file:
        kind = "folder" if is_file else "file"
        raise DestinationExistsError(f"{place} is a {kind}, which this output cannot replace; remove it first")


def _exists(place: Path) -> DestinationExistsError:
    return DestinationExistsError(f"{place} exists; choose another destination, or replace it with --overwrite")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_there(place: Path) -> bool:
    """Whether it is a file, a folder or a link. Raises OSError where that cannot be known; ``os.path`` would say no."""
    return place.is_symlink() or place.exists()


def _is_full_folder(place: Path) -> bool:
    return place.is_dir() and any(place.iterdir())


def _claim(folder: Path) -> int:
    """A descriptor that locks ``folder``, which is made; the lock goes with the process that holds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # Until we hold the lock, whoever does may publish the folder, or remove it, at any moment; then we start again.
        with suppress(FileExistsError):
            folder.mkdir()
        with suppress(FileNotFoundError), _descriptor(folder, os.O_NOFOLLOW) as number:
            _lock(number, folder)
            if os.path.samestat(os.fstat(number), folder.stat()):
                return os.dup(number)


def _lock(number: int, folder: Path) -> None:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DestinationExistsError(f"another process is writing into {folder}; wait for it to end") from error


@contextmanager
def _descriptor(folder: Path, flags: int = 0) -> Iterator[int]:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield number
    finally:
        os.close(number)


def _empty(folder: Path) -> None:
    """Remove what is ours from a staging folder, the names last; what is not ours stays."""
    output, known = folder / OUTPUT_NAME, _names(folder).read()
    if _is_folder(output):
        _remove_named(output, known)
        with suppress(OSError):
            output.rmdir()
    for path in folder.iterdir():
        if path.name not in (OUTPUT_NAME, NAMES_NAME) and _is_our_name(path):
            path.unlink()
    aside = folder.with_name(folder.name.removesuffix(STAGING_SUFFIX) + REPLACED_SUFFIX)
    if not output.exists() and not _is_folder(aside):
        _names(folder).path.unlink(missing_ok=True)


def _remove_ours(folder: Path) -> None:
    """Remove a staging folder; it stays where something that is not ours lies in it, or the names are needed still.

    Raises OSError.
    """
    _empty(folder)
    with suppress(OSError):
        folder.rmdir()


def _remove_named(folder: Path, names: Collection[str]) -> None:
    """Remove files by name, and the folders that are empty then. A folder or a link of such a name is no file of ours.

    Raises OSError.
    """
    for name in names:
        path = folder / name
        if _is_regular(path):
            path.unlink()
    for inner in folders_of(names):
        with suppress(OSError):
            folder.joinpath(inner).rmdir()


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _recover(place: Path) -> None:
    """Put back, or remove, what ``_replace_in_two_steps`` moved aside before its process was killed.

    Raises:
        DestinationExistsError: it cannot be told to be ours, so that it has to be looked at.
    """
    aside = _aside(place)
    if not _is_folder(aside):
        return
    if not _is_there(place):
        aside.rename(place)
        return
    known = _names(_staging_folder(place)).read()
    if unknown := _unknown(aside, known):
        raise DestinationExistsError(
            f"{aside} is the temporary folder of a replaced checkpoint, but it contains other files: "
            f"{listed(unknown)}; move it away"
        )
    _remove_named(aside, known)
    aside.rmdir()


def _replace(finished: Path, target: Path, replaced: Mapping[str, int]) -> Path:
    """Put a folder in the place of a full one, which holds ``replaced`` and nothing else; where that one is then.

    Raises:
        DestinationExistsError: something else came into it meanwhile; all is as it was.
    """
    if not _exchange(finished, target):
        return _replace_in_two_steps(finished, target, replaced)
    if unknown := _beyond(finished, replaced):
        _exchange(finished, target)
        raise _came_meanwhile(target, unknown)
    return finished


def _remove_replaced(old: Path, folder: Path, target: Path, replaced: Mapping[str, int]) -> None:
    """Remove the old folder by the names in it; where that fails, whoever comes next does it.

    Raises:
        DestinationExistsError: something came into it even now, by a process that had it open; it stays.
    """
    try:
        _remove_named(old, replaced)
        old.rmdir()
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            _names(folder).path.unlink(missing_ok=True)  # what is left there is not ours, whatever it is called
            raise DestinationExistsError(
                f"{target} is written; files that were added to the old one meanwhile are kept in {old}; move them away"
            ) from error


def _beyond(folder: Path, known: Mapping[str, int]) -> list[str]:
    found = _present(folder, is_file=False)
    return [] if found is None else found.beyond(known)


def _came_meanwhile(target: Path, unknown: list[str]) -> DestinationExistsError:
    return DestinationExistsError(f"{target} is unchanged, because files were added to it meanwhile: {listed(unknown)}")


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step, or False where the system cannot (NFS, Lustre)."""
    return _rename_flagged(a, b, _RENAME_EXCHANGE)


def _rename_new(old: Path, new: Path) -> bool:
    """Give a file a name that nothing has, or False where the system cannot be sure of that.

    Raises:
        DestinationExistsError: something has the name.
    """
    try:
        return _rename_flagged(old, new, _RENAME_NOREPLACE)
    except FileExistsError as error:
        raise _exists(new) from error


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
    """Where the old folder is then."""
    aside = _aside(target)
    target.rename(aside)
    try:
        if unknown := _beyond(aside, replaced):
            raise _came_meanwhile(target, unknown)
        finished.rename(target)
    except (OSError, DestinationExistsError):
        aside.rename(target)
        raise
    return aside


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}{REPLACED_SUFFIX}")


def _sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        _sync_folder(Path(folder))


def _sync_folder(folder: Path) -> None:
    with _descriptor(folder) as number:
        os.fsync(number)
