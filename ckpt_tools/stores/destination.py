"""Interfaces of locations that take bytes, and the rules on what may be replaced there.

    OutputLocation --claim()--> Claim --destination--> files are written, part by part, not visible yet
          |                       '------publish_files--> 1. check that nothing unexpected is at the location
          |                                               2. note what is about to be replaced
          |                                               3. remove old files, or swap them with the new ones
          |                                               4. new files become visible, the marker file last
          '--list_leftovers, remove_leftovers: what a killed run left at any of these steps

Each kind of location does these steps as its file system or service allows: most local file systems swap two folders in
one rename, and on S3 uploads are completed one by one. Step 2 is for those where a killed run is found by its notes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from posixpath import dirname
from types import MappingProxyType
from typing import ClassVar, Protocol, Self

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.part_rules import PartRules
from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.messages.progress import log_info
from ckpt_tools.messages.showing import DisplayableResult, Jsonable
from ckpt_tools.stores.output_names import FolderForm, OutputForm, OutputKind, SingleFileForm
from ckpt_tools.stores.source import Buffer, CopySource, Store

NO_FILES: Mapping[str, int] = MappingProxyType({})

MAX_NAMES_IN_MESSAGE = 8
"""Names in one message."""


class Destination(ABC):
    """Files being written part by part, not visible to other processes yet.

    Parts of a file are numbered from 0 in order of their bytes, and may be written in any order, from any thread or
    process that has the destination and the file's handle. A part that is written twice holds the same bytes both
    times.
    """

    __slots__ = ()

    def check_free_space(self, num_bytes: int) -> None:  # noqa: B027 - most stores cannot tell
        """Raises StoreError if files of so many bytes in all are known not to fit."""

    @abstractmethod
    def begin_file(self, path: str, size_bytes: int) -> str:
        """Make a new file of exactly ``size_bytes``; its handle. Raises StoreError."""

    @abstractmethod
    def write_part(self, path: str, handle: str, number: int, offset: int, data: Buffer) -> str:
        """Write part ``number``, all of ``data`` at ``offset``; a part tag for it. Raises StoreError."""

    @abstractmethod
    def has_part(
        self, path: str, handle: str, number: int, offset: int, num_bytes: int, crc: int, part_tag: str
    ) -> bool:
        """True if that part is stored completely, with the CRC-32 and the part tag of the process that wrote it."""

    @abstractmethod
    def finish_file(self, path: str, handle: str, part_tags: Sequence[str]) -> None:
        """Complete a file whose parts were all written, with these part tags. Raises StoreError."""

    @abstractmethod
    def close_open_files(self) -> None:
        """Close everything that is open; nothing is removed or raised."""

    @property
    def part_rules(self) -> PartRules:
        """Rules for parts, those for ``copy_part`` among them."""
        return PartRules()

    def copy_part(self, path: str, handle: str, number: int, source: CopySource, start: int, stop: int) -> str:
        """Like ``write_part``, with bytes ``[start, stop)`` of ``source``, which ``part_rules`` allow. Raises
        StoreError."""
        raise AssertionError("a destination whose rules name no service copies nothing")

    def fail_waiting_writers(self, error: BaseException) -> None:  # noqa: B027 - nothing to do is the default
        """Make every process that waits for parts raise this error, because a part will not come."""


class JournalLog(Protocol):
    """An append-only log stored beside unfinished output, which outlives the process that wrote it."""

    def read(self) -> bytes:
        """Everything that was appended; the end may be cut off. Raises StoreError."""

    def append(self, data: bytes) -> None:
        """Add ``data``. Raises StoreError."""

    def clear(self) -> None:
        """Remove all entries. Raises StoreError."""


@dataclass(frozen=True, slots=True)
class Leftover(Jsonable):
    """A file or object of ``num_bytes`` that an ended run left at its destination or beside it."""

    kind: str
    """Kind in words: unfinished output, an open upload."""
    url: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DestinationContents:
    """The files at a destination, hidden ones too, by their names in ``store`` with their sizes in bytes.

    ``others`` are the names of everything else: links, empty folders, pipes, devices.
    """

    store: Store
    files: Mapping[str, int]
    others: Sequence[str] = ()

    def find_unexpected_files(self, known_files: Mapping[str, int]) -> list[str]:
        """The names that are not in ``known_files``, or that have another size now."""
        return sorted([*self.others, *(path for path, size in self.files.items() if known_files.get(path) != size)])


class Claim(ABC):
    """An output location that this process alone writes to: files go to ``destination``, and ``log`` records what was
    written."""

    __slots__ = ()
    destination: Destination
    log: JournalLog

    @property
    def finished_store(self) -> Store | None:
        """The finished files, if they can be read before they are published."""
        return None

    @abstractmethod
    def publish_files(self, paths: Sequence[str], replaced: Mapping[str, int] = NO_FILES) -> None:
        """Make the finished files visible, the last of ``paths`` last, and remove ``replaced``: names and sizes.

        Raises:
            DestinationExistsError: something else than ``replaced`` is there; it is kept. StoreError.
        """

    def publish_companion_file(self, path: str) -> None:
        """Make one more finished file visible, which describes what was published. Raises StoreError."""
        raise AssertionError("a file beside output that can be read before is published with it")


@dataclass(frozen=True, slots=True)
class OutputLocation(ABC):
    """The location of an output, a file or a folder, before anything is written there."""

    form: OutputForm = field(default=FolderForm(), kw_only=True)

    def with_form(self, form: OutputForm) -> Self:
        """The same location, for an output of another form."""
        return replace(self, form=form)

    def as_single_file(self) -> Self:
        """The same location, for an output that is one file whatever its name says."""
        return self.with_form(SingleFileForm(self.name))

    @property
    @abstractmethod
    def url(self) -> str:
        """For messages."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the URL."""

    @property
    def part_rules(self) -> PartRules:
        """Part sizes for files there."""
        return PartRules()

    @abstractmethod
    def list_contents(self) -> DestinationContents | None:
        """What exists there: one file, or a folder that is not empty; else None. Raises StoreError."""

    @abstractmethod
    def check_free(self, *, overwrite: bool) -> None:
        """Raises DestinationExistsError or UsageError if the location may not, or cannot, be taken; StoreError."""

    @abstractmethod
    def claim(self, *, overwrite: bool, resume: bool, fsync: bool = False) -> AbstractContextManager[Claim]:
        """Take the location; on leaving, output that was not published is removed.

        With ``resume`` the output of a killed run is kept, even if this run fails. With ``fsync`` published files
        outlive a power failure.

        Raises:
            DestinationExistsError: something is there and ``overwrite`` is False, or another process is writing it.
            UsageError: the location cannot be replaced. StoreError: it cannot be written.
        """

    @abstractmethod
    def list_leftovers(self) -> Sequence[Leftover]:
        """Leftovers of killed runs, for every form of output, and nothing else.

        Raises:
            DestinationExistsError: a process is writing there. StoreError: looking failed.
        """

    @abstractmethod
    def remove_leftovers(self) -> Sequence[Leftover]:
        """Remove leftovers, and put back what a killed run had moved aside. Returns and raises as
        ``list_leftovers``."""

    @abstractmethod
    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        """Remove files of the folder by name, batch after batch, then the folders that are empty.

        A folder or a link of such a name stays, and a missing name is skipped. Raises StoreError.
        """


