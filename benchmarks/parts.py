"""The measurements beside the conversions. Each gives the lines of its tables, which the journal keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pkgutil import resolve_name

from benchmarks.journal import Journal, Record
from benchmarks.machine import code, load
from benchmarks.measure import MeasureError
from benchmarks.suite import Settings, say

KIND = "part"
"""Kind of the journal's records of parts."""


@dataclass(frozen=True, slots=True)
class Part:
    """A measurement by a function of `benchmarks`, imported when it is called: most of them import torch. Without
    ``--size``, its checkpoint has so many ``gigabytes``."""

    name: str
    function: str
    heading: str
    gigabytes: float = 1

    def measure(self, settings: Settings) -> list[str]:
        function: Callable[[Settings], Iterable[str]] = resolve_name(f"benchmarks.{self.function}")
        return list(function(settings))


PARTS = (
    Part("memory", "memory:measure_sizes", "Memory by size: DCP, 4 ranks → safetensors"),
    Part("start-up", "startup:measure_commands", "Start-up"),
    Part("predict", "inference:measure_predicting", "Inference: files and datasets"),
    Part("load", "inference:measure_loading", "Inference: loading"),
    Part("serve", "serving:measure_service", "Inference: the service"),
    Part("fsdp2-step", "training:measure_fsdp2_step", "Training: a step of FSDP2"),
    Part("zero2-step", "training:measure_zero2_step", "Training: a step of ZeRO-2"),
    Part("resume", "training:measure_resume", "Training: resuming"),
    Part("stall", "training:measure_stall", "Training: saves"),
    Part("s3", "s3:measure_conversion", "From S3 to S3, shards of 1.4 and 3.9 MiB", 2),
    Part("s3-wide", "s3:measure_wide_conversion", "From S3 to S3, shards of 8 and 22 MiB", 2),
    Part("s3-shares", "s3:count_copied_shares", "Shares that S3 can copy itself", 2),
    Part("ray", "ray_driver:measure_driver", "The driver of `--runner ray`"),
)


def measure_parts(names: Collection[str], settings: Settings, size_bytes: int | None, journal: Journal) -> None:
    """Measure those of the named parts that the journal lacks.

    Raises:
        MeasureError: some could not be measured; the others were.
    """
    failed: list[str] = []
    for part in (part for part in PARTS if part.name in names):
        size_bytes_of_part = size_bytes or int(part.gigabytes * 1e9)
        key: Record = {"code": code(), "size_bytes": size_bytes_of_part}
        journal.forget(keep=key, kind=KIND, part=part.name)
        if journal.find(kind=KIND, part=part.name):
            continue
        say(part.name)
        before = load()
        try:
            lines = part.measure(replace(settings, size_bytes=size_bytes_of_part))
        except MeasureError as error:
            failed.append(f"{part.name}: {error}")
            continue
        lines += ["", f"Load of the machine: {before} before, {load()} after."]
        journal.add({"kind": KIND, "part": part.name, **key, "lines": lines})
    if failed:
        raise MeasureError("\n".join(failed))
