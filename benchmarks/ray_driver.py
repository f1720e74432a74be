"""Costs of the driver of `--runner ray` for a task, and of a board of checksums for a question.

Tasks are empty, with jobs and receipts of the usual size, so that only the driver is measured. Its processor time
bounds a large cluster; the wall time here includes that of the workers. The driver is a process of its own, whose
memory is measured too.
"""

from __future__ import annotations

import resource
import sys
import time
from contextlib import closing
from typing import Any

from ckpt_tools.planning.tasks import TransferTask
from ckpt_tools.transfer.crc_board import PartCrc
from ckpt_tools.transfer.execute import AssignedTask, TaskReceipt
from ckpt_tools.transfer.runners.ray import RayRunner
from ckpt_tools.transfer.runners.ray_board import open_board
from ckpt_tools.transfer.runners.ray_cluster import connect_to_cluster

NUM_WORKERS, NUM_TASKS, NUM_QUESTIONS = 2, 4000, 500


def measure_driver(name: str, settings: Any) -> list[str]:
    from benchmarks.runner import printed_lines  # imports torch, whose memory is not the driver's

    lines = printed_lines([sys.executable, "-m", "benchmarks.ray_driver"], settings)
    return [line for line in lines if line.startswith("- ")]


def receive_task(job: AssignedTask) -> TaskReceipt:
    parts = (PartCrc((0, 1 << 30), job.task.start, job.task.stop, 1),)
    return TaskReceipt(job.task, 1, parts, "0" * 34, bytes_read=job.task.num_bytes)


def check_nothing() -> None:
    """Check of a worker."""


def hand_out_tasks() -> None:
    jobs = [
        AssignedTask(TransferTask(0, n, n << 23, (n + 1) << 23), "upload-" + "x" * 60, is_journaled=True)
        for n in range(NUM_TASKS)
    ]
    with closing(RayRunner(NUM_WORKERS, lambda job: job.task.num_bytes, 1 << 40, check_nothing)) as runner:
        list(runner.run(receive_task, jobs[:200]))
        clocks = (time.perf_counter, time.process_time, time.thread_time)
        started = [clock() for clock in clocks]
        list(runner.run(receive_task, jobs))
        wall, cpu, thread = ((clock() - start) / NUM_TASKS for clock, start in zip(clocks, started, strict=True))
    print(f"- {NUM_WORKERS} workers: {1 / wall:,.0f} tasks a second of wall time")
    print(
        f"- driver: {cpu * 1e6:.0f} us of processor a task, {thread * 1e6:.0f} us of them in the thread that hands out"
    )


def ask_board() -> None:
    with closing(open_board()) as board:
        board.max_unanswered = 0
        started = time.perf_counter()
        for n in range(NUM_QUESTIONS):
            board.post_checksums(0, [PartCrc((n, n + 1), n, n + 1, n)])
        seconds = (time.perf_counter() - started) / NUM_QUESTIONS
    print(f"- board: {seconds * 1e6:.0f} us to be told of a part and answer")


if __name__ == "__main__":
    with connect_to_cluster(None, NUM_WORKERS):
        hand_out_tasks()
        ask_board()
    print(f"- driver's memory at its most: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
