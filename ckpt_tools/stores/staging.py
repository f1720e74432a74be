"""A destination that is absent, old, or complete, never half.

A conversion writes into a hidden folder beside its destination, which holds the output and a log of what was written of
it. Publishing renames the output, or the one file in it, into place in one step; any failure removes the folder, unless
it is to be resumed. The folder is locked while a process writes, so that a second writer is told, and what a killed one
left is known to be nobody's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.errors import DestinationExistsError, StoreError, UsageError
from ckpt_tools.signals import held_back, let_through
from ckpt_tools.stores.base import Leftover, PartRules, Store
from ckpt_tools.stores.filled import StoreDestination
from ckpt_tools.stores.local import LocalStore

STAGING_SUFFIX = ".ckpt-tools-partial"
REPLACED_SUFFIX = ".ckpt-tools-replaced"
OUTPUT_NAME = "output"
"""In the staging folder: the folder that becomes the destination, or holds the file that does."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
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

    def existing(self) -> Store | None:
        with _reporting("looking failed", self.path):
            return LocalStore(self.path) if _is_full_folder(self.path) else None

    def folders(self) -> frozenset[str]:
        with _reporting("looking failed", self.path):
            return frozenset(path.name for path in self.path.iterdir() if path.is_dir())

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
        self.store = LocalStore(self.folder / OUTPUT_NAME, replaces=True, fsync=self.fsync)
        self.destination = StoreDestination(self.store)
        self.log = LocalLog(_log_path(self.folder))

    @property
    def finished(self) -> LocalStore:
        return self.store

    def publish(self, paths: Sequence[str] = ()) -> None:
        """Put the finished output in its place, in one step; what else of ``paths`` a file has beside it, just before.

        A killed run may have left more than ``paths`` where they are given, such as digests that are not asked for
        now; nothing else is published.

        Raises:
            DestinationExistsError: somebody else put something there meanwhile. StoreError: renaming failed.
        """
        output = self.store.root
        with _reporting("publishing failed", self.target):
            if paths:
                _keep_only(output, paths)
            if self.fsync:
                _sync_folders(output)
            _check_free(self.target, is_file=self.is_file, overwrite=self.overwrite)
            if self.is_file:
                for path in [*(path for path in paths if path != self.target.name), self.target.name]:
                    output.joinpath(path).rename(self.target.with_name(path))
            elif _is_full_folder(self.target):
                _replace(output, self.target)
            else:
                output.rename(self.target)
            self.published = True
            if self.fsync:
                _sync_folder(self.target.parent)


def _keep_only(output: Path, paths: Sequence[str]) -> None:
    wanted = {output / path for path in paths}
    for folder, _, names in os.walk(output):
        for path in (Path(folder, name) for name in names):
            if path not in wanted:
                path.unlink()


@contextmanager
def staged(
    target: Path, *, is_file: bool, overwrite: bool, resume: bool = False, fsync: bool = False
) -> Iterator[Staging]:
    """A staging folder for ``target``; on leaving, it is gone with what was not published.

    With ``resume`` it holds what a killed run left there, and stays for the next one where this one fails. With
    ``fsync`` what is published outlives a power failure.

    A target that is a link to a folder stands for that folder; one that is a link to a file is replaced itself.

    Raises:
        DestinationExistsError: the target exists and ``overwrite`` is False, or another process is writing it.
        UsageError: the target is a mount point. StoreError: the folder cannot be made.
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
            if not kept or (staging and staging.published):
                shutil.rmtree(folder, ignore_errors=True)
            elif staging is None:
                with suppress(OSError):
                    folder.rmdir()  # where it was new, nothing was begun in it
            with suppress(OSError):
                os.close(lock)


def _place(target: Path, *, is_file: bool) -> Path:
    return Path(os.path.realpath(target.parent), target.name) if is_file else Path(os.path.realpath(target))


def _staging_folder(place: Path) -> Path:
    return place.with_name(f".{place.name}{STAGING_SUFFIX}")


def _prepare(folder: Path, *, resume: bool) -> None:
    """What a killed run left, where it is to be resumed; else nothing but a place for the output."""
    output = folder / OUTPUT_NAME
    if not (resume and output.is_dir() and _log_path(folder).is_file()):
        _empty(folder)
        output.mkdir()


def _log_path(folder: Path) -> Path:
    """The log of the output that is there now, by the number of its folder.

    A run may be killed after it swapped its output with the folder that it replaces, and before it removed that one,
    which must not be taken for unfinished output.
    """
    return folder / f"{folder.joinpath(OUTPUT_NAME).lstat().st_ino}.log"


def _leftovers(place: Path) -> list[Leftover]:
    found, folder, aside = [], _staging_folder(place), _aside(place)
    if _is_idle(folder):
        found.append(Leftover("unfinished output", str(folder), _num_bytes(folder)))
    if aside.is_dir() and not aside.is_symlink():
        kind = "replaced output" if _is_there(place) else "output moved aside, to be put back"
        found.append(Leftover(kind, str(aside), _num_bytes(aside)))
    return found


def _is_idle(folder: Path) -> bool:
    """Whether it is there and no process writes into it. Raises DestinationExistsError where one does."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    with suppress(FileNotFoundError), _descriptor(folder, os.O_NOFOLLOW) as number:
        _lock(number, folder)
        return True
    return False


def _num_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _remove_leftovers(place: Path) -> None:
    folder = _staging_folder(place)
    lock = _claim(folder)
    try:
        _recover(place)
        shutil.rmtree(folder)
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
        raise DestinationExistsError(f"{place} exists; choose another destination, or replace it with --overwrite")
    if place.exists() and place.is_dir() == is_file:
        kind = "folder" if is_file else "file"
        raise DestinationExistsError(f"{place} is a {kind}, which this output cannot replace; remove it first")


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
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def _recover(place: Path) -> None:
    """Put back, or remove, what ``_replace_in_two_steps`` moved aside before its process was killed."""
    aside = _aside(place)
    if aside.is_dir() and not _is_there(place):
        aside.rename(place)
    elif aside.is_dir():
        shutil.rmtree(aside)


def _replace(finished: Path, target: Path) -> None:
    """Put a folder in the place of a full one, which takes its name, or is removed."""
    if not _exchange(finished, target):
        _replace_in_two_steps(finished, target)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step, or False where the system cannot (NFS, Lustre)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number))


def _replace_in_two_steps(finished: Path, target: Path) -> None:
    aside = _aside(target)
    target.rename(aside)
    try:
        finished.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}{REPLACED_SUFFIX}")


def _sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        _sync_folder(Path(folder))


def _sync_folder(folder: Path) -> None:
    with _descriptor(folder) as number:
        os.fsync(number)
