"""Any format to any format: wires reader, transforms, writer, plan and execution together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.applicability import WRITING, check
from ckpt_tools.core.apply_options import apply_options, case_of
from ckpt_tools.core.json_fields import json_of
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import ConvertOptions, WriteOptions
from ckpt_tools.core.wording import listed
from ckpt_tools.errors import CkptError, DestinationExistsError, LossError, UsageError
from ckpt_tools.formats.base import Writer
from ckpt_tools.formats.reading import named, read_checkpoint
from ckpt_tools.formats.registry import writer_for
from ckpt_tools.planning.plan import CopyRules, Plan, make_plan, reading_bytes
from ckpt_tools.signals import held_back
from ckpt_tools.stores.destination import Claim, Place
from ckpt_tools.stores.marker_files import DIGESTS_SUFFIX
from ckpt_tools.stores.present import NOTHING
from ckpt_tools.stores.source import Located, Source, Store
from ckpt_tools.stores.urls import check_ending, implied_format, open_place
from ckpt_tools.transfer.execute import execute
from ckpt_tools.transfer.journal import Journal
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.transfer.workers import WorkerPool

if TYPE_CHECKING:
    from ckpt_tools.core.progress import Progress

SAME = "same"
"""In the place of a format to write: the source's own."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversion ready to run."""

    store: Store
    plan: Plan
    notes: tuple[Note, ...]
    source_format: str
    target_format: str
    place: Place
    overwrite: bool
    checksum: bool
    removed: Mapping[str, int]
    """What is there now and goes: names and sizes."""
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_file(self) -> bool:
        return implied_format(self.place.name) is not None


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a conversion will do. Sizes in bytes: ``num_bytes`` of the tensors that are written, ``file_bytes`` of the
    files that will hold them. ``renamed`` are the names that change, by their old ones.
    ``removed_files`` lie at the destination now and are replaced."""

    source_format: str
    target_format: str
    files: Mapping[str, int]
    num_tensors: int
    num_tasks: int
    bytes_read: int
    bytes_written: int
    peak_memory_bytes: int
    notes: tuple[Note, ...]
    num_bytes: int
    renamed: Mapping[str, str] = field(default_factory=dict)
    removed_files: Mapping[str, int] = field(default_factory=dict)

    @property
    def file_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def removed_bytes(self) -> int:
        return sum(self.removed_files.values())

    def to_json(self) -> dict[str, Any]:
        return json_of(self, "file_bytes", "removed_bytes")


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did. ``bytes_recovered`` were written by an earlier run, and not again; of
    ``bytes_written`` the destination copied ``bytes_copied`` itself; ``digests`` says where
    the digests lie that were asked for."""

    plan: PlanReport
    destination: str
    bytes_read: int
    bytes_written: int
    bytes_recovered: int
    bytes_copied: int
    seconds: float
    digests: str | None = None

    def to_json(self) -> dict[str, Any]:
        return json_of(self)


def is_whole(options: ConvertOptions, writer: Writer) -> bool:
    """Whether all state is written: what the user says, else what the format is for."""
    return writer.holds_optimizer if options.state is None else options.state == "all"


def prepare(
    src: str | Path,
    dst: str | Path,
    *,
    to: str | None,
    from_: str | None,
    options: ConvertOptions,
    memory_bytes: int,
    memory_is_limit: bool,
    num_workers: int,
    strict: bool,
    overwrite: bool,
    checksum: bool,
) -> Prepared:
    """Everything about a conversion but the moving of bytes; writes nothing.

    Raises:
        CkptError: whatever stands in the way is found here, before the destination is touched.
    """
    src, place = named(src), open_place(dst)
    writer = None if to == SAME else _writer(to, place.name)
    source, manifest = read_checkpoint(src, options.reading, format_name=from_)
    source_format, reading = manifest.format, reading_bytes(manifest)
    writer = writer or _same_writer(manifest, place.name)
    whole = is_whole(options, writer)
    check(
        WRITING, options.given, case_of(manifest, writer.name, keeps_both=whole and writer.holds_masters, whole=whole)
    )
    writing = _write_options(place.name, manifest, options)
    made = apply_options(manifest, options, whole=whole, holds_masters=writer.holds_masters)
    manifest, notes = made.manifest, made.notes
    layout = writer.layout(manifest, writing)
    notes += layout.notes
    if strict:
        _refuse_losses(notes)
    plan = make_plan(
        manifest,
        layout,
        memory_bytes=memory_bytes,
        num_workers=num_workers,
        is_limit=memory_is_limit,
        wanted_bytes=_wanted_bytes(place, layout),
        reading_bytes=reading,
        copies=_copies(source, place),
    )
    removed = removed_files(src, dst, place, layout, checksum=checksum) if overwrite else NOTHING
    if not overwrite:
        check_absent(place, checksum=checksum)
    return Prepared(
        source.store, plan, notes, source_format, writer.name, place, overwrite, checksum, removed, made.renamed
    )


