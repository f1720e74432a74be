"""Start-up time of commands, and the time to plan a recipe: ``python -m benchmarks --works start-up``.

Commands alternate with a bare Python that imports numpy. The table has medians, and their ratios to the bare Python's:
of wall time, which other processes of the machine lengthen, and of processor time.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

from benchmarks.machine import CKPT_TOOLS, ROOT
from benchmarks.measure import Usage, measure_success
from benchmarks.suite import Settings
from benchmarks.turns import markdown, take_turns
from fixtures import synthetic

BARE = "python -c 'import numpy'"
PLAN_EXPERTS = "plan, DCP of 128 experts in 48 layers to 18,432 tensors"
NUM_TENSORS, NUM_ELEMENTS = 100, 10_000
TIME_LIMIT = 60.0


def commands(folder: Path) -> dict[str, list[str]]:
    """Commands on a checkpoint of 4 MB and 100 tensors, by their names in the table."""
    source, dcp = str(folder / "model.safetensors"), str(folder / "dcp")
    return {
        BARE: [sys.executable, "-c", "import numpy"],
        "--help": [*CKPT_TOOLS, "--help"],
        "inspect, safetensors": [*CKPT_TOOLS, "inspect", source],
        "inspect, DCP": [*CKPT_TOOLS, "inspect", dcp],
        "convert, safetensors to .pt": [*CKPT_TOOLS, "convert", source, str(folder / "out.pt")],
        "convert, DCP to safetensors": [*CKPT_TOOLS, "convert", dcp, str(folder / "out.safetensors")],
        PLAN_EXPERTS: [
            *[*CKPT_TOOLS, "plan", str(folder / "experts"), str(folder / "out"), "--to", "safetensors"],
            *["--recipe", "qwen3_moe", "--quiet"],
        ],
    }


def run_command(command: Sequence[str], folder: Path) -> Usage:
    """Usage of a command with compiled modules kept, as for users, and one thread of linear algebra, as our own
    command has it: the others of bare numpy wait busily."""
    users = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**users, "OPENBLAS_NUM_THREADS": "1"}
    for left in folder.glob("out.*"):
        left.unlink()
    return measure_success(command, folder / "log", time_limit=TIME_LIMIT, cwd=ROOT, env=environment)


def measure_commands(settings: Settings) -> list[str]:
    """The table. The round that does not count compiles modules, too."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = {f"layers.{n}.weight": np.full(NUM_ELEMENTS, n, np.float32) for n in range(NUM_TENSORS)}
        save_file(tensors, folder / "model.safetensors")
        # The experts of Qwen3-30B-A3B in sparse files: 96 tensors that a recipe makes 18,432 of.
        sizes = {"gate_up_proj": (128, 1536, 2048), "down_proj": (128, 2048, 768)}
        experts: synthetic.Shapes = {
            f"model.layers.{n}.mlp.experts.{part}": shape for n in range(48) for part, shape in sizes.items()
        }
        synthetic.dcp(experts, 8, folder / "experts")
        run_command([*CKPT_TOOLS, "convert", f"{folder}/model.safetensors", f"{folder}/dcp", "--to", "dcp"], folder)
        given = {what: partial(run_command, command, folder) for what, command in commands(folder).items()}
        found = take_turns(given, settings.runs)
    header = "command | wall | ratio | processor | ratio | memory"
    return markdown(header, (_cells(what, used, found[BARE]) for what, used in found.items()))


def _cells(what: str, used: Sequence[Usage], bare: Sequence[Usage]) -> Iterator[str]:
    yield what
    for name in ("seconds", "cpu_seconds"):
        seconds, least = (median(getattr(usage, name) for usage in each) for each in (used, bare))
        yield f"{seconds * 1e3:.0f} ms"
        yield f"{seconds / least:.2f}"
    yield f"{median(usage.peak_bytes for usage in used) / 1e6:.1f} MB"
