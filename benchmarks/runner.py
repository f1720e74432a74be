"""Runs benchmarks, each by a function of this package, and keeps their records."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from benchmarks.measure import ROOT, MeasureError, measure_success
from fixtures.cache import code_of

CKPT_TOOLS = [sys.executable, "-m", "ckpt_tools"]
FRAMEWORKS = ("torch", "deepspeed", "safetensors", "accelerate")

WAYS = WARM, DURABLE, LOADED = "warm", "durable", "loaded"
"""Ways of a conversion: with the input in memory and an output that may stay there; with the input on the disk, and the
output on it at the end; and durable beside two processes that take the processors."""

MACHINE = "machine"
"""Name of the record about the machine of the last run."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Size of the inputs, rounds of turns, and seconds that one command may take."""

    size_bytes: int
    runs: int
    time_limit: float
    data: Path
    ways: tuple[str, ...] = WAYS


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A measurement by a function of `benchmarks`, imported when it is called: most of them import torch.

    The function gets the name and the settings, and returns the fields of the record, or the lines of its tables.
    Without ``--size``, its checkpoint has so many ``gigabytes``.
    """

    name: str
    function: str
    heading: str
    gigabytes: float = 1

    def measure(self, settings: RunSettings) -> Record:
        function: Callable[[str, RunSettings], Record | Sequence[str]] = resolve_name(f"benchmarks.{self.function}")
        load_before = os.getloadavg()[0]
        found = function(self.name, settings)
        if isinstance(found, dict):
            return found
        loads = f"{load_before:.1f} of {os.cpu_count()} before, {os.getloadavg()[0]:.1f} after"
        return {"lines": [*found, "", f"Load of the machine: {loads}."]}


PARTS = (
    Benchmark("memory", "commands:measure_memory", "Memory by size: DCP, 4 ranks → safetensors"),
    Benchmark("start-up", "commands:measure_startup", "Start-up"),
    Benchmark("many", "commands:measure_many_tensors", "700,000 tensors in one file of safetensors"),
    Benchmark("predict", "inference:measure_predicting", "Inference: files and datasets"),
    Benchmark("load", "inference:measure_loading", "Inference: loading"),
    Benchmark("serve", "serving:measure_service", "Inference: the service"),
    Benchmark("fsdp2-step", "training:measure_training", "Training: a step of FSDP2"),
    Benchmark("zero2-step", "training:measure_training", "Training: a step of ZeRO-2"),
    Benchmark("resume", "training:measure_training", "Training: resuming"),
    Benchmark("stall", "training:measure_training", "Training: saves"),
    Benchmark("s3", "s3:measure_s3_conversion", "From S3 to S3, shards of 1.4 and 3.9 MiB", 2),
    Benchmark("s3-wide", "s3:measure_s3_conversion", "From S3 to S3, shards of 8 and 22 MiB", 2),
    Benchmark("distant", "distant:measure_distance", "Distant stores: 50 ms of latency", 0.8),
    Benchmark("ray", "ray_driver:measure_driver", "The driver of `--runner ray`"),
)
"""The measurements beside the conversions of `works.toml`."""


class BenchmarkJournal:
    """The latest record of each benchmark by its name, a line each; written at once, so that a stopped suite can be
    resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.records: dict[str, Record] = {record["name"]: record for record in map(json.loads, lines)}

    def put(self, record: Record) -> None:
        self.records.pop(record["name"], None)
        self.records[record["name"]] = record  # at the end, as the latest
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in self.records.values()))
        partial.replace(self.path)


def measure_benchmarks(
    benchmarks: Collection[Benchmark],
    settings: RunSettings,
    size_bytes: int | None,
    journal: BenchmarkJournal,
    *,
    fresh: bool,
) -> None:
    """Measure the benchmarks that the journal lacks, and those with figures of another size or of other code.

    Raises:
        MeasureError: some could not be measured; the others were.
    """
    journal.put({"name": MACHINE, **describe_machine(settings.data)})
    failures = []
    for benchmark in benchmarks:
        size = size_bytes or int(benchmark.gigabytes * 1e9)
        key: Record = {"name": benchmark.name, "code": digest_code(), "size_bytes": size}
        if not fresh and key.items() <= journal.records.get(benchmark.name, {}).items():
            continue
        say(f"{benchmark.name}: {benchmark.heading}")
        try:
            journal.put({**key, **benchmark.measure(replace(settings, size_bytes=size))})
        except MeasureError as error:
            failures.append(f"{benchmark.name}: {error}")
    if failures:
        raise MeasureError("\n".join(failures))


def describe_machine(folder: Path) -> dict[str, str]:
    """Processor, memory, the file system that `folder` is on, kernel, Python and the peers' versions."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    # Family and number too, since a virtual machine may hide the model.
    numbers = f"family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    folder = folder.resolve()
    return {
        "processor": f"{fields.get('model name', platform.machine())} ({numbers}), {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "file system": max((point, kind) for point, kind in mounts if folder.is_relative_to(point))[1],
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in FRAMEWORKS},
    }


@cache
def digest_code() -> str:
    """A digest of the converter's sources without docstrings and comments: figures of different code are never put side
    by side."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "ckpt_tools").rglob("*.py")):
        digest.update(code_of(path))
    return digest.hexdigest()[:12]


def printed_lines(command: Sequence[str], settings: RunSettings) -> list[str]:
    """Output of the command. Raises MeasureError if it fails."""
    log = settings.data / "log"
    measure_success(command, log, time_limit=settings.time_limit)
    return log.read_text().splitlines()


def say(line: str) -> None:
    print(line, flush=True)
