"""Workers of a conversion: threads here, or the processes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tools.core.option_names import DEFAULT_RUNNER, RUNNERS, format_option
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.planning.plan import Plan
    from ckpt_tools.stores.destination import Destination
    from ckpt_tools.stores.source import Store
    from ckpt_tools.transfer.crc_board import ChecksumBoard
    from ckpt_tools.transfer.runners import TaskRunner


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """``runner`` is ``threads`` or ``ray``, the latter on the cluster at ``address``. ``num_workers`` may be None for
    ``ray``: one for each processor of the cluster.

    Raises:
        UsageError: no such runner, an address for threads, or fewer than one worker.
    """

    runner: str = DEFAULT_RUNNER
    address: str | None = None
    num_workers: int | None = None

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            raise UsageError(f"{format_option('runner', self.runner)} is not one of {', '.join(RUNNERS)}")
        if self.address is not None and self.runner != "ray":
            raise UsageError.of("address", f"{format_option('address')} is for {format_option('runner', 'ray')}")
        if self.num_workers is not None:
            _check_num_workers(self.num_workers)

    @classmethod
    def choose_for_urls(
        cls, runner: str, address: str | None, requested_workers: int | None, *urls: str | Path
    ) -> WorkerPool:
        """The pool for a conversion between ``urls``, which ``plan`` plans for and ``convert`` runs. Raises as the
        class."""
        return cls(
            runner, address, requested_workers if runner == "ray" else choose_num_workers(requested_workers, *urls)
        )

    @property
    def workers_per_process(self) -> int:
        """Number of workers that share the memory of a plan."""
        return 1 if self.runner == "ray" else choose_num_workers(self.num_workers)

    def connect_runner(self) -> AbstractContextManager[None]:
        """The connection to the cluster, if the runner needs one. It is opened before a destination is claimed, because
        signals wait while Ray starts, and closed after the destination is cleaned up.

        Raises:
            UsageError, StoreError: as ``runners.ray_cluster.connect_to_cluster`` says.
        """
        if self.runner == "threads":
            return nullcontext()
        from ckpt_tools.transfer.runners.ray_cluster import connect_to_cluster

        return connect_to_cluster(self.address, self.num_workers or choose_num_workers(None))

    @contextmanager
    def start_runner(
        self, plan: Plan, source: Store, target: Destination
    ) -> Iterator[tuple[TaskRunner, ChecksumBoard | None]]:
        """Within ``connect_runner``: a runner for the plan's tasks, and the board that its workers share if they are
        other processes."""
        if self.runner == "threads":
            from ckpt_tools.transfer.runners.threads import ThreadRunner

            yield ThreadRunner(plan.num_workers), None
            return
        with _start_ray_runner(self.num_workers, plan, source, target) as runner_and_board:
            yield runner_and_board


@contextmanager
def _start_ray_runner(
    requested_workers: int | None, plan: Plan, source: Store, target: Destination
) -> Iterator[tuple[TaskRunner, ChecksumBoard]]:
    from ckpt_tools.stores.shared_files import prepare_shared_files_check
    from ckpt_tools.transfer.runners.ray import ITEMS_PER_WORKER, RayRunner
    from ckpt_tools.transfer.runners.ray_board import open_board
    from ckpt_tools.transfer.runners.ray_cluster import count_cluster_cpus

    num_workers = requested_workers or count_cluster_cpus()
    with prepare_shared_files_check(source, target) as check_shared_files, closing(open_board()) as board:
        bytes_in_flight = num_workers * ITEMS_PER_WORKER * plan.task_bytes
        runner = RayRunner(
            num_workers,
            bytes_of_item=lambda item: item.task.num_bytes,
            bytes_in_flight=bytes_in_flight,
            check=check_shared_files,
            board=board,
        )
        with closing(runner):
            yield runner, board


MAX_DEFAULT_WORKERS = 8
"""Threads beyond the processors only wait for each other, and beyond eight the disk is the limit."""

DIRECT_WORKERS = 4
"""Threads for direct I/O, in which each waits for the disk while it reads or writes."""

REMOTE_WORKERS = 16
"""Threads for a distant store, whose requests wait more than they work."""


def choose_num_workers(requested_workers: int | None, *urls: str | Path | None) -> int:
    """The number of threads for ``urls``: ``requested_workers``, else one for each processor that this process may use,
    and more if one of the URLs is remote. Raises UsageError for fewer than one."""
    if requested_workers is not None:
        return _check_num_workers(requested_workers)
    from ckpt_tools.arguments import is_remote

    is_distant = any(url is not None and is_remote(url) for url in urls)
    return max(min(len(os.sched_getaffinity(0)), MAX_DEFAULT_WORKERS), REMOTE_WORKERS if is_distant else 1)


def _check_num_workers(num_workers: int) -> int:
    if num_workers < 1:
        raise UsageError(f"{format_option('workers', num_workers)}: at least one is needed")
    return num_workers
