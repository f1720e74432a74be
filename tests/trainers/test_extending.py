"""The trainer of docs/extending_trainers.md, as printed there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import ckpt_tools

ROOT = Path(__file__).parents[2]

ASKED = """
import sys
import ckpt_tools.trainers.all as listed
from acme import ACME
listed.TRAINERS += (ACME,)
import ckpt_tools
source, output, unfinished = sys.argv[1:]
print(ckpt_tools.inspect(source).step)
print(ckpt_tools.ls(source).checkpoints[0].problem)
print([str(note) for note in ckpt_tools.reshard(source, output, world_size=2).notes])
print(ckpt_tools.ls(unfinished).checkpoints[0].problem)
"""


def test_the_printed_record_is_one_trainer_more(tmp_path):
    """What is said of a save of Acme with one rank, and of one that did not finish."""
    saved, out = tmp_path / "step_10", tmp_path / "out"
    save_file({"weight": np.arange(12, dtype=np.float32).reshape(4, 3)}, tmp_path / "w.safetensors")
    ckpt_tools.convert(tmp_path / "w.safetensors", saved / "state", to="dcp", world_size=1)
    (saved / "acme.json").write_text(json.dumps({"step": 10}))
    (saved / "acme_rng_0.bin").write_bytes(b"\x01\x02")
    unfinished = shutil.copytree(saved, tmp_path / "unfinished" / "step_10")
    (saved / "DONE").write_bytes(b"yes")
    page = (ROOT / "docs" / "extending_trainers.md").read_text()
    found = re.search(r"`acme\.py`.*?```python\n(.*?)```", page, re.DOTALL)
    assert found
    (tmp_path / "acme.py").write_text(found[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", ASKED, *map(str, (saved, out, unfinished))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    step, problem, notes, why = done.stdout.splitlines()
    assert (step, problem, why) == ("10", "None", "no DONE: the save did not finish")
    files = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert files == {"acme.json": b'{"step": 10}', "DONE": b"yes"}
    assert "acme_rng_0.bin" in notes  # a rank's file is copied for as many ranks as before alone
    assert sorted(path.name for path in (out / "state").iterdir())[0] == ".metadata"
