"""Journal of a run, kept beside its unfinished output, so that a later run need not repeat it.

A journal is an append-only text. Its first line names the plan, the others list the files that were begun, with a
digest of their intended contents, and the tasks that are done, with their checksums. A task is noted after it was
written, and a resumed run has the destination check every noted task. Each line carries its own checksum, so that one
cut off by a kill, or damaged by a failing disk, is ignored.
"""

from __future__ import annotations

import io
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.core.layout import Crc32, FileSpec, Literal, Padding, Payload
from ckpt_tools.core.manifest import TensorEntry
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import CkptError, MalformedError, StoreError, UsageError
from ckpt_tools.planning.plan import Plan
from ckpt_tools.planning.tasks import Task
from ckpt_tools.stores.destination import Destination, Log
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.crc_board import PartCrc
from ckpt_tools.transfer.execute import History, Receipt
from ckpt_tools.transfer.runners.base import Runner

FORMAT = 1
"""Version of the lines below and of the digests; a journal of another version is of another plan."""

_PLAN, _FILE, _PART = "plan", "file", "part"

MAX_SHARE = 0.01
"""Largest share of the time that goes into the log: what is done meanwhile waits, and a kill loses it. A local file is
written every 2 to 10 milliseconds, a log of objects, at a request for each append, every few seconds. Noting each task
alone took 3 % of a conversion between files in memory, since 4 MiB of other data evict everything else from
the processor's cache."""


QUIET_SECONDS = 2.0
"""Seconds without notes at the start of a run, unless it must be resumable from its first byte. Most runs have ended by
then, and a kill costs the others no more. The checksums of notes take 5 % of a conversion in memory. A log that the
kernel has begun to write out cannot be removed before it is on the disk, behind gigabytes of output: 0.05 to 0.2 s of a
conversion that takes 1.2 s."""


