"""Start-up time of commands, and the time to plan a recipe: ``python -m benchmarks.startup``, and in ``make bench``.

Commands alternate with a bare Python that imports numpy. The table has medians, and their ratios to the bare Python's:
of wall time, which other processes of the machine lengthen, and of processor time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

from benchmarks.journal import Journal, Record
from benchmarks.machine import ROOT, code
from benchmarks.measure import Usage, measured
from benchmarks.turns import markdown, take_turns

KIND = "start-up"
BARE = "python -c 'import numpy'"
PLAN_EXPERTS = "plan, DCP of 128 experts in 48 layers to 18,432 tensors"
NUM_TENSORS, NUM_ELEMENTS = 100, 10_000
TIME_LIMIT = 60.0

EXPERTS = """
import sys
from pathlib import Path
from fixtures import synthetic
shapes = {}
for layer in range(48):
    for name, shape in (("gate_up_proj", (128, 1536, 2048)), ("down_proj", (128, 2048, 768))):
        shapes[f"model.layers.{layer}.mlp.experts.{name}"] = shape
synthetic.dcp(shapes, 8, Path(sys.argv[1]))
"""
"""A DCP of 8 ranks in sparse files with the experts of Qwen3-30B-A3B: 96 tensors that a recipe makes 18,432 of."""

CKPT_TOOLS = [sys.executable, "-m", "ckpt_tools"]


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


def run(command: Sequence[str], folder: Path, tree: Path) -> Usage:
    """Usage of a command with compiled modules kept, as for users, and one thread of linear algebra, as our own
    command has it: the others of bare numpy wait busily."""
    users = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**users, "OPENBLAS_NUM_THREADS": "1"}
    log = folder / "log"
    for left in folder.glob("out.*"):
        left.unlink()
    usage = measured(command, log, time_limit=TIME_LIMIT, cwd=tree, env=environment)
    if usage.exit_code or usage.timed_out:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()}")
    return usage


def measure(tree: Path, rounds: int) -> list[str]:
    """The table. The round that does not count compiles modules, too."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = {f"layers.{n}.weight": np.full(NUM_ELEMENTS, n, np.float32) for n in range(NUM_TENSORS)}
        save_file(tensors, folder / "model.safetensors")
        run([sys.executable, "-c", EXPERTS, f"{folder}/experts"], folder, tree)
        given = {what: partial(run, command, folder, tree) for what, command in commands(folder).items()}
        run([*CKPT_TOOLS, "convert", f"{folder}/model.safetensors", f"{folder}/dcp", "--to", "dcp"], folder, tree)
        return rows(take_turns(given, rounds))


def rows(found: dict[str, list[Usage]]) -> list[str]:
    return markdown("command | wall | ratio | processor | ratio | memory", (_cells(found, what) for what in found))


def _cells(found: dict[str, list[Usage]], what: str) -> Iterator[str]:
    usages, bare = found[what], found[BARE]
    yield what
    for name in ("seconds", "cpu_seconds"):
        used, least = (median(getattr(usage, name) for usage in each) for each in (usages, bare))
        yield f"{used * 1e3:.0f} ms"
        yield f"{used / least:.2f}"
    yield f"{median(usage.peak_bytes for usage in usages) / 1e6:.1f} MB"


def measure_into(journal: Journal, rounds: int) -> None:
    """Note the table in the suite's journal."""
    key: Record = {"code": code()}
    journal.forget(keep=key, kind=KIND)
    if not journal.find(kind=KIND, **key):
        journal.add({"kind": KIND, **key, "lines": measure(ROOT, rounds)})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the source tree to measure (default: this one)")
    given = parser.parse_args()
    print("\n".join(measure(given.tree.resolve(), given.rounds)))


if __name__ == "__main__":
    main()
