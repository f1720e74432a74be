"""Start-up time of commands: ``python -m benchmarks.startup``, and in ``make bench``.

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
NUM_TENSORS, NUM_ELEMENTS = 100, 10_000
TIME_LIMIT = 60.0

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
