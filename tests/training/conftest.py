"""Real runs, made once for the session by :mod:`tests.training.jobs`: two ranks, 256 digits, two epochs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from training.result import RunResult

SmallRun = Callable[[str], RunResult]


def in_process(*args: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: the frameworks warn, and keep global state."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """As many threads as the runs' ranks had, which share the cores with whatever else is tested."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a run folder for each of the jobs' configurations."""
    out = tmp_path_factory.mktemp("runs")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = in_process(*torchrun, "-m", "tests.training.jobs", str(out))
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def small_run(small_runs: Path) -> SmallRun:
    """The result of a small run by its name."""
    return lambda name: RunResult.read(small_runs / name / "result.json")
