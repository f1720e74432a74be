"""The trainer of docs/extending_trainers.md, as printed there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tools

ROOT = Path(__file__).parents[2]

ASKED = """
import sys
import ckpt_tools.trainers.all as listed
from acme import ACME
listed.TRAINERS += (ACME,)
import ckpt_tools
source, output = sys.argv[1:]
print(ckpt_tools.inspect(source).step)
print(ckpt_tools.ls(source).checkpoints[0].problem)
print([str(note) for note in ckpt_tools.reshard(source, output, world_size=2).notes])
"""


def asked(folder: Path, *words: Path) -> list[str]:
    """The lines that the script prints where the printed record is one of the trainers."""
    found = re.search(
        r"`acme\.py`.*?```python\n(.*?)```", (ROOT / "docs" / "extending_trainers.md").read_text(), re.DOTALL
    )
    assert found
    (folder / "acme.py").write_text(found[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-c", ASKED, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def saved(tmp_path):
    """A save of Acme with one rank."""
    folder = tmp_path / "step_10"
    save_file({"weight": np.arange(12, dtype=np.float32).reshape(4, 3)}, tmp_path / "w.safetensors")
    ckpt_tools.convert(tmp_path / "w.safetensors", folder / "state", to="dcp", world_size=1)
    (folder / "acme.json").write_text(json.dumps({"step": 10}))
    (folder / "acme_rng_0.bin").write_bytes(b"\x01\x02")
    (folder / "DONE").write_bytes(b"yes")
    return folder


def test_the_printed_record_is_one_trainer_more(saved, tmp_path):
    step, problem, notes = asked(tmp_path, saved, tmp_path / "out")
    assert (step, problem) == ("10", "None")
    out = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert out == {"acme.json": b'{"step": 10}', "DONE": b"yes"}
    assert "acme_rng_0.bin" in notes  # a rank's file is copied for as many ranks as before alone
    assert sorted(path.name for path in (tmp_path / "out" / "state").iterdir())[0] == ".metadata"


def test_a_save_that_did_not_finish_is_told(saved, tmp_path):
    (saved / "DONE").unlink()
    assert asked(tmp_path, saved, tmp_path / "out")[1] == "no DONE: the save did not finish"
