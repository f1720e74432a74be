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
    from ckpt_tools.transfer.crc_board import Board
    from ckpt_tools.transfer.runners.base import Runner


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
            _checked(self.num_workers)

    @classmethod
    def choose(cls, runner: str, address: str | None, asked: int | None, *urls: str | Path) -> WorkerPool:
        """The pool for a conversion between ``urls``, which ``plan`` plans for and ``convert`` runs. Raises as the
        class."""
        return cls(runner, address, asked if runner == "ray" else choose_workers(asked, *urls))

    @property
    def workers_per_process(self) -> int:
        """Number of workers that share the memory of a plan."""
        return 1 if self.runner == "ray" else choose_workers(self.num_workers)

    def connected(self) -> AbstractContextManager[None]:
        """The connection to the cluster, if the runner needs one. A signal waits while Ray starts, so this comes before
        a destination is claimed; and Ray stops after the destination is cleaned up.

        Raises:
            UsageError, StoreError: as ``runners.ray_cluster.connected`` says.
        """
        if self.runner == "threads":
            return nullcontext()
        from ckpt_tools.transfer.runners.ray_cluster import connected

        return connected(self.address, self.num_workers or choose_workers(None))

    @contextmanager
    def start(self, plan: Plan, source: Store, target: Destination) -> Iterator[tuple[Runner, Board | None]]:
        """Within ``connected``: a runner for the plan's tasks, and the board that its workers share if they are other
        processes."""
        if self.runner == "threads":
            from ckpt_tools.transfer.runners.threads import ThreadRunner

            yield ThreadRunner(plan.num_workers), None
            return
        with _on_ray(self.num_workers, plan, source, target) as both:
            yield both


@contextmanager
def _on_ray(asked: int | None, plan: Plan, source: Store, target: Destination) -> Iterator[tuple[Runner, Board]]:
    from ckpt_tools.stores.shared_files import shared_files
    from ckpt_tools.transfer.runners.ray import ITEMS_PER_WORKER, RayRunner
    from ckpt_tools.transfer.runners.ray_board import open_board
    from ckpt_tools.transfer.runners.ray_cluster import num_cpus

    num_workers = asked or num_cpus()
    with shared_files(source, target) as check, closing(open_board()) as board:
        in_flight = num_workers * ITEMS_PER_WORKER * plan.task_bytes
        runner = RayRunner(
            num_workers, cost=lambda item: item.task.num_bytes, bytes_in_flight=in_flight, check=check, board=board
        )
        with closing(runner):
            yield runner, board


MAX_DEFAULT_WORKERS = 8
"""Threads beyond the processors only wait for each other, and beyond eight the disk is the limit."""

REMOTE_WORKERS = 8
"""Threads for a distant store, whose requests wait more than they work."""


def choose_workers(asked: int | None, *urls: str | Path | None) -> int:
    """The threads that work on what lies at ``urls``: as many as asked for, else as processors this process may use,
    and more if one of the URLs is remote. Raises UsageError for fewer than one."""
    if asked is not None:
        return _checked(asked)
    from ckpt_tools.stores.urls import is_remote

    is_distant = any(url is not None and is_remote(url) for url in urls)
    return max(min(len(os.sched_getaffinity(0)), MAX_DEFAULT_WORKERS), REMOTE_WORKERS if is_distant else 1)


def _checked(num_workers: int) -> int:
    if num_workers < 1:
        raise UsageError(f"{format_option('workers', num_workers)}: at least one is needed")
    return num_workers
