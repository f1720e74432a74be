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
from ckpt_tools.planning.tasks import TransferTask
from ckpt_tools.stores.destination import Destination, JournalLog
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.crc_board import PartCrc
from ckpt_tools.transfer.execute import RunHistory, TaskReceipt
from ckpt_tools.transfer.runners import TaskRunner

FORMAT = 1
"""Version of the lines below and of the digests; a journal of another version is of another plan."""

_PLAN, _FILE, _PART, _DONE = "plan", "file", "part", "done"

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
class TransferJournal(RunHistory):
    """The history of a run, kept in ``log``."""

    log: JournalLog
    plan: Plan
    destination: Destination
    runner: TaskRunner
    trusts_parts: bool = False
    bytes_recovered: int = 0
    _earlier_lines: bytes = field(default=b"", repr=False)
    """The lines of an earlier run: read as they are needed, since a large output has a million of them."""
    _file_handles: dict[int, str] = field(default_factory=dict)
    _pending_entries: list[list[Any] | TaskReceipt] = field(default_factory=list)
    _quiet_until: float = 0.0
    _next_flush_time: float = 0.0

    @classmethod
    def begin(
        cls,
        log: JournalLog,
        plan: Plan,
        source: Store,
        destination: Destination,
        runner: TaskRunner,
        *,
        quiet_seconds: float = 0.0,
    ) -> TransferJournal:
        """A new journal, which notes no task in the first ``quiet_seconds``; the log is cleared. Raises StoreError."""
        log.clear()
        quiet_until = time.monotonic() + quiet_seconds
        journal = cls(log, plan, destination, runner, _quiet_until=quiet_until, _next_flush_time=quiet_until)
        journal._add_entry([_PLAN, FORMAT, fingerprint_plan(plan, source)])
        return journal

    @classmethod
    def resume(
        cls,
        log: JournalLog,
        plan: Plan,
        source: Store,
        destination: Destination,
        runner: TaskRunner,
        *,
        trusts_parts: bool = False,
    ) -> TransferJournal:
        """The journal that an earlier run left; a new one if there is none. With ``trusts_parts`` it is that of parts
        that ended well, each after its bytes were on the disk: they are not read again.

        Raises:
            UsageError: it is of another plan. StoreError: it cannot be read.
        """
        earlier_lines = log.read()
        headings = list(_decode_lines(earlier_lines, _PLAN))
        if not headings:
            return cls.begin(log, plan, source, destination, runner)
        fingerprint = fingerprint_plan(plan, source)
        if any(heading != [_PLAN, FORMAT, fingerprint] for heading in headings):
            raise UsageError(
                "the run to resume had another source, other options or another version of ckpt-tools; "
                f"resume with the same ones, or start again without {format_option('resume', True)}"
            )
        # A file may have been begun several times: the last time counts, if the same is to be in it now.
        files = plan.layout.files
        begun_files = {number: (handle, digest) for _, number, handle, digest in _decode_lines(earlier_lines, _FILE)}
        handles = {
            number: handle
            for number, (handle, digest) in begun_files.items()
            if 0 <= number < len(files) and digest_file_contents(files[number]) == digest
        }
        return cls(log, plan, destination, runner, trusts_parts, _earlier_lines=earlier_lines, _file_handles=handles)

    @property
    def file_handles(self) -> dict[int, str]:
        return self._file_handles

    def iter_receipts(self) -> Iterator[TaskReceipt]:
        """Tasks that are done, each once, as soon as the destination has checked its part.

        Afterwards, ``file_handles`` has only files with such a task: another file may itself be gone, and is begun
        again.
        """
        recovered_parts: set[tuple[int, int]] = set()
        with closing(self.runner.run(self._check_receipt, self._iter_noted_receipts())) as checked_receipts:
            for receipt, held in checked_receipts:
                key = (receipt.task.file_index, receipt.task.part_number)
                if held and key not in recovered_parts:
                    recovered_parts.add(key)
                    self.bytes_recovered += receipt.task.num_bytes
                    yield receipt
        recovered_files = {file for file, _ in recovered_parts}
        self._file_handles = {
            number: handle for number, handle in self._file_handles.items() if number in recovered_files
        }
        self._earlier_lines = b""

    def _iter_noted_receipts(self) -> Iterator[TaskReceipt]:
        for _, number, part, start, stop, crc, part_tag, parts in _decode_lines(self._earlier_lines, _PART):
            if number in self._file_handles:
                part_crcs = tuple(PartCrc((lower, upper), at, end, value) for lower, upper, at, end, value in parts)
                yield TaskReceipt(TransferTask(number, part, start, stop), crc, part_crcs, part_tag, bytes_read=0)

    def _check_receipt(self, receipt: TaskReceipt) -> tuple[TaskReceipt, bool]:
        assert receipt.crc is not None, "no task without a checksum is noted"
        task = receipt.task
        path, handle = self.plan.layout.files[task.file_index].path, self._file_handles[task.file_index]
        if self.trusts_parts:
            return receipt, True
        part = (task.part_number, task.start, task.num_bytes)
        return receipt, self.destination.has_part(path, handle, *part, receipt.crc, receipt.part_tag)

    def note_file_begun(self, file: int, handle: str) -> None:
        self._file_handles[file] = handle
        self._add_entry([_FILE, file, handle, digest_file_contents(self.plan.layout.files[file])])

    @property
    def is_journaling(self) -> bool:
        return time.monotonic() >= self._quiet_until

    def note_task_done(self, receipt: TaskReceipt) -> None:
        if receipt.crc is not None:
            self._add_entry(receipt)

    def note_share_done(self) -> None:
        """Note that all tasks of this part are done, and on the disk. Raises StoreError."""
        self._pending_entries.append([_DONE])
        self.log.append(b"".join(map(_encode_line, self._pending_entries)))
        self._pending_entries.clear()

    def _add_entry(self, entry: list[Any] | TaskReceipt) -> None:
        self._pending_entries.append(entry)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write what is noted, unless that would be too often, or too early."""
        if time.monotonic() >= self._next_flush_time:
            self.flush_entries()

    def flush_entries(self) -> None:
        """Write what is noted. A log that fails is tried again with the next note: the output is none the worse."""
        if not self._pending_entries:
            return
        started = time.monotonic()
        with suppress(StoreError):
            self.log.append(b"".join(map(_encode_line, self._pending_entries)))
            self._pending_entries.clear()
        ended = time.monotonic()
        self._next_flush_time = ended + (ended - started) / MAX_SHARE


@dataclass(frozen=True, slots=True)
class JournalPolicy:
    """When a run notes what it does, and what it leaves if it fails.

    With ``keeps_output`` it resumes what an earlier run left, notes everything, and keeps what was written if it fails.
    Else it begins anew and notes nothing in the first seconds: a killed run can be resumed, a failed one leaves none.
    """

    keeps_output: bool

    def open(
        self, log: JournalLog, plan: Plan, source: Store, destination: Destination, runner: TaskRunner
    ) -> TransferJournal:
        """The journal of a run. Raises UsageError, StoreError."""
        if self.keeps_output:
            return TransferJournal.resume(log, plan, source, destination, runner)
        return TransferJournal.begin(log, plan, source, destination, runner, quiet_seconds=QUIET_SECONDS)

    def flush_before_publishing(self, journal: TransferJournal, *, is_replacing: bool) -> None:
        """Called when all output is written, just before it is published. If that removes old files, what was noted is
        needed if it fails."""
        is_needed = self.keeps_output or (is_replacing and journal.is_journaling)
        journal.flush_entries() if is_needed else journal.flush_if_due()

    @contextmanager
    def preserve_output_on_error(self, journal: TransferJournal) -> Iterator[None]:
        """A context for the work of a run. If the output is kept, the journal is written however the work ends, and an
        error mentions it. The output of a damaged source is not continued: its journal is cleared."""
        try:
            yield
        except MalformedError:
            with suppress(StoreError):
                journal.log.clear()
            raise
        except BaseException as error:
            if self.keeps_output:
                journal.flush_entries()
                if isinstance(error, CkptError):
                    error.message += "; what was written so far is kept, and the same command continues it"
            raise


def _encode_line(entry: list[Any] | TaskReceipt) -> bytes:
    """A line break, the CRC-32 of the rest as hex, a space, JSON. The break is in front, where a line that was cut off
    before may need it."""
    if isinstance(entry, TaskReceipt):
        task = entry.task
        parts = [[*part.covered_range, part.start, part.stop, part.crc] for part in entry.parts]
        entry = [_PART, task.file_index, task.part_number, task.start, task.stop, entry.crc, entry.part_tag, parts]
    line = json.dumps(entry, separators=(",", ":")).encode()
    return b"\n%08x %b" % (zlib.crc32(line), line)


def _decode_lines(journal_data: bytes, kind: str) -> Iterator[list[Any]]:
    line_prefix = b'["%b"' % kind.encode()
    for line in io.BytesIO(journal_data):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if text.startswith(line_prefix) and checksum == b"%08x" % zlib.crc32(text):
            yield json.loads(text)


def is_share_done(journal_data: bytes) -> bool:
    """True if the journal of a part says that all of its tasks are done."""
    return any(True for _ in _decode_lines(journal_data, _DONE))


def read_plan_fingerprint(journal_data: bytes) -> str | None:
    """The fingerprint of the plan that the journal is of; None if it was cut off before that."""
    heading = next(_decode_lines(journal_data, _PLAN), None)
    return None if heading is None else str(heading[-1])


class _ValueDigest:
    """A hash of a sequence of values. Each is delimited, so that none runs into the next."""

    def __init__(self) -> None:
        from xxhash import xxh3_128

        self.hash = xxh3_128()

    def add_values(self, *values: object) -> None:
        self.hash.update(repr(values).encode(errors="surrogatepass"))

    def add_bytes(self, data: bytes | memoryview) -> None:
        self.add_values(memoryview(data).nbytes)
        self.hash.update(data)


def fingerprint_plan(plan: Plan, source: Store) -> str:
    """A digest of everything that two runs must agree on to continue each other, but for what is in the files.

    It covers where every byte comes from and in which state those files are, which files are written and how they are
    cut. Files themselves are compared one by one, by ``digest_file_contents``: one that is made on demand is not made
    for this.
    """
    digest = _ValueDigest()
    copy_rules = plan.copy_rules and (plan.copy_rules.min_copy_bytes, plan.copy_rules.max_parts)
    digest.add_values(plan.task_bytes, copy_rules, [(file.path, file.size_bytes) for file in plan.layout.files])
    manifest = plan.manifest
    operands = {(name, n): e for name, each in manifest.computed.items() for n, e in enumerate(each.operands)}
    for name in _add_tensors_to_digest(digest, [*manifest.tensors.items(), *operands.items()]):
        version = ""  # where the store cannot tell, or the file is not needed
        with suppress(CkptError):
            version = source.version(name)
        digest.add_values(name, version)
    for name, data in sorted(manifest.literals.items()):
        digest.add_values(name)
        digest.add_bytes(data)
    digest.add_values(sorted((name, repr(each)) for name, each in manifest.computed.items()))
    return digest.hash.hexdigest()


def _add_tensors_to_digest(
    digest: _ValueDigest, tensors: Iterable[tuple[tuple[object, ...], TensorEntry]]
) -> list[str]:
    """Add every tensor and every shard of it; return the names of the files they lie in."""
    file_list_numbers: dict[int | str, int] = {}
    names: dict[str, None] = {}
    kept_alive: list[Sequence[str]] = []  # an address is that of one list as long as the list lives
    for key, entry in tensors:
        table, at = entry.shards, entry.shards.whole_range
        files = table.files if at is None else (at.file,)
        files_identity = files[0] if len(files) == 1 else id(files)
        if files_identity not in file_list_numbers:
            file_list_numbers[files_identity] = len(file_list_numbers)
            kept_alive.append(files)
            names |= dict.fromkeys(files)
            digest.add_values(list(files))
        number = file_list_numbers[files_identity]
        place = () if at is None else (table.dtype.value, at.start, at.stop)
        digest.add_values(tuple(key), entry.shape, entry.dtype.value, entry.plus, number, *place)
        if place:
            continue
        digest.add_values(table.shape, table.dtype.value, table.framing.value)
        columns = (table.starts, table.stops, table.file_ids, table.byte_starts, table.byte_stops, table.strides)
        for column in (*columns, *(table.item_parts or ())):
            digest.add_bytes(b"" if column is None else column.tobytes())
    return sorted(names)


def digest_file_contents(file: FileSpec) -> str:
    """A digest of what is to be in a file: known bytes, and regions of tensors."""
    digest = _ValueDigest()
    for segment in file.load_layout().segments:
        match segment:
            case Literal(data):
                digest.add_bytes(data)
            case Payload(key, box, shape, dtype):
                digest.add_values(tuple(key), box.start, box.stop, shape, dtype.value)
            case Padding() | Crc32():
                digest.add_values(segment)
    return digest.hash.hexdigest()
