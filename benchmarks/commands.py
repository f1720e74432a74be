"""Commands alone: their start-up, the time to plan a recipe, and memory by the size of the checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

from benchmarks.inputs import WEIGHT_BYTES, InputCache, fit_llama
from benchmarks.measure import MeasureError, Usage, measure_success
from benchmarks.runner import CKPT_TOOLS, RunSettings, printed_lines
from benchmarks.turns import format_verdict, make_table, take_turns
from fixtures import synthetic

BARE = "python -c 'import numpy'"
NUM_TENSORS, NUM_ELEMENTS = 100, 10_000

NUM_SMALL_TENSORS = 700_000
"""A mixture of experts with its moments has 200,000 to 400,000."""

SIZES = (1, 4, 16)
"""Checkpoints whose memory is measured, in times of the asked size."""

MAX_SPREAD = 0.1


def measure_startup(name: str, settings: RunSettings) -> list[str]:
    """The table of commands that take turns with a bare Python which imports numpy, on 100 tensors of 4 MB in all.

    It has medians and their ratios to the bare Python's: of wall time, which other processes of the machine lengthen,
    and of processor time. The round that does not count compiles modules, too.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, dcp, experts = (str(folder / name) for name in ("model.safetensors", "dcp", "experts"))
        save_file({f"layers.{n}.weight": np.full(NUM_ELEMENTS, n, np.float32) for n in range(NUM_TENSORS)}, source)
        printed_lines([*CKPT_TOOLS, "convert", source, dcp, "--to", "dcp"], settings)
        # The experts of Qwen3-30B-A3B in sparse files: 96 tensors that a recipe makes 18,432 of.
        sizes = {"gate_up_proj": (128, 1536, 2048), "down_proj": (128, 2048, 768)}
        shapes: synthetic.Shapes = {
            f"model.layers.{n}.mlp.experts.{part}": shape for n in range(48) for part, shape in sizes.items()
        }
        synthetic.dcp(shapes, 8, Path(experts))
        out, recipe = str(folder / "out"), ["--to", "safetensors", "--recipe", "qwen3_moe", "--quiet"]
        commands = {
            BARE: [sys.executable, "-c", "import numpy"],
            "--help": [*CKPT_TOOLS, "--help"],
            "inspect, safetensors": [*CKPT_TOOLS, "inspect", source],
            "inspect, DCP": [*CKPT_TOOLS, "inspect", dcp],
            "convert, safetensors to .pt": [*CKPT_TOOLS, "convert", source, f"{out}.pt"],
            "convert, DCP to safetensors": [*CKPT_TOOLS, "convert", dcp, f"{out}.safetensors"],
            "plan, DCP of 128 experts in 48 layers to 18,432 tensors": [*CKPT_TOOLS, "plan", experts, out, *recipe],
        }

        def run_command(command: Sequence[str]) -> Usage:
            """One thread of linear algebra, as our own command has it: the others of bare numpy wait busily."""
            for output in folder.glob("out.*"):
                output.unlink()
            one_thread = {"OPENBLAS_NUM_THREADS": "1"}
            return measure_success(command, folder / "log", time_limit=settings.time_limit, env=one_thread)

        turns = take_turns({name: partial(run_command, command) for name, command in commands.items()}, settings.runs)
    header = "command | wall | ratio | processor | ratio | memory"
    return make_table(header, (_startup_cells(name, usages, turns[BARE]) for name, usages in turns.items()))


def _startup_cells(name: str, usages: Sequence[Usage], bare: Sequence[Usage]) -> Iterator[str]:
    yield name
    for field in ("seconds", "cpu_seconds"):
        seconds, least = (median(getattr(usage, field) for usage in each) for each in (usages, bare))
        yield f"{seconds * 1e3:.0f} ms"
        yield f"{seconds / least:.2f}"
    yield f"{median(usage.peak_bytes for usage in usages) / 1e6:.1f} MB"


def measure_many_tensors(name: str, settings: RunSettings) -> list[str]:
    """The table of commands on one file of small tensors, in turns with the library's own functions."""
    with tempfile.TemporaryDirectory(dir=settings.data) as folder:
        source, out = f"{folder}/model.safetensors", f"{folder}/out.safetensors"
        names = [f"layers.{n % 100}.experts.{n // 100}.weight" for n in range(NUM_SMALL_TENSORS)]
        save_file(dict.fromkeys(names, np.zeros((8, 8), np.float32)), source)
        load = f"from safetensors.numpy import *; state = load_file({source!r})"
        commands = {
            "load_file": [sys.executable, "-c", load],
            "load_file and save_file": [sys.executable, "-c", f"{load}; save_file(state, {out!r})"],
            "inspect": [*CKPT_TOOLS, "inspect", source],
            "convert": [*CKPT_TOOLS, "convert", source, out, "--overwrite"],
        }
        run = partial(measure_success, log=settings.data / "log", time_limit=settings.time_limit)
        turns = take_turns({name: partial(run, command) for name, command in commands.items()}, settings.runs)
    header = "command | wall | ratio | processor | ratio | memory"
    return make_table(header, (_startup_cells(name, usages, turns["load_file"]) for name, usages in turns.items()))


def measure_memory(name: str, settings: RunSettings) -> list[str]:
    """The table of the peak memory of DCP to safetensors and what `plan` said of it, and the promises."""
    rows, peaks, planned = [], [], []
    for size_bytes in (times * settings.size_bytes for times in SIZES):
        usage, planned_bytes = _convert_sparse(size_bytes, settings)
        peaks.append(usage.peak_bytes)
        planned.append(planned_bytes)
        memory = [f"{num_bytes / 1e6:.1f} MB" for num_bytes in (usage.peak_bytes, planned_bytes)]
        rows.append([f"{size_bytes / 1e9:g} GB", *memory, f"{usage.seconds:.2f}"])
    spread, is_within = max(peaks) / min(peaks) - 1, all(map(int.__le__, peaks, planned))
    return [
        *make_table("checkpoint | peak | said by `plan` | seconds", rows, texts=()),
        f"\n- {format_verdict(spread <= MAX_SPREAD)}: memory differs by {spread:.1%} (at most {MAX_SPREAD:.0%})",
        f"- {format_verdict(is_within)}: memory is never above what `plan` said",
    ]


def _convert_sparse(size_bytes: int, settings: RunSettings) -> tuple[Usage, int]:
    """Usage, and memory by `plan`, of a DCP of 4 ranks in sparse files: its 16 GB take no disk. Its elements are zeros,
    which are copied like any others. A larger one has larger tensors, and as many: their index takes 6 kB a tensor."""
    folder = settings.data / "memory"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if not InputCache(settings.data / "inputs").make_room(int(1.1 * size_bytes)):
            raise MeasureError(f"the disk has no {1.1 * size_bytes / 1e9:.0f} GB free")
        shapes = fit_llama(size_bytes // WEIGHT_BYTES).shapes()
        synthetic.dcp(shapes, 4, folder / "source", synthetic.DTYPES["fp32"])
        places = [str(folder / "source"), str(folder / "model.safetensors")]
        plan = json.loads("\n".join(printed_lines([*CKPT_TOOLS, "plan", *places, "--json"], settings)))
        convert = [*CKPT_TOOLS, "convert", *places, "--quiet"]
        usage = measure_success(convert, settings.data / "log", time_limit=settings.time_limit)
        return usage, int(plan["peak_memory_bytes"])
    finally:
        shutil.rmtree(folder)