@dataclass(slots=True)
class Journal(History):
    """The history of a run, kept in ``log``."""

    log: Log
    plan: Plan
    destination: Destination
    runner: Runner
    bytes_recovered: int = 0
    _left: bytes = field(default=b"", repr=False)
    """The lines of an earlier run: read as they are needed, since a large output has a million of them."""
    _handles: dict[int, str] = field(default_factory=dict)
    _pending: list[list[Any] | Receipt] = field(default_factory=list)
    _quiet_until: float = 0.0
    _due: float = 0.0

    @classmethod
    def begin(
        cls,
        log: Log,
        plan: Plan,
        source: Store,
        destination: Destination,
        runner: Runner,
        *,
        quiet_seconds: float = 0.0,
    ) -> Journal:
        """A new one, quiet for so long; what the log held is forgotten. Raises StoreError."""
        log.clear()
        until = time.monotonic() + quiet_seconds
        journal = cls(log, plan, destination, runner, _quiet_until=until, _due=until)
        journal._note([_PLAN, FORMAT, fingerprint(plan, source)])
        return journal

    @classmethod
    def resume(cls, log: Log, plan: Plan, source: Store, destination: Destination, runner: Runner) -> Journal:
        """The one that an earlier run left; a new one where none did.

        Raises:
            UsageError: it is of another plan. StoreError: it cannot be read.
        """
        left = log.read()
        heading = next(_lines(left, _PLAN), None)
        if heading is None:
            return cls.begin(log, plan, source, destination, runner)
        if heading != [_PLAN, FORMAT, fingerprint(plan, source)]:
            raise UsageError(
                "the run to resume had another source, other options or another version of ckpt-tools; "
                f"resume with the same ones, or start again without {format_option('resume', True)}"
            )
        return cls(log, plan, destination, runner, _left=left)._with_handles()

    def _with_handles(self) -> Journal:
        """Files that were begun, the last time each was, if what is to be in them is still the same."""
        files = self.plan.layout.files
        begun = {number: (handle, digest) for _, number, handle, digest in _lines(self._left, _FILE)}
        for number, (handle, digest) in begun.items():
            if 0 <= number < len(files) and contents(files[number]) == digest:
                self._handles[number] = handle
        return self

    @property
    def handles(self) -> dict[int, str]:
        return self._handles

    def receipts(self) -> Iterator[Receipt]:
        """Tasks that are done, each once, as soon as it was checked; afterwards, ``handles`` are of their files alone.

        A file none of whose tasks can be found may itself be gone, and is begun again.
        """
        found: set[tuple[int, int]] = set()
        with closing(self.runner.run(self._checked, self._noted())) as checked:
            for receipt, held in checked:
                key = (receipt.task.file, receipt.task.number)
                if held and key not in found:
                    found.add(key)
                    self.bytes_recovered += receipt.task.num_bytes
                    yield receipt
        kept = {file for file, _ in found}
        self._handles = {number: handle for number, handle in self._handles.items() if number in kept}
        self._left = b""

    def _noted(self) -> Iterator[Receipt]:
        for _, number, part, start, stop, crc, part_tag, parts in _lines(self._left, _PART):
            if number in self._handles:
                covered = tuple(PartCrc((lower, upper), at, end, value) for lower, upper, at, end, value in parts)
                yield Receipt(Task(number, part, start, stop), crc, covered, part_tag, bytes_read=0)

    def _checked(self, receipt: Receipt) -> tuple[Receipt, bool]:
        assert receipt.crc is not None, "no task without a checksum is noted"
        task = receipt.task
        path, handle = self.plan.layout.files[task.file].path, self._handles[task.file]
        part = (task.number, task.start, task.num_bytes)
        return receipt, self.destination.holds(path, handle, *part, receipt.crc, receipt.part_tag)

    def begun(self, file: int, handle: str) -> None:
        self._handles[file] = handle
        self._note([_FILE, file, handle, contents(self.plan.layout.files[file])])

    @property
    def is_journaling(self) -> bool:
        return time.monotonic() >= self._quiet_until

    def done(self, receipt: Receipt) -> None:
        if receipt.crc is not None:
            self._note(receipt)

    def _note(self, what: list[Any] | Receipt) -> None:
        self._pending.append(what)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write what is noted, unless that would be too often, or too early."""
        if time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write what is noted. A log that fails is tried again with the next note: the output is none the worse."""
        if not self._pending:
            return
        started = time.monotonic()
        with suppress(StoreError):
            self.log.append(b"".join(map(_encoded, self._pending)))
            self._pending.clear()
        ended = time.monotonic()
        self._due = ended + (ended - started) / MAX_SHARE


@dataclass(frozen=True, slots=True)
class JournalPolicy:
    """When a run notes what it does, and what it leaves if it fails.

    With ``keeps_output`` it resumes what an earlier run left, notes everything, and keeps what was written if it fails.
    Else it begins anew and notes nothing in the first seconds: a killed run can be resumed, a failed one leaves none.
    """

    keeps_output: bool

    def open(self, log: Log, plan: Plan, source: Store, destination: Destination, runner: Runner) -> Journal:
        """The journal of a run. Raises UsageError, StoreError."""
        if self.keeps_output:
            return Journal.resume(log, plan, source, destination, runner)
        return Journal.begin(log, plan, source, destination, runner, quiet_seconds=QUIET_SECONDS)

    def all_written(self, journal: Journal, *, is_replacing: bool) -> None:
        """Called when all output is written, just before it is published. If that removes old files, what was noted is
        needed if it fails."""
        is_needed = self.keeps_output or (is_replacing and journal.is_journaling)
        journal.flush() if is_needed else journal.flush_if_due()

    @contextmanager
    def noting(self, journal: Journal) -> Iterator[None]:
        """The work of a run; where its output is kept, the journal is written however it ends, and an error says so.
        What was made of a damaged source is not continued."""
        try:
            yield
        except MalformedError:
            with suppress(StoreError):
                journal.log.clear()
            raise
        except BaseException as error:
            if self.keeps_output:
                journal.flush()
                if isinstance(error, CkptError):
                    error.message += "; what was written so far is kept, and the same command continues it"
            raise


