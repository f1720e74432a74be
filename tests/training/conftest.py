"""Real runs, each made once for the session: two ranks, a few hundred digits, two epochs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from training.config import EngineName
from training.result import RunResult

NUM_SAMPLES = 256
EPOCHS = 2

RunTraining = Callable[..., subprocess.CompletedProcess[str]]


def run_training(*args: str) -> subprocess.CompletedProcess[str]:
    """``python -m training ARGS`` in a process of its own: the frameworks warn, and keep global state."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "training", *args], capture_output=True, text=True, env=environment, check=False
    )


def small_run(engine: EngineName, out: Path, *args: str) -> RunResult:
    """A run under torchrun on two ranks that has to succeed."""
    small = [f"--num-samples={NUM_SAMPLES}", f"--epochs={EPOCHS}"]
    done = run_training(f"--engine={engine}", "--launcher=torchrun", f"--out={out}", *small, *args)
    assert done.returncode == 0, done.stderr
    return RunResult.read(out / "result.json")


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[EngineName], RunResult]:
    """The uninterrupted run of an engine, made when first asked for."""
    made: dict[str, RunResult] = {}

    def run_of(engine: EngineName) -> RunResult:
        if engine not in made:
            made[engine] = small_run(engine, tmp_path_factory.mktemp(engine) / "run")
        return made[engine]

    return run_of