@dataclass(frozen=True, slots=True, repr=False)
class CleanReport(DisplayableResult):
    """Leftovers at ``destination``, and whether they were removed."""

    SHOWN: ClassVar[tuple[str, ...]] = ("destination", "is_removed", "leftovers", "num_bytes")
    JSON_PROPERTIES: ClassVar[tuple[str, ...]] = ("num_bytes",)

    destination: str
    leftovers: Sequence[Leftover]
    is_removed: bool

    @property
    def num_bytes(self) -> int:
        return sum(left.num_bytes for left in self.leftovers)


def clean_leftovers(location: OutputLocation, *, dry_run: bool) -> CleanReport:
    """Leftovers of runs that were killed, or failed with ``--resume``, which are removed unless ``dry_run``. Raises as
    ``OutputLocation.list_leftovers``."""
    leftovers = location.list_leftovers() if dry_run else location.remove_leftovers()
    for left in () if dry_run else leftovers:
        log_info("stores", f"{left.url}: removed {left.kind}")
    return CleanReport(location.url, tuple(leftovers), is_removed=not dry_run)


def check_free(
    url: str, kind: OutputKind, *, is_taken: bool, existing_kinds: Collection[OutputKind], overwrite: bool
) -> None:
    """Raises DestinationExistsError if an output of that ``kind`` may not, or cannot, take the location.

    ``is_taken`` is True if a file is there, or a folder with contents; ``existing_kinds`` are the kinds of what exists
    there.
    """
    if is_taken and not overwrite:
        raise already_exists_error(url)
    if blocking_kinds := [other for other in existing_kinds if other != kind]:
        raise DestinationExistsError(
            f"{url} is a {blocking_kinds[0]}, which this output cannot replace; remove it first"
        )


def already_exists_error(url: str) -> DestinationExistsError:
    return DestinationExistsError(
        f"{url} exists; choose another destination, or replace it with {format_option('overwrite', True)}"
    )


def check_no_unexpected_files(
    contents: DestinationContents | None, url: str, replaced_files: Mapping[str, int]
) -> None:
    """Raises DestinationExistsError if ``contents`` has other files than ``replaced_files``."""
    unexpected_names = [] if contents is None else contents.find_unexpected_files(replaced_files)
    if unexpected_names:
        raise DestinationExistsError(
            f"{url} contains files that were not there at the start: {format_names(unexpected_names)}; nothing was "
            f"replaced"
        )


def format_names(names: Iterable[str]) -> str:
    """The first names for a message, and how many more there are. Characters that cannot be printed are escaped."""
    printable_names = [name if name.isprintable() else ascii(name) for name in names]
    num_omitted = len(printable_names) - MAX_NAMES_IN_MESSAGE
    return ", ".join(printable_names[:MAX_NAMES_IN_MESSAGE]) + (f" and {num_omitted:,} more" if num_omitted > 0 else "")


def list_parent_folders(paths: Iterable[str]) -> list[str]:
    """Every folder that contains one of ``paths``, except the root; inner folders first."""
    parent_folders: set[str] = set()
    for path in paths:
        folder = dirname(path)
        while folder and folder not in parent_folders:
            parent_folders.add(folder)
            folder = dirname(folder)
    return sorted(parent_folders, key=lambda folder: (-folder.count("/"), folder))