def _encoded(what: list[Any] | Receipt) -> bytes:
    """A line break, the CRC-32 of the rest as hex, a space, JSON. The break is in front, where a line that was cut off
    before may need it."""
    if isinstance(what, Receipt):
        task = what.task
        parts = [[*part.covers, part.start, part.stop, part.value] for part in what.parts]
        what = [_PART, task.file, task.number, task.start, task.stop, what.crc, what.part_tag, parts]
    text = json.dumps(what, separators=(",", ":")).encode()
    return b"\n%08x %b" % (zlib.crc32(text), text)


def _lines(data: bytes, kind: str) -> Iterator[list[Any]]:
    start = b'["%b"' % kind.encode()
    for line in io.BytesIO(data):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if text.startswith(start) and checksum == b"%08x" % zlib.crc32(text):
            yield json.loads(text)


class _Digest:
    """A hash of a sequence of values, each of which is delimited."""

    def __init__(self) -> None:
        from xxhash import xxh3_128

        self._hash = xxh3_128()

    def add(self, *values: object) -> None:
        self._hash.update(repr(values).encode(errors="surrogatepass"))

    def add_bytes(self, data: bytes | memoryview) -> None:
        self.add(memoryview(data).nbytes)
        self._hash.update(data)

    def text(self) -> str:
        return self._hash.hexdigest()


def fingerprint(plan: Plan, source: Store) -> str:
    """A digest of everything that two runs must agree on to continue each other, but for what is in the files.

    It covers where every byte comes from and in which state those files are, which files are written and how they are
    cut. Files themselves are compared one by one, by ``contents``: one that is made on demand is not made for this.
    """
    digest = _Digest()
    digest.add(plan.task_bytes, plan.copies, [(file.path, file.size_bytes) for file in plan.layout.files])
    manifest = plan.manifest
    operands = {(name, n): e for name, each in manifest.computed.items() for n, e in enumerate(each.operands)}
    for name in _add_tensors(digest, [*manifest.tensors.items(), *operands.items()]):
        version = ""  # where the store cannot tell, or the file is not needed
        with suppress(CkptError):
            version = source.version(name)
        digest.add(name, version)
    for name, data in sorted(manifest.literals.items()):
        digest.add(name)
        digest.add_bytes(data)
    digest.add(sorted((name, repr(each)) for name, each in manifest.computed.items()))
    return digest.text()


def _add_tensors(digest: _Digest, tensors: Iterable[tuple[tuple[object, ...], TensorEntry]]) -> list[str]:
    """Every tensor, and every shard of it; the files they lie in."""
    known: dict[int | str, int] = {}
    names: dict[str, None] = {}
    held: list[Sequence[str]] = []  # an address is that of one list as long as the list lives
    for key, entry in tensors:
        table = entry.shards
        files = table.files
        which = files[0] if len(files) == 1 else id(files)
        if which not in known:
            known[which] = len(known)
            held.append(files)
            names |= dict.fromkeys(files)
            digest.add(list(files))
        digest.add(tuple(key), entry.shape, entry.dtype.value, entry.plus, known[which])
        digest.add(table.shape, table.dtype.value, table.framing.value)
        columns = (table.starts, table.stops, table.file_ids, table.byte_starts, table.byte_stops, table.strides)
        for column in (*columns, *(table.inner or ())):
            digest.add_bytes(b"" if column is None else column.tobytes())
    return sorted(names)


def contents(file: FileSpec) -> str:
    """A digest of what is to be in a file: known bytes, and regions of tensors."""
    digest = _Digest()
    for segment in file.load_layout().segments:
        match segment:
            case Literal(data):
                digest.add_bytes(data)
            case Payload(key, box, shape, dtype):
                digest.add(tuple(key), box.start, box.stop, shape, dtype.value)
            case Padding() | Crc32():
                digest.add(segment)
    return digest.text()
