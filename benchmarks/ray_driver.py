"""Costs of the driver of `--runner ray` for a task, and of a board of checksums for a question.

    python -m benchmarks.ray_driver [WORKERS]

Tasks are empty, with jobs and receipts of the usual size, so that only the driver is measured. Its processor time
bounds a large cluster; the wall time here includes that of the workers.
"""

from __future__ import annotations

import resource
import sys
import time
from contextlib import closing

from ckpt_tools.planning.tasks import Task
from ckpt_tools.transfer.crc_board import PartCrc
from ckpt_tools.transfer.execute import PlacedTask, Receipt
from ckpt_tools.transfer.runners.ray import RayRunner
from ckpt_tools.transfer.runners.ray_board import open_board
from ckpt_tools.transfer.runners.ray_cluster import connected

NUM_TASKS = 4000
NUM_QUESTIONS = 500


def work(job: PlacedTask) -> Receipt:
    parts = (PartCrc((0, 1 << 30), job.task.start, job.task.stop, 1),)
    return Receipt(job.task, 1, parts, "0" * 34, bytes_read=job.task.num_bytes)


def nothing() -> None:
    """Check of a worker."""


def tasks(num_workers: int) -> None:
    jobs = [
        PlacedTask(Task(0, n, n << 23, (n + 1) << 23), "upload-" + "x" * 60, is_noted=True) for n in range(NUM_TASKS)
    ]
    runner = RayRunner(num_workers, lambda job: job.task.num_bytes, 1 << 40, nothing)
    with closing(runner):
        list(runner.run(work, jobs[:200]))
        wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
        list(runner.run(work, jobs))
        wall, cpu, thread = time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - thread
    print(f"{num_workers} workers: {NUM_TASKS / wall:,.0f} tasks a second of wall time")
    cpu, thread = (seconds / NUM_TASKS * 1e6 for seconds in (cpu, thread))
    print(f"driver: {cpu:.0f} us of processor a task, {thread:.0f} us of them in the thread that hands out")


def questions() -> None:
    with closing(open_board()) as board:
        board.max_unheard = 0
        started = time.perf_counter()
        for n in range(NUM_QUESTIONS):
            board.post(0, [PartCrc((n, n + 1), n, n + 1, n)])
        print(f"board: {(time.perf_counter() - started) / NUM_QUESTIONS * 1e6:.0f} us to be told of a part and answer")


def main() -> None:
    num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with connected(None, num_workers):
        tasks(num_workers)
        questions()
    print(f"driver's memory at its most: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
