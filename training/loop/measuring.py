"""Metrics of training steps (loss, memory and speed) every ``--log-every`` steps, and the trace of ``--profile``."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile, schedule
from torch.utils._pytree import tree_map_only

from ..checkpoints.collectives import gather_values
from ..checkpoints.settings import RunProgress
from ..config.train_config import TrainConfig
from ..engines.optimizers import LearningRateSchedule
from ..models.losses import batch_tensors
from ..models.zoo import make_spec
from .outlets import Outlet
from .saving import SaveRecord

SHOWN_SECONDS = 0.5  # minimum time between two statuses on the screen; every measured step is recorded

PEAK_TFLOPS = {"A100": 312, "H100 PCIe": 756, "H100": 989, "H200": 989, "L40S": 362, "B200": 2250}
"""Dense peak in bf16 and fp16 by a part of the GPU's name, from NVIDIA's data sheets."""

BACKWARD_RATIO = 2  # times the arithmetic of the forward pass


def work_per_sample(config: TrainConfig, batch: Any) -> dict[str, float]:
    """Tokens a second of a text, and the model FLOPs utilization (MFU) if the peak and the arithmetic are known, at one
    sample a second. From the first batch of a run."""
    tensors = batch_tensors(batch)
    words = next((each for each in tensors if each.ndim == 2 and each.dtype == torch.int64), None)
    peak = (config.peak_tflops or _known_peak(config)) * 1e12 * config.num_workers
    share = count_flops(config, batch) / len(tensors[0]) / peak if peak else 0.0
    work = {"tokens_per_second": 0 if words is None else words.shape[1], "mfu": share}
    return {name: each for name, each in work.items() if each}


def _known_peak(config: TrainConfig) -> float:
    if not torch.cuda.is_available() or config.precision == "fp32":
        return 0.0
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_TFLOPS.items() if all(word in name for word in part.split())), 0.0)


def count_flops(config: TrainConfig, batch: Any) -> float:
    """FLOPs of matrix products of a step on this batch, without what activation checkpointing computes again. They are
    counted on a model without memory; 0 if that cannot compute, as one that reads values of its tensors."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton

    empty = tree_map_only(Tensor, lambda each: torch.empty_like(each, device="meta"), batch)
    try:
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            model = make_spec(config).make()
            model.loss(model.module, empty)
    except Exception:
        # A model of the user's may raise anything.
        return 0.0
    return float((1 + BACKWARD_RATIO) * counter.get_total_flops())


class SpeedMeter:
    """Speed of steps, without evaluation and saving."""

    def __init__(self) -> None:
        self._steps, self._seconds, self._since = 0, 0.0, time.perf_counter()

    def count_step(self) -> None:
        self._steps += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time of the block."""
        self._seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def steps_per_second(self) -> float:
        """Rate since the last call."""
        now = time.perf_counter()
        rate = self._steps / max(self._seconds + now - self._since, 1e-9)
        self._steps, self._seconds, self._since = 0, 0.0, now
        return rate


class StepLog:
    """Measures every ``log_every``-th step on all ranks; the first rank records and shows it."""

    def __init__(self, config: TrainConfig, schedule: LearningRateSchedule, outlet: Outlet, last_step: int) -> None:
        self._config, self._schedule, self._outlet = config, schedule, outlet
        self._last_step = last_step
        self._leads = torch.distributed.get_rank() == 0
        self._shown_at = 0.0
        self.meter = SpeedMeter()
        self.work: dict[str, float] | None = None
        """Of :func:`work_per_sample`; known on the first rank from the first batch on."""

    def after_step(self, progress: RunProgress, loss: Tensor, saves: list[SaveRecord], accuracy: float | None) -> None:
        """Called after each step with this rank's mean loss; collective."""
        self.meter.count_step()
        if progress.step % self._config.log_every == 0:
            figures = self._measure_step(progress.step, loss)
            if self._leads:
                self._outlet.record_metrics(figures)
                self._show_status(figures, saves, accuracy)

    def _measure_step(self, step: int, loss: Tensor) -> dict[str, Any]:
        """Line of ``metrics.jsonl``. ``loss`` is the mean over ranks, ``samples_per_second`` the rate since the last
        measurement; ``peak_rss`` and, with CUDA, ``cuda_peak`` are peak bytes of each rank. The loss is read before the
        time, because that waits for the device."""
        on_cuda = torch.cuda.is_available()
        mine = [float(loss), peak_rss(), torch.cuda.max_memory_allocated() if on_cuda else 0]
        losses, resident, on_gpu = gather_values(*mine)
        rate = self.meter.steps_per_second() * self._config.batch_size
        return {
            "step": step,
            "loss": fmean(losses),
            "learning_rate": self._config.learning_rate * self._schedule.compute_factor(step - 1),
            "samples_per_second": rate,
            **{name: each * rate for name, each in (self.work or {}).items()},
            "peak_rss": [int(each) for each in resident],
            **({"cuda_peak": [int(each) for each in on_gpu]} if on_cuda else {}),
        }

    def _show_status(self, figures: dict[str, Any], saves: list[SaveRecord], accuracy: float | None) -> None:
        if (now := time.monotonic()) - self._shown_at >= SHOWN_SECONDS:
            self._shown_at = now
            left = (self._last_step - figures["step"]) * self._config.batch_size / figures["samples_per_second"]
            saved = saves[-1] if saves else None
            self._outlet.show_status(format_status(figures, self._last_step, left, accuracy, saved))


