"""Moves the bytes of a plan to its destination, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckpt_tools.core.options import ConvertRequest, ReadOptions
from ckpt_tools.messages.progress import ProgressMeter, ignore_progress
from ckpt_tools.planning.plan import Plan
from ckpt_tools.process.signals import defer_signals
from ckpt_tools.stores.publishing import OutputLocation
from ckpt_tools.stores.source import Store
from ckpt_tools.transfer.execute import execute_plan
from ckpt_tools.transfer.journal import JournalPolicy
from ckpt_tools.transfer.runners.threads import ThreadRunner
from ckpt_tools.transfer.workers import WorkerPool


@dataclass(frozen=True, slots=True)
class WrittenOutput:
    """An output that was published, or a part of one, which is published once there are no ``missing_parts``.
    ``bytes_recovered`` were written by an earlier run; ``digests_url`` is that of the list of digests, if there is
    one."""

    bytes_read: int
    bytes_written: int
    bytes_recovered: int
    bytes_copied: int
    digests_url: str | None = None
    missing_parts: tuple[int, ...] = ()


def write_output(
    plan: Plan,
    store: Store,
    place: OutputLocation,
    request: ConvertRequest,
    pool: WorkerPool,
    *,
    target_format: str,
    num_bytes: int,
    is_direct: bool,
    replaced_sizes: Mapping[str, int],
    read_back_options: ReadOptions,
    check_source: Callable[[], None] | None = None,
) -> WrittenOutput:
    """Write the files of ``plan``, ``num_bytes`` in all, from ``store`` to ``place``: whole, or not at all.
    ``check_source`` is called once all is read; if it raises, nothing is published.

    Raises:
        DestinationExistsError, StoreError, FormatError: as the stores and the source's bytes say.
    """
    on_progress = request.on_progress or ignore_progress
    journal_policy = JournalPolicy(keeps_output=request.resume)
    claim_context = place.claim(overwrite=request.overwrite, resume=request.resume, fsync=request.fsync)
    # In this order: signals wait while Ray starts, which is before the destination is held, and Ray ends after the
    # destination was cleaned up.
    with (
        pool.connect_runner(),
        claim_context as claim,
        pool.start_runner(plan, store, claim.destination) as (runner, board),
    ):
        if is_direct:
            store.bypass_page_cache()
            claim.destination.bypass_page_cache()
        meter = ProgressMeter(on_progress, num_bytes)
        threads = ThreadRunner(plan.num_workers)
        journal = journal_policy.open(claim.log, plan, store, claim.destination, threads)
        with journal_policy.preserve_output_on_error(journal):
            result = execute_plan(
                plan, store, claim.destination, runner=runner, on_bytes=meter.add_bytes, history=journal, board=board
            )
            journal_policy.flush_before_publishing(journal, is_replacing=bool(replaced_sizes))
            digests, staged_lists = None, []
            if request.checksum:
                from ckpt_tools.verification.digest_files import OutputDigests

                digests = OutputDigests(
                    claim,
                    place,
                    target_format,
                    read_back_options,
                    plan.num_workers,
                    lambda total: ProgressMeter(on_progress, total).add_bytes,
                    request.storage_options,
                )
                staged_lists = digests.write_staged_list()
            if check_source is not None:
                check_source()
            with defer_signals():  # publishing is the one step that a signal must not tear apart
                claim.publish_files([*staged_lists, *(file.path for file in plan.layout.files)], replaced_sizes)
        # Output in an object store can be read, and so digested, only once it is published.
        digests_url = None if digests is None else digests.publish_list(staged_lists)
    return WrittenOutput(
        result.bytes_read, result.bytes_written, journal.bytes_recovered, result.bytes_copied, digests_url
    )
