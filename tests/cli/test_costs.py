"""What a conversion costs: its memory. What commands import is in ``test_startup``."""

import json
import os
import struct
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from tests.support.cost import cost
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended


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


def peak_bytes(*words: str | Path) -> float:
    """Memory that the command takes, which succeeds."""
    _, megabytes, code = cost(*words)
    assert code == 0
    return megabytes * (1 << 20)


def bound(*words: str | Path) -> int:
    """The memory that the plan says, which holds, and is no more than 1.5 times what the conversion took."""
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "plan", *map(str, words), "--json"], capture_output=True, check=True
    )
    projected: int = json.loads(done.stdout)["peak_memory_bytes"]
    measured = peak_bytes("convert", *words)
    assert measured <= projected <= 1.5 * measured
    return projected


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


@pytest.mark.parametrize(
    ("kind", "case", "to"),
    [("fsdp2", "awkward", "zero3"), ("zero3-bf16", "awkward", "dcp"), ("fsdp2-tp", "plain", "safetensors")],
)
def test_a_small_conversion_takes_the_memory_that_the_plan_says(kind, case, to, checkpoint, tmp_path):
    bound(checkpoint(kind, case, 4).checkpoint, tmp_path / "out", "--to", to)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_that_are_stored_by_columns_take_the_memory_that_the_plan_says(tmp_path):
    """That those of a DCP are is found when they are read."""
    import torch
    from torch.distributed.checkpoint import save

    save({f"w{n}": torch.zeros(2048, 4096).T for n in range(6)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    bound(tmp_path / "dcp", tmp_path / "out", "--to", "safetensors")