def _wanted_bytes(place: Place, layout: Layout) -> int:
    """The size of tasks that the place asks for; files made one by one are not made for a place that does not care."""
    if place.parts.max_parts is None:
        return place.parts.wanted_bytes(0)
    return place.parts.wanted_bytes(max((file.size_bytes for file in layout.files), default=0))


def _copies(source: Source, place: Place) -> CopyRules | None:
    """How files are cut that the place's service copies of the source's; None where these are not of that service."""
    rules, store = place.parts, source.store
    if rules.copying is None or rules.max_parts is None or not isinstance(store, Located):
        return None
    found = next((store.locate(path) for path in source.files), None)
    is_same = found is not None and found.service == rules.copying.service
    return CopyRules(rules.copying.min_bytes, rules.max_parts) if is_same else None


def _writer(to: str | None, name: str) -> Writer:
    check_ending(name, to)
    implied = implied_format(name)
    if to is None and implied is None:
        raise UsageError(f"say with --to in which format {name} is to be written")
    if to is not None and implied is not None and to != implied:
        raise UsageError(f"{name} is a {implied} file and --to says {to}; name a folder or drop --to")
    return writer_for(to or implied or "")


def _same_writer(manifest: Manifest, name: str) -> Writer:
    """The writer of the source's own format, for another world size."""
    writer = _writer(manifest.format, name)
    if manifest.world_size is None or manifest.format == "universal":
        raise UsageError(f"a {manifest.format} checkpoint has no world size to change")
    return writer


def _write_options(name: str, manifest: Manifest, options: ConvertOptions) -> WriteOptions:
    """The keys say where a tree is read where the source is one, and where it is written elsewhere."""
    is_tree = manifest.tree is not None
    return WriteOptions(
        file_name=name if implied_format(name) else None,
        max_shard_bytes=options.max_shard_bytes,
        world_size=options.world_size or manifest.world_size or 1,
        tag=options.tag,
        model_key=None if is_tree else options.model_key,
        optim_key=None if is_tree else options.optim_key,
    )


def _refuse_losses(notes: tuple[Note, ...]) -> None:
    lost = [note.what for note in notes if note.outcome is Outcome.DROPPED and not note.asked]
    if lost:
        raise LossError(f"with --strict nothing may be left behind, and this would drop {listed(lost)}")


def plan_report(prepared: Prepared) -> PlanReport:
    """The plan in figures."""
    plan, figures = prepared.plan, prepared.plan.figures()
    return PlanReport(
        source_format=prepared.source_format,
        target_format=prepared.target_format,
        files=figures.files,
        num_tensors=len(plan.manifest.tensors),
        num_bytes=sum(entry.num_bytes for entry in plan.manifest.tensors.values()),
        num_tasks=figures.num_tasks,
        bytes_read=figures.bytes_read,
        bytes_written=figures.bytes_written,
        peak_memory_bytes=plan.peak_memory_bytes,
        notes=prepared.notes,
        renamed=prepared.renamed,
        removed_files=prepared.removed,
    )


