"""Ray Tune over learning rates: each trial is a run of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.training.jobs import NUM_SAMPLES
from training.loop.result import RunResult
from training.studies.tune import main

RATES = ("0.001", "1e-06")
SIZE = f"--engine=fsdp2 --num-workers=1 --num-samples={NUM_SAMPLES} --epochs=1".split()


@pytest.mark.soak
def test_two_learning_rates_are_two_runs_and_the_better_one_comes_first(tmp_path: Path) -> None:
    rates = [f"--learning-rate={rate}" for rate in RATES]
    command = [sys.executable, "-m", "training.studies.tune", *rates, "--", *SIZE, f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    results = {rate: RunResult.read(tmp_path / f"learning-rate-{rate}/result.json") for rate in RATES}
    assert [results[rate].settings["learning_rate"] for rate in RATES] == [0.001, 1e-6]
    best_first = sorted(results.values(), key=lambda result: -result.accuracy)
    said = [line for line in done.stdout.splitlines() if line.startswith("learning rate ")]
    assert [line.split()[-1] for line in said] == [result.checkpoint for result in best_first]
    assert f"accuracy {best_first[0].accuracy:.4f}" in said[0] and best_first[0].accuracy > best_first[1].accuracy


@pytest.mark.parametrize(
    ("rates", "options", "sentence"),
    [
        (["1e-3"], [], "give --learning-rate before -- at least twice"),
        (["1e-3", "0.001"], [], "give --learning-rate before -- at least twice"),
        (["1e-3", "0"], [], "--learning-rate is a number above 0, not 0.0"),
        (["1e-3", "1e-2"], ["--launcher=torchrun"], "Ray Tune needs --launcher ray"),
        (["1e-3", "1e-2"], ["--storage=s3://bucket/run"], "--storage is for one run, and these are 2"),
        (["1e-3", "1e-2"], ["--resume=auto"], "--resume is for one run, and these are 2"),
    ],
)
def test_what_cannot_be_tuned_says_why(rates: list[str], options: list[str], sentence: str, tmp_path: Path) -> None:
    given = [f"--learning-rate={rate}" for rate in rates]
    done = CliRunner().invoke(main, [*given, "--", *SIZE, f"--out={tmp_path / 'run'}", *options])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert sentence in done.stderr
    assert not (tmp_path / "run").exists()
