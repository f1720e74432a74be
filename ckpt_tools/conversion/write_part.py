"""Writes one part of a conversion beside other processes; the one that ends last publishes the output.

part 1   [== its tasks ==] done, looks at all logs: 2 is missing ─▶ ends
part 2   [==== its tasks ====] done, looks at all logs: all there ─▶ fills in checksums, publishes
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.conversion.write import WrittenOutput
from ckpt_tools.core.options import ConvertRequest
from ckpt_tools.core.part_number import PartNumber
from ckpt_tools.errors import DestinationExistsError, StoreError, UsageError
from ckpt_tools.messages.progress import ProgressMeter, ignore_progress, log_info
from ckpt_tools.planning.plan import Plan
from ckpt_tools.planning.shares import count_share_bytes
from ckpt_tools.process.signals import defer_signals
from ckpt_tools.stores.publishing import OutputLocation
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.staging import PartStaging
from ckpt_tools.transfer.execute import TransferResult, execute_plan
from ckpt_tools.transfer.journal import (
    JournalPolicy,
    TransferJournal,
    fingerprint_plan,
    is_share_done,
    read_plan_fingerprint,
)
from ckpt_tools.transfer.runners.threads import ThreadRunner


def write_part(
    plan: Plan, store: Store, place: OutputLocation, request: ConvertRequest, part: PartNumber, *, is_direct: bool
) -> WrittenOutput:
    """Write the share of ``part``; if all others have ended, publish the output.

    Raises:
        UsageError: other parts have another plan, or are of another count. DestinationExistsError: the output is
            there, or another process writes this part. StoreError: what the parts wrote was removed, or a store failed.
        FormatError: as the source's bytes say.
    """
    staging = place.stage_part(part)
    if is_direct:
        store.bypass_page_cache()
        staging.destination.bypass_page_cache()
    result, bytes_recovered = _write_share(plan, store, place, request, staging, part)
    missing_parts = _list_missing_parts(staging.read_logs(), part)
    if not missing_parts:
        _publish_parts(plan, store, place, staging, part)
    return WrittenOutput(result.bytes_read, result.bytes_written, bytes_recovered, 0, missing_parts=missing_parts)


def _write_share(
    plan: Plan, store: Store, place: OutputLocation, request: ConvertRequest, staging: PartStaging, part: PartNumber
) -> tuple[TransferResult, int]:
    place.check_free(overwrite=False)
    threads = ThreadRunner(plan.num_workers)
    log, splits_files = staging.own_log, staging.destination.splits_files
    share_bytes = count_share_bytes(plan, part, splits_files=splits_files)
    with staging.join([file.path for file in plan.layout.files]):
        place.check_free(overwrite=False)
        earlier_lines, fingerprint = log.read(), fingerprint_plan(plan, store)
        try:
            _check_same_plan(staging, fingerprint)
            if is_share_done(earlier_lines):
                return TransferResult(0, 0), share_bytes
            journal = TransferJournal.resume(log, plan, store, staging.destination, threads)
            _check_same_plan(staging, fingerprint)  # again, now that the others see this one's
        except UsageError:
            if not earlier_lines:
                staging.forget_part()
            raise
        meter = ProgressMeter(request.on_progress or ignore_progress, share_bytes)
        with JournalPolicy(keeps_output=True).preserve_output_on_error(journal):
            result = execute_plan(
                plan, store, staging.destination, runner=threads, on_bytes=meter.add_bytes, history=journal, part=part
            )
            journal.note_share_done()
            staging.sync_log()
    return result, journal.bytes_recovered


def _check_same_plan(staging: PartStaging, fingerprint: str) -> None:
    for number, log in staging.read_logs().items():
        if read_plan_fingerprint(log) not in (None, fingerprint):
            raise UsageError(
                f"part {number} has another source, other options or another version of ckpt-tools; give all parts the "
                "same"
            )


def _list_missing_parts(logs: Mapping[int, bytes], part: PartNumber) -> tuple[int, ...]:
    return tuple(number for number in range(1, part.count + 1) if not is_share_done(logs.get(number, b"")))


def _publish_parts(plan: Plan, store: Store, place: OutputLocation, staging: PartStaging, part: PartNumber) -> None:
    """Publish what all parts wrote, unless another part that ended meanwhile has done so."""
    threads = ThreadRunner(plan.num_workers)
    try:
        with place.claim_staging(staging, overwrite=False, resume=True) as claim:
            if _list_missing_parts(staging.read_logs(), part):
                raise StoreError(f"what the parts wrote for {place.url} was removed meanwhile; run all parts again")
            journal = TransferJournal.resume(claim.log, plan, store, claim.destination, threads, trusts_parts=True)
            execute_plan(
                plan,
                store,
                claim.destination,
                runner=threads,
                on_bytes=lambda _: None,
                history=journal,
                finished_parts=part.count,
            )
            with defer_signals():
                claim.publish_files([file.path for file in plan.layout.files])
    except DestinationExistsError:
        if staging.read_logs():
            raise
        log_info("conversion", f"{place.url} was published by another part")
