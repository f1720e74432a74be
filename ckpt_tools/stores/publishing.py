"""Publishing of an output, on every kind of storage: the place is free, as it was, or has all of the output.

    claim      nothing is there that may not go ─▶ the place is locked ─▶ what a killed run left is removed, or resumed
    write      files go to ``Staging.destination`` part by part, unseen; ``Staging.log`` says which parts are done
    note       which files go and which come, so that a run that is killed from here on is understood by the next one
    complete   the old files are removed, the markers first; the new ones are shown, the marker last
    withdraw   if that fails, what was shown is hidden again; if old files are gone, the new ones are kept
    clean      what killed runs left at any of these steps

``OutputLocation`` and ``Claim`` have these steps once. A ``Staging`` has what differs in kind: a folder is renamed
(``stores.local``), uploads are completed (``s3``), files are moved (``fsspec``), a commit is sent (``fsspec.hub``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from posixpath import dirname
from types import MappingProxyType
from typing import ClassVar, Self

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.part_number import PartNumber
from ckpt_tools.core.part_rules import PartRules
from ckpt_tools.errors import CkptError, DestinationExistsError, UsageError
from ckpt_tools.messages.progress import log_info
from ckpt_tools.messages.showing import DisplayableResult
from ckpt_tools.process.signals import allow_signals, defer_signals
from ckpt_tools.stores.destination import Destination, JournalLog
from ckpt_tools.stores.output_names import OutputForm, OutputKind, is_marker
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.staging import Leftover, PartStaging, Staging

NO_FILES: Mapping[str, int] = MappingProxyType({})

MAX_NAMES_IN_MESSAGE = 8
"""Names in one message."""


@dataclass(frozen=True, slots=True)
class DestinationContents:
    """The files at a destination, hidden ones too, by their names in ``store`` with their sizes in bytes.

    ``others`` are the names of everything else: links, empty folders, pipes, devices.
    """

    store: Store
    files: Mapping[str, int]
    others: Sequence[str] = ()

    @classmethod
    def of_folder(cls, store: Store, files: Mapping[str, int], others: Sequence[str]) -> DestinationContents | None:
        """None if the folder is empty."""
        return cls(store, files, others) if files or others else None

    def find_unexpected_files(self, known_files: Mapping[str, int]) -> list[str]:
        """The names that are not in ``known_files``, or that have another size now."""
        return sorted([*self.others, *(path for path, size in self.files.items() if known_files.get(path) != size)])


@dataclass(slots=True)
class Claim:
    """An output location that this process alone writes to: files go to ``destination``, and ``log`` records what was
    written."""

    location: OutputLocation
    staging: Staging
    overwrite: bool
    keeps_output: bool
    """True if staged files stay when this ends: for a run with ``--resume``, or because the old ones are gone."""

    @property
    def destination(self) -> Destination:
        return self.staging.destination

    @property
    def log(self) -> JournalLog:
        return self.staging.log

    @property
    def finished_store(self) -> Store | None:
        return self.staging.finished_store

    def publish_files(self, paths: Sequence[str], replaced: Mapping[str, int] = NO_FILES) -> None:
        """Make the finished files visible, the last of ``paths`` last, and remove ``replaced``: names and sizes. A
        file that a killed run finished and that is not in ``paths`` is removed.

        Raises:
            DestinationExistsError: something else than ``replaced`` is there; it is kept. StoreError.
        """
        location, staging = self.location, self.staging
        staging.begin_publishing()
        location.check_free(overwrite=self.overwrite)
        check_no_unexpected_files(location.list_contents(), location.url, replaced)
        old_names = staging.note_publishing(paths, replaced)
        try:
            # Markers first: without them the rest is no checkpoint.
            if old_names:
                location.remove_files([[name for name in old_names if is_marker(name) is are_markers]
                                       for are_markers in (True, False)])  # fmt: skip
            staging.show_files(paths, replaced)
        except CkptError as error:
            # A file is replaced in one step: only files beside it, which describe it, are gone.
            if old_names and location.form.file_name is None and not self.keeps_output:
                error.message += f"; the old checkpoint is being replaced, and {staging.rescue_hint}"
                self.keeps_output = True
            raise
        self.keeps_output = False
        staging.finish_publishing(paths, replaced)

    def publish_companion_file(self, path: str) -> None:
        """Make one more finished file visible, which describes what was published. Raises StoreError."""
        self.staging.begin_publishing()
        self.staging.show_files([path], NO_FILES)


@dataclass(frozen=True, slots=True)
class OutputLocation(ABC):
    """The location of an output, a file or a folder, before anything is written there."""

    form: OutputForm = field(default=OutputForm(), kw_only=True)
    can_resume: ClassVar[bool] = True
    """False if what a killed run wrote cannot be continued."""

    def with_form(self, form: OutputForm) -> Self:
        """The same location, for an output of another form."""
        return replace(self, form=form)

    def as_single_file(self) -> Self:
        """The same location, for an output that is one file whatever its name says."""
        return self.with_form(OutputForm(self.name))

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
        """The contents of the place: one file, or a folder that is not empty; else None. Raises StoreError."""

    def check_free(self, *, overwrite: bool) -> None:
        """Raises DestinationExistsError or UsageError if the location may not, or cannot, be taken; StoreError."""
        file, folder = self.as_single_file().list_contents(), self.with_form(OutputForm()).list_contents()
        existing: dict[OutputKind, bool] = {"file": file is not None and bool(file.files), "folder": folder is not None}
        existing_kinds = [kind for kind, found in existing.items() if found]
        check_free(
            self.url, self.form.kind, is_taken=bool(existing_kinds), existing_kinds=existing_kinds, overwrite=overwrite
        )

    @abstractmethod
    def stage(self, *, resume: bool = False, fsync: bool = False) -> Staging:
        """The staging of the output; nothing is read or made."""

    def stage_part(self, part: PartNumber) -> PartStaging:
        """The staging that processes share, each of which writes a part of the output. Raises UsageError where parts
        cannot be written."""
        raise UsageError.of(
            "part",
            f"{format_option('part', str(part))} writes to a disk that all processes share or to s3://, and "
            f"{self.url} is neither",
        )

    def stage_both_forms(self) -> Sequence[Staging]:
        """The same for both forms: that of an earlier output is unknown."""
        return [self.with_form(OutputForm()).stage(), self.as_single_file().stage()]

    @contextmanager
    def claim(self, *, overwrite: bool, resume: bool, fsync: bool = False) -> Iterator[Claim]:
        """Take the location; on leaving, output that was not published is removed.

        With ``resume`` the output of a killed run is kept, even if this run fails. With ``fsync`` published files
        outlive a power failure; services answer when bytes are safe.

        Raises:
            DestinationExistsError: something is there and ``overwrite`` is False, or another process is writing it.
            UsageError: the location cannot be replaced, or output there not resumed. StoreError: it cannot be written.
        """
        if resume and not self.can_resume:
            raise UsageError.of(
                "resume",
                f"{format_option('resume', True)}: what was written to {self.url} cannot be continued, "
                "only to paths and s3:// URLs",
            )
        with self.claim_staging(self.stage(resume=resume, fsync=fsync), overwrite=overwrite, resume=resume) as claim:
            yield claim

    @contextmanager
    def claim_staging(self, staging: Staging, *, overwrite: bool, resume: bool) -> Iterator[Claim]:
        """``claim`` with this staging."""
        self.check_free(overwrite=overwrite)
        # A signal interrupts the block, but not taking and leaving the location.
        with defer_signals(), staging.hold():
            self.check_free(overwrite=overwrite)
            staging.prepare(resume=resume)
            claim = Claim(self, staging, overwrite, keeps_output=resume)
            try:
                with allow_signals():
                    yield claim
            finally:
                claim.destination.close_open_files()
                if not claim.keeps_output:
                    # ``clean`` can remove the rest later, and an earlier error is the one to report. After publishing,
                    # what is left are notes, and uploads that were begun twice because an answer was lost.
                    with suppress(CkptError):
                        staging.discard()

    def clean(self, *, dry_run: bool = False) -> Sequence[Leftover]:
        """Leftovers of runs that were killed, or failed with ``--resume``, for every form of output, and nothing else.
        Unless ``dry_run`` they are removed, and what a killed run had moved aside is put back.

        Raises:
            DestinationExistsError: a process is writing there. StoreError: looking failed.
        """
        found_leftovers = [(staging, [*staging.list_leftovers()]) for staging in self.stage_both_forms()]
        for staging, leftovers in found_leftovers:
            if leftovers and not dry_run:
                with staging.hold():
                    staging.discard()
        return [left for _, leftovers in found_leftovers for left in leftovers]

    @abstractmethod
    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        """Remove files of the output by name, batch after batch, then the folders that are empty.

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
    """Raises as ``OutputLocation.clean``."""
    leftovers = location.clean(dry_run=dry_run)
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
