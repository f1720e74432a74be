"""The script for SLURM, run with programs in the place of SLURM's own that say what they were asked."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

import training.__main__ as command
from training.config.train_config import TrainConfig
from training.launchers.slurm import main

TRAIN = ["--strategy=full_shard", "--num-workers=4", "--precision=bf16", "--out", "/runs/with a space"]


def printed(*words: str) -> str:
    done = CliRunner().invoke(main, [*words, "--", *TRAIN])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_script_asks_for_what_the_options_say() -> None:
    script = printed("--nodes=2", "--gpus-per-node=2", "--time=01:00:00", "--partition=gpu", "--signal-seconds=120")
    asked = re.findall(r"(?m)^#SBATCH --(.*)$", script)
    assert {"requeue", "nodes=2", "ntasks-per-node=2", "gpus-per-node=2", "time=01:00:00"} <= set(asked)
    assert {"partition=gpu", "signal=TERM@120", "open-mode=append"} <= set(asked)


def test_the_script_runs_the_command_as_it_was_given() -> None:
    [words] = re.findall(r"exec \"\$@\"' rank (.*)", printed("--python=/usr/bin/python3"))
    python, dash_m, module, *options = shlex.split(words)
    assert (python, dash_m, module) == ("/usr/bin/python3", "-m", "training")
    config = TrainConfig(**command.main.make_context("training", options).params)
    assert (config.launcher, config.resume, config.out) == ("torchrun", "auto", Path("/runs/with a space"))
    assert (config.sharding.name, config.num_workers, config.precision) == ("full_shard", 4, "bf16")


BIN = {
    "scontrol": 'case $1 in show) echo node1;; requeue) echo "requeued $2" >> log;; esac',
    "squeue": "echo $STATE",
    "srun": 'shift; SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 "$@"; exit $CODE',
    "python3": 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT" >> log',
}
"""Programs of the same names: the script itself is run."""


@pytest.mark.parametrize(
    ("code", "state", "ends", "requeued"),
    [(75, "RUNNING", 0, True), (75, "COMPLETING", 75, False), (1, "RUNNING", 1, False), (0, "RUNNING", 0, False)],
)
def test_a_stopped_job_is_requeued_and_a_cancelled_or_failed_one_is_not(
    code: int, state: str, ends: int, requeued: bool, tmp_path: Path
) -> None:
    for name, body in BIN.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(printed(f"--python={tmp_path / 'python3'}"))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    done = subprocess.run(
        ["/bin/bash", script], cwd=tmp_path, env=environment | {"CODE": str(code), "STATE": state}, check=False
    )
    assert done.returncode == ends
    assert (tmp_path / "log").read_text() == "3 1 4 node1 20007\n" + ("requeued 7\n" if requeued else "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes=3", "--", *TRAIN], "--num-workers 4 does not divide over --nodes 3"),
        (["--nodes=0", "--", *TRAIN], "--nodes is at least 1, not 0"),
        (["--", *TRAIN, "--resume=latest"], "--resume is auto in a job"),
        (["--", *TRAIN, "--tp=3"], "--tp "),
    ],
)
def test_what_slurm_could_not_run_is_refused(words: list[str], sentence: str) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {sentence}") and done.stderr.count("\n") == 1


def test_ranks_that_any_launcher_starts_know_that_they_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun, DeepSpeed's launcher, accelerate and the script for SLURM set these four."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        assert not command._is_a_rank()
        monkeypatch.setenv(name, "0")
    assert command._is_a_rank()


PAGE = (Path(__file__).parents[3] / "docs/training.md").read_text()


def test_the_documented_commands_for_slurm_make_a_job() -> None:
    """What the second one submits is what the first one wrote."""
    [generate, submit] = re.findall(r"(?m)^\$ (python -m ckpt_tools_training\.launchers\.slurm .*|sbatch .*)$", PAGE)
    words = shlex.split(generate.partition("ckpt_tools_training.launchers.slurm ")[2])
    assert words[-2:] == [">", submit.removeprefix("sbatch ")]
    done = CliRunner().invoke(main, words[:-2])
    assert done.exit_code == 0, done.output
    assert {"nodes=2", "ntasks-per-node=8", "time=24:00:00"} <= set(re.findall(r"(?m)^#SBATCH --(.*)$", done.stdout))
    assert subprocess.run(["/bin/bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
