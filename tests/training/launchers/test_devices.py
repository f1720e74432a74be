"""GPUs are counted before workers start, and a rank has the threads that its optimizer needs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ckpt_tools.errors import UsageError
from tests.training.strategy_jobs import tiny_config
from training.launchers.checks import check_before_start
from training.launchers.devices import THREADS, check_gpus, threads_of


def test_more_workers_than_gpus_are_refused_and_none_is_a_cpu(tmp_path, monkeypatch):
    for workers, gpus in ((2, 0), (2, 2), (1, 8)):
        check_gpus(workers, gpus, "this machine")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    expected = "^--num-workers is 2 and this machine has 1 GPU, one for each worker; give --num-workers 1 or less$"
    with pytest.raises(UsageError, match=expected):
        check_before_start(tiny_config(tmp_path / "run", strategy="full_shard"))
    check_before_start(tiny_config(tmp_path / "run", strategy="full_shard", num_workers=1))


@pytest.mark.parametrize(
    ("values", "on_gpu", "threads"),
    [
        ({"strategy": "full_shard"}, True, "1"),
        ({"strategy": "full_shard", "cpu_offload": True}, True, "8"),
        ({"strategy": "zero2_offload"}, True, "8"),
        ({"strategy": "zero2_offload"}, False, "1"),
    ],
)
def test_the_optimizer_of_offloaded_state_has_threads_beside_a_gpu_alone(
    values, on_gpu, threads, tmp_path, monkeypatch
):
    monkeypatch.delenv(THREADS, raising=False)
    config = tiny_config(tmp_path, **values)
    assert threads_of(config, 2, 17, on_gpu=on_gpu) == {THREADS: threads}
    assert threads_of(config, 2, 1, on_gpu=on_gpu) == {THREADS: "1"}
    monkeypatch.setenv(THREADS, "3")
    assert threads_of(config, 2, 17, on_gpu=on_gpu) == {THREADS: "3"}


# A cluster of one machine, which says that it has a GPU, and has another compiler than this process.
SCRIPT = """
import os, sys
from dataclasses import replace
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from ckpt_tools.errors import UsageError
from tests.support.ray_cluster import NODE
from tests.training.strategy_jobs import tiny_config
from training.launchers import launch

os.environ["CXX"] = "no-such-compiler"
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": int(sys.argv[2]), **NODE})
os.environ["CXX"], os.environ["RAY_ADDRESS"] = "g++", cluster.address
config = replace(tiny_config(Path(sys.argv[1]), strategy="full_shard"), launcher="ray", compile=sys.argv[2] == "0")
try:
    launch(config)
except UsageError as error:
    print(error)
finally:
    cluster.shutdown()
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("gpus", "sentence"),
    [
        ("1", "--num-workers is 2 and the cluster has 1 GPU, one for each worker; give --num-workers 1 or less"),
        ("0", "--compile needs a C++ compiler, and no-such-compiler is not here; install it, or name one in CXX"),
    ],
)
def test_the_machines_of_a_cluster_are_asked_and_not_that_of_the_command(gpus, sentence, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), gpus]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300, check=False)
    assert done.stdout.splitlines()[-1:] == [sentence], done.stderr
