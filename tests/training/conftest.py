"""Real runs, each made once for the session by :mod:`tests.training.jobs`, by the first test that asks for it."""

import fcntl
import os
import subprocess
import sys

import pytest
import torch

from fixtures.launch import close_pools
from tests.training import jobs


def in_process(*args: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: the frameworks warn, and keep global state."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """As many threads as the runs' ranks had, which share the cores with whatever else is tested."""
    torch.set_num_threads(1)


@pytest.fixture(scope="package", autouse=True)
def pools_of_their_own():
    """For the tests of this folder. A run changes how its processes compute: with AMX, 16-bit models had other last
    bits afterwards, and tests of formats compare these with what other processes wrote down."""
    close_pools()
    yield
    close_pools()


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """The result of a small run by its name; the folder of all runs is one for all processes of pytest-xdist."""
    mine = tmp_path_factory.getbasetemp()
    out = (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "small-runs"
    out.mkdir(exist_ok=True)

    def run(name):
        with (out / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            jobs.make(out, name)
        return jobs.result_of(out / name)

    return run


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A process group of this process."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    meeting = f"file://{tmp_path}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
