"""Peak memory of DCP to safetensors by the size of the checkpoint, and what `plan` said of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator

from benchmarks.figures import verdict
from benchmarks.inputs import WEIGHT_BYTES, Cache, fit_llama
from benchmarks.machine import CKPT_TOOLS, ROOT
from benchmarks.measure import MeasureError
from benchmarks.suite import Settings, call
from benchmarks.turns import markdown
from fixtures import synthetic

TIMES = (1, 4, 16)
MAX_SPREAD = 0.1


def measure_sizes(settings: Settings) -> Iterator[str]:
    """The table of sizes of so many ``TIMES`` the asked one, and the promises."""
    rows, peaks, planned = [], [], []
    for size_bytes in (times * settings.size_bytes for times in TIMES):
        peak, said, seconds = _convert_sparse(size_bytes, settings)
        peaks.append(peak)
        planned.append(said)
        rows.append([f"{size_bytes / 1e9:g} GB", f"{peak / 1e6:.1f} MB", f"{said / 1e6:.1f} MB", f"{seconds:.2f}"])
    spread, is_within = max(peaks) / min(peaks) - 1, all(map(int.__le__, peaks, planned))
    yield from markdown("checkpoint | peak | said by `plan` | seconds", rows, texts=())
    yield f"\n- {verdict(spread <= MAX_SPREAD)}: memory differs by {spread:.1%} (at most {MAX_SPREAD:.0%})"
    yield f"- {verdict(is_within)}: memory is never above what `plan` said"


def _convert_sparse(size_bytes: int, settings: Settings) -> tuple[int, int, float]:
    """Peak memory, memory by `plan`, and seconds, of a DCP of 4 ranks in sparse files: its 16 GB take no disk. Its
    elements are zeros, which are copied like any others. A larger one has larger tensors, and as many: their index
    takes 6 kB a tensor."""
    folder = settings.data / "memory"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if not Cache(settings.data / "inputs").make_room(int(1.1 * size_bytes)):
            raise MeasureError(f"the disk has no {1.1 * size_bytes / 1e9:.0f} GB free")
        shapes = fit_llama(size_bytes // WEIGHT_BYTES).shapes()
        synthetic.dcp(shapes, 4, folder / "source", synthetic.DTYPES["fp32"])
        places = [str(folder / "source"), str(folder / "model.safetensors")]
        plan = subprocess.run([*CKPT_TOOLS, "plan", *places, "--json"], cwd=ROOT, capture_output=True, check=True)
        usage, reason = call([*CKPT_TOOLS, "convert", *places, "--quiet"], settings)
        if reason:
            raise MeasureError(reason)
        return usage.peak_bytes, json.loads(plan.stdout)["peak_memory_bytes"], usage.seconds
    finally:
        shutil.rmtree(folder)