def run(
    prepared: Prepared,
    *,
    pool: WorkerPool,
    fsync: bool,
    on_progress: Progress,
    resume: bool = False,
) -> ConvertReport:
    """Write the destination: whole, or not at all.

    Raises:
        DestinationExistsError, StoreError, FormatError: as the stores and the source's bytes say.
    """
    started = time.perf_counter()
    plan, report, checksum = prepared.plan, plan_report(prepared), prepared.checksum
    taking = prepared.place.claim(is_file=prepared.is_file, overwrite=prepared.overwrite, resume=resume, fsync=fsync)
    with (
        taking as claim,
        pool.start(plan, prepared.store, claim.destination) as (runner, board),
    ):
        meter = _Meter(on_progress, report.bytes_written)
        begin = Journal.resume if resume else Journal.begin
        journal = begin(claim.log, plan, prepared.store, claim.destination, ThreadRunner(plan.num_workers))
        with _noting(journal, kept=resume):
            result = execute(
                plan,
                prepared.store,
                claim.destination,
                runner=runner,
                on_bytes=meter.add,
                history=journal,
                board=board,
            )
            journal.flush() if resume else journal.flush_if_due()
            listed = _staged_digests(prepared, claim, on_progress) if checksum else []
            with held_back():
                claim.publish([*listed, *(file.path for file in plan.layout.files)], prepared.removed)
    return ConvertReport(
        report,
        prepared.place.url,
        result.bytes_read,
        result.bytes_written,
        journal.bytes_recovered,
        result.bytes_copied,
        time.perf_counter() - started,
        _digests_url(prepared, listed, on_progress) if checksum else None,
    )


def _staged_digests(prepared: Prepared, claim: Claim, on_progress: Progress) -> list[str]:
    from ckpt_tools.verification.digest_files import write_staged

    return write_staged(
        claim,
        prepared.place,
        prepared.target_format,
        is_file=prepared.is_file,
        num_workers=prepared.plan.num_workers,
        on_total=lambda total: _Meter(on_progress, total).add,
    )


def _digests_url(prepared: Prepared, listed: list[str], on_progress: Progress) -> str:
    """Where the list is that was published; where it could not be made before that, it is made now."""
    from ckpt_tools.verification.digest_files import write_published

    if listed:
        return prepared.place.url + DIGESTS_SUFFIX if prepared.is_file else f"{prepared.place.url}/{listed[0]}"
    return write_published(
        prepared.place,
        prepared.target_format,
        num_workers=prepared.plan.num_workers,
        on_total=lambda total: _Meter(on_progress, total).add,
    )


@contextmanager
def _noting(journal: Journal, *, kept: bool) -> Iterator[None]:
    """Whatever ends the run, what was done is noted; where the output is kept, an error says so."""
    try:
        yield
    except BaseException as error:
        if kept:
            journal.flush()
        if kept and isinstance(error, CkptError):
            error.message += "; what was written so far is kept, and the same command continues it"
        raise


def check_absent(place: Place, *, checksum: bool) -> None:
    """Raises DestinationExistsError where something is at the destination, or digests that would be of another file."""
    is_file = implied_format(place.name) is not None
    place.check_free(is_file=is_file, overwrite=False)
    if is_file and (url := digests_beside(place)) is not None:
        raise _exists(url) if checksum else _of_another(url)


def removed_files(
    src: str | Path, dst: str | Path, place: Place, layout: Layout, *, checksum: bool
) -> Mapping[str, int]:
    """What goes of what is at the destination now: one checkpoint, and its digests where they lie beside it.

    Raises:
        DestinationExistsError: the source would go, or something else than a checkpoint, or digests would be of
        another file then.
    """
    from ckpt_tools.verification.digest_files import check_list
    from ckpt_tools.verification.replacing import check_apart, replaced_files

    is_file = implied_format(place.name) is not None
    check_apart(src, dst)
    removed = replaced_files(place, [file.path for file in layout.files], is_file=is_file)
    url = digests_beside(place) if is_file else None
    if url is None:
        return removed
    if not checksum:
        raise _of_another(url)
    return {**removed, **check_list(open_place(url))}


def digests_beside(place: Place) -> str | None:
    """Where a list of digests lies beside a file, if there is one: it would speak of another file than before."""
    url = place.url + DIGESTS_SUFFIX
    return None if open_place(url).present(is_file=True) is None else url


def _of_another(url: str) -> DestinationExistsError:
    return DestinationExistsError(f"{url} would be of another file then; remove it, or replace it with --checksum")


def _exists(url: str) -> DestinationExistsError:
    return DestinationExistsError(f"{url} exists; choose another destination, or replace it with --overwrite")


@dataclass(slots=True)
class _Meter:
    on_progress: Progress
    total: int
    done: int = 0

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        self.on_progress(self.done, self.total)


def model_options(options: ConvertOptions) -> ConvertOptions:
    """The same options for the weights alone."""
    return replace(options, state="model")
