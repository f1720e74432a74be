"""``--profile``: a trace and the slowest operations of a few steps on each rank, with CUDA also a memory snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ..config.train_config import TrainConfig

PROFILE_NAME = "profile"
SKIPPED, WARMUP, PROFILED = 1, 1, 5
"""Numbers of steps. The first one allocates, and the profiler is slow in its first."""

ROWS = 30
MAX_ALLOCATIONS = 100_000


@contextmanager
def profiled(config: TrainConfig) -> Iterator[Callable[[], None]]:
    """A function to call after each step; it does nothing without ``--profile``."""
    if not config.profile:
        yield lambda: None
        return
    folder = config.out / PROFILE_NAME
    folder.mkdir(parents=True, exist_ok=True)
    with_cuda = torch.cuda.is_available()
    if with_cuda:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if with_cuda else [])]
    with profile(
        activities=activities,
        schedule=schedule(wait=SKIPPED, warmup=WARMUP, active=PROFILED, repeat=1),
        on_trace_ready=lambda found: _write(found, folder),
        profile_memory=True,
        with_flops=True,
    ) as profiler:
        yield profiler.step


def _write(profiler: profile, folder: Path) -> None:
    name = f"rank_{torch.distributed.get_rank()}"
    profiler.export_chrome_trace(str(folder / f"{name}.json"))
    averages = profiler.key_averages()
    flops = sum(event.flops for event in averages)
    table = averages.table(sort_by="self_cpu_time_total", row_limit=ROWS)
    (folder / f"{name}.txt").write_text(f"{flops:,} FLOPs of matrix products in {PROFILED} steps\n{table}\n")
    if torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(folder / f"memory_{name}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
