"""What commands cost before they do anything: ``python -m benchmarks.startup``.

Commands alternate with a bare Python that imports numpy, so that a machine that is slow for a while is slow for all.
The table has medians, and their ratios to the bare Python's: of wall time, which other processes of the machine
lengthen, and of processor time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

from benchmarks.measure import Usage, measured

ROOT = Path(__file__).parent.parent
BARE = "python -c 'import numpy'"
NUM_TENSORS, NUM_ELEMENTS = 100, 10_000
TIME_LIMIT = 60.0

CKPT_TOOLS = [sys.executable, "-m", "ckpt_tools"]


def commands(folder: Path) -> dict[str, list[str]]:
    """Commands on a checkpoint of 4 MB and 100 tensors, by what the table calls them."""
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
    """As a user runs it, with compiled modules kept: a shell that forbids them makes every start a compilation.

    All get the one thread of linear algebra that our own command asks for: bare numpy's others wait busily, and would
    make its processor time longer than its wall time.
    """
    users = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**users, "OPENBLAS_NUM_THREADS": "1"}
    log = folder / "log"
    for left in folder.glob("out.*"):
        left.unlink()
    usage = measured(command, log, time_limit=TIME_LIMIT, cwd=tree, env=environment)
    if usage.exit_code or usage.timed_out:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()}")
    return usage


def make_sources(folder: Path, tree: Path) -> None:
    tensors = {f"layers.{n}.weight": np.full(NUM_ELEMENTS, n, np.float32) for n in range(NUM_TENSORS)}
    save_file(tensors, folder / "model.safetensors")
    run([*CKPT_TOOLS, "convert", str(folder / "model.safetensors"), str(folder / "dcp"), "--to", "dcp"], folder, tree)


def measure(folder: Path, tree: Path, rounds: int) -> dict[str, list[Usage]]:
    """Usages by command. One round before the first compiles modules and fills caches, and does not count."""
    make_sources(folder, tree)
    given = commands(folder)
    found: dict[str, list[Usage]] = {what: [] for what in given}
    for number in range(rounds + 1):
        for what, command in given.items():
            usage = run(command, folder, tree)
            if number:
                found[what].append(usage)
    return found


def rows(found: dict[str, list[Usage]]) -> list[str]:
    bare = found[BARE]
    lines = ["| command | wall | ratio | processor | ratio | memory |", "|---|--:|--:|--:|--:|--:|"]
    for what, usages in found.items():
        wall, bare_wall = (median(usage.seconds for usage in each) for each in (usages, bare))
        used, bare_used = (median(usage.cpu_seconds for usage in each) for each in (usages, bare))
        peak = median(usage.peak_bytes for usage in usages)
        lines.append(
            f"| {what} | {wall * 1e3:.0f} ms | {wall / bare_wall:.2f} | {used * 1e3:.0f} ms | {used / bare_used:.2f} "
            f"| {peak / 1e6:.1f} MB |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the source tree to measure (default: this one)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(rows(measure(Path(folder), given.tree.resolve(), given.rounds))))


if __name__ == "__main__":
    main()
