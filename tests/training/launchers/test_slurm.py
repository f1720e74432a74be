"""The documented script for SLURM, run with programs in the place of SLURM's own."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

import training.__main__ as command
from training.config.train_config import TrainConfig
from training.loop.stopping import EXIT_CODE

PAGES = [page.read_text() for page in sorted((Path(__file__).parents[3] / "docs").rglob("*.md"))]
[SCRIPT] = [script for page in PAGES for script in re.findall(r"(?ms)^```bash\n(#!/bin/bash\n#SBATCH .*?)^```$", page)]
[OPTIONS] = [options for page in PAGES for options in re.findall(r"(?m)^\$ sbatch job\.sh (.*)$", page)]

BIN = {
    "scontrol": 'case $1 in show) echo node1;; requeue) echo "requeued $2" >> log;; esac',
    "squeue": "echo $STATE",
    "srun": 'shift; SLURM_PROCID=3 SLURM_LOCALID=1 "$@"; exit $CODE',
    "python": """echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT" >> log; printf '%s\\n' "$@" > words""",
}
"""Programs of the same names: the script itself is run."""


@pytest.mark.parametrize(
    ("code", "state", "ends", "requeued"),
    [
        (EXIT_CODE, "RUNNING", 0, True),
        (EXIT_CODE, "COMPLETING", EXIT_CODE, False),
        (1, "RUNNING", 1, False),
        (0, "RUNNING", 0, False),
    ],
)
def test_a_stopped_job_is_requeued_and_a_cancelled_or_failed_one_is_not(code, state, ends, requeued, tmp_path):
    for name, body in BIN.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT)
    given = [*shlex.split(OPTIONS), "--out", "/runs/with a space"]
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "4"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CODE": str(code), "STATE": state, **job}
    done = subprocess.run(["/bin/bash", script, *given], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == ends
    assert (tmp_path / "log").read_text() == "3 1 4 node1 20007\n" + ("requeued 7\n" if requeued else "")
    dash_m, module, *options = (tmp_path / "words").read_text().splitlines()
    assert (dash_m, module) == ("-m", "ckpt_tools_training")
    config = TrainConfig(**command.main.make_context("training", options).params)
    assert (config.launcher, config.resume, config.num_workers) == ("torchrun", "auto", 4)
    assert (config.sharding.name, config.out) == ("full_shard", Path("/runs/with a space"))


def test_ranks_that_any_launcher_starts_know_that_they_are_ranks(monkeypatch):
    """torchrun, DeepSpeed's launcher, accelerate and the script for SLURM set these four."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        assert not command._is_a_rank()
        monkeypatch.setenv(name, "0")
    assert command._is_a_rank()
