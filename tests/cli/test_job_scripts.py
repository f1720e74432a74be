"""Jobs of parts, as ``plan --script`` prints them, run as their schedulers would."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import yaml

import ckpt_tools
from tests.support.commands import run_command

COUNT = 3


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a source.safetensors"
    safetensors.numpy.save_file({f"w{n}": np.full((64, 64), n, np.float32) for n in range(6)}, path)
    return path


def printed_script(scheduler, source, target, *words):
    done = run_command("plan", source, target, "--part", f"1/{COUNT}", "--script", scheduler, *words)
    assert done.code == 0, done.err
    return done.out


def run_bash(script, number, variable):
    environment = {**os.environ, variable: str(number), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", script], check=True, env=environment, stdout=subprocess.DEVNULL)


def test_an_array_of_slurm_publishes(source, tmp_path):
    target = tmp_path / "an out"
    script = printed_script("slurm", source, target, "--to", "dcp", "--include", "w[0-3]")
    assert f"#SBATCH --array=1-{COUNT}" in script
    for number in range(1, COUNT + 1):
        assert not target.exists()
        run_bash(script, number, "SLURM_ARRAY_TASK_ID")
    assert sorted(ckpt_tools.open(target)) == ["w0", "w1", "w2", "w3"]


def test_an_indexed_job_of_kubernetes_publishes(source, tmp_path):
    target = tmp_path / "out.pt"
    spec = yaml.safe_load(printed_script("kubernetes", source, target))["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", COUNT, COUNT)
    (container,) = spec["template"]["spec"]["containers"]
    for index in range(COUNT):
        assert not target.exists()
        run_bash(container["args"][0], index, "JOB_COMPLETION_INDEX")
    assert len(ckpt_tools.open(target)) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--script", "slurm"], "give --part 1/N"),
        (["--script", "slurm", "--part", "1/2", "--json"], "and no --json"),
        (["--script", "slurm", "--part", "1/2", "--storage-option", "token=hunter2"], "shows no --storage-option"),
    ],
)
def test_a_job_that_cannot_be_printed_is_refused(source, tmp_path, words, message):
    target = "memory://out" if "--storage-option" in words else tmp_path / "out"
    done = run_command("plan", source, target, "--to", "dcp", *words)
    assert done.code == 2
    assert message in done.err
    assert "hunter2" not in done.err
