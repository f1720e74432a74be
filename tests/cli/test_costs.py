"""What commands cost: start-up and memory. What they import is in ``test_startup``."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest

from tests.support.sweep import tiered

pytestmark = pytest.mark.extended

BARE = "import numpy, ml_dtypes, rich.table, click, json, pathlib"
"""What any command line on arrays has to import."""

LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a command used: seconds of all processors, and bytes of memory at its peak."""

    processor_seconds: float
    peak_bytes: int


def used(*words: str | Path) -> Usage:
    """What the command itself used.

    A small process starts it and waits for it alone: a child counts its parent's memory as its own until it is another
    program, and this one has torch in it.
    """
    return _launched("-m", "ckpt_tools", *map(str, words))


def _launched(*arguments: str) -> Usage:
    command = [sys.executable, "-S", "-c", LAUNCHER, sys.executable, *arguments]
    code, seconds, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert code == "0"
    return Usage(float(seconds), int(peak))


def cost(*words: str | Path) -> float:
    """Processor time of the command in that of a Python that imports numpy and rich, the best of three of each.

    Runs alternate, so that a machine that is slow for a while is slow for both.
    """
    pairs = [(used(*words).processor_seconds, _launched("-c", BARE).processor_seconds) for _ in range(3)]
    return min(ours for ours, _ in pairs) / min(bare for _, bare in pairs)


def sparse_safetensors(path: Path, num_tensors: int, *shape: int) -> Path:
    """A file of zeros that takes no room."""
    size = 4 * prod(shape)
    header = {
        f"layers.{n}.weight": {"dtype": "F32", "shape": list(shape), "data_offsets": [n * size, (n + 1) * size]}
        for n in range(num_tensors)
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + num_tensors * size)
    return path


def test_help_starts_at_once():
    assert cost("--help") < 1


def test_inspecting_a_thousand_tensors_costs_little_more_than_starting(tmp_path):
    assert cost("inspect", sparse_safetensors(tmp_path / "m.safetensors", 1000, 64)) < 4


def test_inspecting_what_frameworks_wrote_is_as_quick(checkpoint):
    assert cost("inspect", checkpoint("zero3-bf16", "awkward", 4).checkpoint) < 4


@pytest.mark.parametrize(
    "options",
    tiered(
        ["", "--dtype bfloat16", "--memory 50MiB", "--workers 1", "--workers 8"],
        test=("--dtype bfloat16", "--memory 50MiB"),
    ),
)
def test_memory_is_what_the_plan_says_and_not_the_checkpoints_size(options, tmp_path):
    source = sparse_safetensors(tmp_path / "big.safetensors", 6, 32 << 20)
    projected = bound(source, tmp_path / "out", "--to", "safetensors", *options.split())
    assert "--memory" not in options or projected <= 50 << 20


SMALL = [f"{kind}, {to}" for kind in ("fsdp2", "zero3-bf16", "fsdp2-tp") for to in ("safetensors", "dcp", "zero3")]


@pytest.mark.parametrize("case", tiered(SMALL, test=("fsdp2, zero3", "zero3-bf16, dcp", "fsdp2-tp, safetensors")))
def test_a_small_conversion_takes_the_memory_that_the_plan_says(case, checkpoint, tmp_path):
    kind, to = case.split(", ")
    made = checkpoint(kind, "plain" if kind == "fsdp2-tp" else "awkward", 4).checkpoint
    bound(made, tmp_path / "out", "--to", to)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", tiered(["m.pt", "dcp"], test=("dcp",)))
def test_tensors_that_are_stored_by_columns_take_the_memory_that_the_plan_says(name, tmp_path):
    """That those of a DCP are is found when they are read."""
    import torch
    from torch.distributed.checkpoint import save

    state = {f"w{n}": torch.zeros(2048, 4096).T for n in range(6)}
    save(state, checkpoint_id=tmp_path / name, no_dist=True) if name == "dcp" else torch.save(state, tmp_path / name)
    bound(tmp_path / name, tmp_path / "out", "--to", "safetensors")


def bound(*words: str | Path) -> int:
    """The memory that the plan says, which holds, and is no more than 1.5 times what the conversion took."""
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "plan", *map(str, words), "--json"], capture_output=True, check=True
    )
    projected: int = json.loads(done.stdout)["peak_memory_bytes"]
    measured = used("convert", *words).peak_bytes
    assert measured <= projected <= 1.5 * measured
    return projected