def format_status(
    figures: dict[str, Any], last_step: int, seconds_left: float, accuracy: float | None, saved: SaveRecord | None
) -> str:
    """Status of a run in one line; what a narrow terminal may cut off is at its end."""
    parts = [
        f"step {figures['step']}/{last_step}",
        f"{timedelta(seconds=round(seconds_left))} left",
        f"loss {figures['loss']:.4f}",
        *([] if accuracy is None else [f"accuracy {accuracy:.4f}"]),
        f"{figures['samples_per_second']:,.0f} samples/s",
        *([f"{figures['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in figures else []),
        *([f"MFU {figures['mfu']:.1%}"] if "mfu" in figures else []),
        f"memory {_format_size(max(figures['peak_rss']))}",
        *([f"on the GPU {_format_size(max(figures['cuda_peak']))}"] if "cuda_peak" in figures else []),
        f"lr {figures['learning_rate']:.2e}",
        *([] if saved is None else [f"{saved.checkpoint} saved, stall {saved.stall_seconds:.2f} s"]),
    ]
    return "  ".join(parts)


def _format_size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def peak_rss() -> int:
    """Peak memory of this process in bytes. On Linux ``getrusage`` would include its parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [peak] = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(peak) * 1024


SKIPPED_STEPS, WARMUP_STEPS, PROFILED_STEPS = 1, 1, 5  # the first step allocates; the profiler is slow in its first
TABLE_ROWS = 30
MAX_ALLOCATIONS = 100_000


@contextmanager
def profile_steps(config: TrainConfig) -> Iterator[Callable[[], None]]:
    """A function to call after each step; it does nothing without ``--profile``."""
    if not config.profile:
        yield lambda: None
        return
    folder = config.out / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
    with profile(
        schedule=schedule(wait=SKIPPED_STEPS, warmup=WARMUP_STEPS, active=PROFILED_STEPS, repeat=1),
        on_trace_ready=partial(_write_profile, folder),
        profile_memory=True,
        with_flops=True,
    ) as profiler:
        yield profiler.step


def _write_profile(folder: Path, profiler: profile) -> None:
    name = f"rank_{torch.distributed.get_rank()}"
    profiler.export_chrome_trace(str(folder / f"{name}.json"))
    averages = profiler.key_averages()
    flops = sum(event.flops for event in averages)
    table = averages.table(sort_by="self_cpu_time_total", row_limit=TABLE_ROWS)
    (folder / f"{name}.txt").write_text(f"{flops:,} FLOPs of matrix products in {PROFILED_STEPS} steps\n{table}\n")
    if torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(folder / f"memory_{name}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
