"""Peak memory of a conversion by the size of its checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import machine
from benchmarks.inputs import Cache
from benchmarks.journal import Journal, Record
from benchmarks.suite import Settings, call, check_time, say

GIGABYTE = 10**9

SYNTHETIC = """
import sys
from pathlib import Path
from benchmarks.inputs import Llama
from fixtures import synthetic
size, folder = int(sys.argv[1]), Path(sys.argv[2])
llama = Llama.of(size // 4)
model = synthetic.Model(layers=llama.layers, hidden=llama.hidden, ffn=llama.ffn, vocab=llama.vocab)
synthetic.dcp(model.shapes(), 4, folder, synthetic.DTYPES["fp32"])
"""
"""A DCP of 4 ranks in sparse files: its 16 GB take no disk. Its elements are zeros, which are copied like any
others. A larger one has larger tensors, and as many: their index takes 6 kB a tensor."""


def measure_memory(sizes_gb: Sequence[float], settings: Settings, journal: Journal) -> None:
    """Note the peak memory of DCP to safetensors at each size, and what `plan` estimates."""
    for size_gb in sizes_gb:
        key: Record = {"size_bytes": int(size_gb * GIGABYTE), "code": machine.code()}
        journal.forget(keep=key, kind="memory", size_bytes=key["size_bytes"])
        if journal.find(kind="memory", status="done", **key):
            continue
        check_time(settings)
        say(f"memory at {size_gb:g} GB")
        journal.add({"kind": "memory", **key, **_memory(key["size_bytes"], settings)})


def _memory(size_bytes: int, settings: Settings) -> Record:
    folder = settings.data / "memory"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if not Cache(settings.data / "inputs").make_room(int(1.1 * size_bytes)):
            return {"status": "no room", "reason": f"the disk has no {1.1 * size_bytes / GIGABYTE:.0f} GB free"}
        return _converted(size_bytes, folder, settings)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"status": "failed", "reason": str(error)}
    finally:
        shutil.rmtree(folder)


def _converted(size_bytes: int, folder: Path, settings: Settings) -> Record:
    words = [sys.executable, "-c", SYNTHETIC, str(size_bytes), str(folder / "source")]
    subprocess.run(words, check=True, cwd=machine.ROOT, capture_output=True)
    conversion = [str(folder / "source"), str(folder / "model.safetensors")]
    program = [sys.executable, "-m", "ckpt_tools"]
    plan = subprocess.run([*program, "plan", *conversion, "--json"], cwd=machine.ROOT, capture_output=True, check=True)
    usage, reason = call([*program, "convert", *conversion, "--quiet"], settings)
    planned = json.loads(plan.stdout)["peak_memory_bytes"]
    return {"status": "failed" if reason else "done", "reason": reason, "planned_bytes": planned, **asdict(usage)}
