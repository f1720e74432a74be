"""The place where an output waits unseen until it is published: of one process, or of several that write a part each.

Each part notes its end in its log before it looks at the logs of the others, so that at least the last one sees that
all have ended. It then publishes as a process does that wrote the output alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ckpt_tools.core.part_number import PartNumber
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.showing import Jsonable
from ckpt_tools.process.signals import allow_signals
from ckpt_tools.stores.destination import Destination, JournalLog
from ckpt_tools.stores.source import Store


@dataclass(frozen=True, slots=True)
class Leftover(Jsonable):
    """A file or object of ``num_bytes`` that an ended run left at its destination or beside it."""

    kind: str
    """Kind in words: unfinished output, an open upload."""
    url: str
    num_bytes: int


class Staging(ABC):
    """The place where an output of one form waits unseen, and the steps from there to its destination. Methods raise
    StoreError."""

    __slots__ = ()
    destination: Destination
    log: JournalLog

    @property
    def finished_store(self) -> Store | None:
        """The finished files, if they can be read before they are published."""
        return None

    @property
    def rescue_hint(self) -> str:
        """For a publishing that failed when old files were gone: where the new ones are, and what to do."""
        raise AssertionError("old files are replaced in one step here")

    def hold(self) -> AbstractContextManager[object]:
        """Keep other runs out, and put back what a killed run had moved aside. Raises DestinationExistsError."""
        return nullcontext()

    def prepare(self, *, resume: bool) -> None:
        """Remove what a killed run left, or keep it. Raises DestinationExistsError if other files are in its place."""
        if not resume:
            with allow_signals():
                self.discard()

    @abstractmethod
    def discard(self) -> None:
        """Remove all that is a run's and not published, by the notes of that run."""

    @abstractmethod
    def list_leftovers(self) -> Iterable[Leftover]:
        """Files that ``discard`` would remove. Raises DestinationExistsError if a process is writing."""

    def begin_publishing(self) -> None:  # noqa: B027 - nothing to do is the default
        """Called before the place is looked at for the last time. Raises StoreError if another run has it now."""

    @abstractmethod
    def note_publishing(self, paths: Sequence[str], replaced: Mapping[str, int]) -> Collection[str]:
        """Note that ``paths`` are about to be shown. The names of ``replaced`` that have to go before."""

    @abstractmethod
    def show_files(self, paths: Sequence[str], replaced: Mapping[str, int]) -> None:
        """Make finished files visible, the last of ``paths`` last; if one fails, hide the others again, at once or in
        ``discard``."""

    def finish_publishing(self, paths: Sequence[str], replaced: Mapping[str, int]) -> None:  # noqa: B027 - as above
        """Remove what was swapped with the new files."""


class PartStaging(Staging):
    """A staging for one part. Once all parts are done it ends as any other, by a ``Claim``: ``log`` is that of all
    parts then."""

    __slots__ = ()
    part: PartNumber

    @property
    @abstractmethod
    def own_log(self) -> JournalLog:
        """The log of this part."""

    @abstractmethod
    def join(self, paths: Sequence[str]) -> AbstractContextManager[None]:
        """Take this part of an output of ``paths`` beside other processes. Raises DestinationExistsError if another
        process has the same part or the whole, or a run without parts left output."""

    @abstractmethod
    def forget_part(self) -> None:
        """Remove the log of this part, which has written nothing. Raises StoreError."""

    @abstractmethod
    def read_logs(self) -> Mapping[int, bytes]:
        """By number, the logs of parts that have begun. Raises StoreError; UsageError for parts of another count."""

    @abstractmethod
    def sync_log(self) -> None:
        """Have the log of this part outlive a power failure. Raises StoreError."""


@dataclass(slots=True)
class JoinedLog(JournalLog):
    """The logs of all parts, read as one. What the part that publishes notes is in its own."""

    staging: PartStaging

    def read(self) -> bytes:
        return b"".join(self.staging.read_logs().values())

    def append(self, data: bytes) -> None:
        self.staging.own_log.append(data)

    def clear(self) -> None:
        """Nothing: what other parts noted stays for the next try."""


def check_part_counts(counts: Iterable[int], part: PartNumber, url: str) -> None:
    """Raises UsageError if one of ``counts``, of parts that have begun, is another than that of ``part``."""
    for count in counts:
        if count != part.count:
            raise UsageError.of(
                "part",
                f"{url} is being written in {count} parts, and not in {part.count}; remove what is there with: "
                f"ckpt-tools clean {url}",
            )
