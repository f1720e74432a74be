"""Any format to any format: open, edit, lay out, plan, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckpt_tools.conversion.edit import EditedCheckpoint, edit_checkpoint, open_lora_merge
from ckpt_tools.conversion.lay_out import LaidOutCheckpoint, lay_out_checkpoint
from ckpt_tools.conversion.report import (
    ConvertReport,
    PlanReport,
    build_plan_report,
    log_plan,
    select_written_tensors,
)
from ckpt_tools.conversion.target import (
    ConversionTarget,
    choose_direct_io,
    choose_requested_writer,
    choose_writer_by_source,
    estimate_client_bytes,
    find_replaced_files,
    is_whole_state_written,
)
from ckpt_tools.core.accounting import check_nothing_lost
from ckpt_tools.core.manifest import MASTER, Kind, StateKey, TensorEntry
from ckpt_tools.core.notes import merge_notes
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertRequest
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.planning.plan import Plan, estimate_reading_bytes, make_plan
from ckpt_tools.process.collector import pause_collector
from ckpt_tools.reading.checkpoint import make_read_back_options
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.stores.publishing import NO_FILES
from ckpt_tools.stores.urls import check_not_nested, open_output_location
from ckpt_tools.transfer.workers import DIRECT_WORKERS, WorkerPool


@dataclass(frozen=True, slots=True)
class PreparedConversion:
    """A conversion that passed every check and is ready to run."""

    request: ConvertRequest
    opened: OpenedCheckpoint
    target: ConversionTarget
    laid_out: LaidOutCheckpoint
    plan: Plan
    report: PlanReport
    is_direct: bool
    """True if the bytes pass the page cache."""


def plan_conversion(request: ConvertRequest) -> PlanReport:
    """Plan a conversion; write nothing."""
    return prepare_conversion(request, choose_worker_pool(request)).report


def run_conversion(request: ConvertRequest, *, check_source: Callable[[], None] | None = None) -> ConvertReport:
    """Write the destination: whole, or not at all. ``check_source`` is called once all is read; if it raises, nothing
    is published.

    Raises:
        DestinationExistsError, StoreError, FormatError: as the stores and the source's bytes say.
        DifferenceError: tensors that become one differ; nothing was written.
    """
    pool = choose_worker_pool(request)
    prepared = prepare_conversion(request, pool)
    # A plan alone moves nothing, and needs nothing of what moves bytes.
    from ckpt_tools.conversion.write import write_output

    start_seconds = time.perf_counter()
    opened, target, store, part = prepared.opened, prepared.target, prepared.laid_out.source.store, request.part_number
    report = prepared.report
    if part is None or part.number == 1:
        report = _note_differing_copies(prepared)
        if prepared.plan.manifest.must_equal:
            from ckpt_tools.transfer.tensor_checks import check_required_equal

            check_required_equal(prepared.plan.manifest, store)
    if part is not None:
        from ckpt_tools.conversion.write_part import write_part

        written = write_part(prepared.plan, store, target.place, request, part, is_direct=prepared.is_direct)
    else:
        written = write_output(
            prepared.plan,
            store,
            target.place,
            request,
            pool,
            target_format=target.writer.name,
            num_bytes=report.bytes_written,
            is_direct=prepared.is_direct,
            replaced_sizes=report.removed_files,
            read_back_options=make_read_back_options(opened.manifest.format, target.writer.name, request),
            check_source=check_source,
        )
    return ConvertReport(
        report,
        target.place.url,
        written.bytes_read,
        written.bytes_written,
        written.bytes_recovered,
        written.bytes_copied,
        time.perf_counter() - start_seconds,
        written.digests_url,
        prepared.laid_out.format_loading_code(target),
        written.missing_parts,
    )


def choose_worker_pool(request: ConvertRequest) -> WorkerPool:
    return WorkerPool.choose_for_urls(
        request.runner, request.address, request.workers, request.dst, *request.source_urls
    )


@pause_collector()
def prepare_conversion(
    request: ConvertRequest, pool: WorkerPool, *, checks_destination: bool = True
) -> PreparedConversion:
    """Everything about a conversion but the moving of bytes; writes nothing. Without ``checks_destination`` the
    destination may be there already.

    Raises:
        CkptError: whatever stands in the way is found here, before the destination is touched.
    """
    place = open_output_location(request.dst, request.storage_options)
    # Which state is read depends on the format that the user asks for; the source's own is known only after reading.
    requested_writer = choose_requested_writer(request, place.name)
    reads_weights_only = bool(request.other_sources) or (
        requested_writer is not None and not is_whole_state_written(request, requested_writer)
    )
    opened = open_checkpoint(
        request.src,
        replace(request.read_options, state="model" if reads_weights_only else "all"),
        format_name=request.from_,
        storage_options=request.storage_options,
        config_folder=request.config,
        step_by_name=True,
    )
    check_not_nested(opened.url, request.dst, request.storage_options)
    if request.averaging is not None:
        from ckpt_tools.conversion.average import open_average

        opened = open_average(request, opened, request.averaging)
    opened, merge = open_lora_merge(request, opened)
    fill = None
    if request.fill is not None:
        from ckpt_tools.runs.weight_source import open_fill

        opened, fill = open_fill(opened, request, request.fill)
        check_not_nested(request.fill, request.dst, request.storage_options)
    writer = requested_writer or choose_writer_by_source(request, opened.manifest, place.name)
    target = ConversionTarget.of(request, place, writer, opened.manifest)
    edited = edit_checkpoint(opened, target, request, merge, fill)
    laid_out = lay_out_checkpoint(opened, edited, target, request)
    is_direct = choose_direct_io(request, opened, laid_out.layout)
    plan = make_plan(
        laid_out.manifest,
        laid_out.layout,
        memory_bytes=request.memory_bytes,
        num_workers=_choose_plan_workers(request, pool, is_direct=is_direct),
        is_limit=request.memory is not None,
        required_task_bytes=target.compute_required_task_bytes(laid_out.layout),
        reading_bytes=estimate_reading_bytes(opened.manifest),
        remote_bytes=estimate_client_bytes(request.dst, *request.source_urls),
        copy_rules=target.find_copy_rules(laid_out.source),
    )
    figures = plan.compute_figures()
    written_tensors = select_written_tensors(plan.manifest, figures)
    _check_written_tensors(request, opened, edited, laid_out, written_tensors)
    replaced_sizes = find_replaced_files(place, plan.layout, request) if checks_destination else NO_FILES
    report = replace(
        build_plan_report(plan, figures, written_tensors, opened.manifest.format, writer.name, replaced_sizes),
        notes=laid_out.notes,
        renamed=edited.applied_options.new_name_by_old,
        recipe=None if edited.recipe is None else edited.recipe.used_recipe,
    )
    log_plan(report)
    return PreparedConversion(request, opened, target, laid_out, plan, report, is_direct)


def _choose_plan_workers(request: ConvertRequest, pool: WorkerPool, *, is_direct: bool) -> int:
    """The number of workers that share the memory of a plan: more threads where each waits for a disk."""
    is_chosen = request.workers is not None or request.runner != "threads"
    num_workers = pool.workers_per_process
    return num_workers if is_chosen or not is_direct else max(num_workers, DIRECT_WORKERS)


def _check_written_tensors(
    request: ConvertRequest,
    opened: OpenedCheckpoint,
    edited: EditedCheckpoint,
    laid_out: LaidOutCheckpoint,
    written_tensors: Mapping[StateKey, TensorEntry],
) -> None:
    """Raises UsageError or UnsupportedError where no tensor is written, or no weight though the source has some and the
    user selected no others. Raises CkptError for a tensor that is neither written nor named in a note."""
    has_selection = bool(request.include or request.exclude)
    if not written_tensors and has_selection:
        raise UsageError(
            f"{format_option('include')} and {format_option('exclude')} leave no tensor that could be written"
        )
    if not written_tensors:
        raise UnsupportedError("no tensor would be written: the target format has no place for those of the source")
    if not has_selection and _has_weights(opened.manifest.tensors) and not _has_weights(written_tensors):
        raise UnsupportedError("none of the model's weights would be written")
    check_nothing_lost(
        opened.manifest, edited.applied_options.manifest, written_tensors, laid_out.notes, is_mapped=edited.is_mapped
    )


def _has_weights(tensors: Mapping[StateKey, TensorEntry]) -> bool:
    return any(entry.kind in (Kind.PARAMETER, Kind.BUFFER) for entry in tensors.values())


def _note_differing_copies(prepared: PreparedConversion) -> PlanReport:
    """The report with notes on weights whose fp32 master is not their own value, of a sample. With a selection no byte
    of another tensor is read, and so none is compared."""
    manifest, request, report = prepared.opened.manifest, prepared.request, prepared.report
    if request.include or request.exclude or request.drop or not any(key.slot == MASTER for key in manifest.tensors):
        return report
    from ckpt_tools.transfer.tensor_checks import note_differing_copies

    notes = note_differing_copies(
        manifest, prepared.laid_out.source.store, _describe_written_copy(prepared), is_sample=True
    )
    return replace(report, notes=merge_notes((*report.notes, *notes)))


def _describe_written_copy(prepared: PreparedConversion) -> str:
    """The copy of a weight that is written, in words for the note on copies that differ."""
    manifest = prepared.opened.manifest
    if prepared.target.writes_weights_and_masters:
        return "both are written"
    if prepared.request.choose_weight_copy(manifest) == "model":
        reason = ", as ZenFlow updates masters later" if manifest.masters_are_outdated else ""
        return f"the model's is written{reason}"
    return f"the master is written; {format_option('weights', 'model')} writes the model's"
