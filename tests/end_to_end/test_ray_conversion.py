"""Conversions on the processes of a cluster: the bytes that threads write, whatever becomes of a process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.cluster_utils import Cluster

import ckpt_tools
from tests.support.files import files_below
from tests.support.ray_cluster import cluster, processes
from tests.support.running import wait_until
from tests.support.s3_server import ACCESS_KEY, BUCKET, REGION, SECRET_KEY
from tests.support.sweep import tiered

__all__ = ["cluster"]

SMALL = "73MiB"
"""So little that tasks are small, and many."""


def made_in(folder: Path, num_tensors: int, num_rows: int) -> Path:
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    tensors = {f"layer.{n}": random.standard_normal((num_rows, 1000), np.float32) for n in range(num_tensors)}
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of five tensors, each of which many tasks share: 12 MB in a hundred tasks."""
    return made_in(tmp_path_factory.mktemp("large"), num_tensors=5, num_rows=600)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """As many parts of an upload as two workers share: 64 MB in eight."""
    return made_in(tmp_path_factory.mktemp("larger"), num_tensors=4, num_rows=4000)


def kill_workers_at(cluster: Cluster, percents: list[int]) -> Callable[[int, int], None]:
    """Progress that ends the first worker it finds, as the kernel would, each time that so much is done."""
    left = list(percents)

    def on_progress(done: int, total: int) -> None:
        if left and 100 * done >= left[0] * total:
            left.pop(0)
            # A process that is just taking another title has no command line for a moment, and so is found later.
            os.kill(wait_until(lambda: processes(cluster))[0].pid, signal.SIGKILL)

    return on_progress


@pytest.mark.parametrize(
    "to", tiered(["safetensors", "dcp", "zero3", "torch", "universal"], test=(), extended=["zero3"])
)
def test_the_bytes_are_those_that_threads_write(to, checkpoint, cluster, tmp_path):
    made = checkpoint("fsdp2", "plain", 2).checkpoint
    name = "out.pt" if to == "torch" else "out"
    told: list[tuple[int, int]] = []
    planned = ckpt_tools.plan(made, tmp_path / "ray" / name, to=to, runner="ray", workers=2)
    on_ray = ckpt_tools.convert(
        made, tmp_path / "ray" / name, to=to, runner="ray", workers=2, on_progress=lambda *both: told.append(both)
    )
    assert on_ray.plan == planned
    on_threads = ckpt_tools.convert(made, tmp_path / "threads" / name, to=to)
    assert files_below(tmp_path / "ray" / name) == files_below(tmp_path / "threads" / name)
    assert on_ray.bytes_written == on_threads.bytes_written
    # Where an item's elements start is found by each process that reads of it, and by two threads that come at once.
    assert 0.9 * on_threads.bytes_read < on_ray.bytes_read < 2 * on_threads.bytes_read
    assert told[-1] == (on_ray.bytes_written, on_ray.bytes_written)


@pytest.mark.extended
def test_recipes_map_tensors_in_other_processes_too(large, cluster, tmp_path):
    """Columns of one tensor become another with padding, in tasks that each read a part."""
    (tmp_path / "r.toml").write_text(
        'map = [{left = {"layer.{n}" = "R (a:400 b:600)"}, right = {"{n}.a" = "a R", "{n}.b" = "(b:600 pad:7) R"}}]'
    )
    for runner, place in (("ray", "ray.safetensors"), ("threads", "threads.safetensors")):
        given: dict[str, Any] = {"recipe": tmp_path / "r.toml", "runner": runner, "workers": 2, "memory": SMALL}
        ckpt_tools.convert(large, tmp_path / place, **given)
    assert (tmp_path / "ray.safetensors").read_bytes() == (tmp_path / "threads.safetensors").read_bytes()


def test_a_killed_worker_changes_nothing(large, cluster, tmp_path):
    """Whoever writes a checksum of DCP's waits for what was lost."""
    options = {"to": "dcp", "memory": SMALL}
    ckpt_tools.convert(
        large, tmp_path / "ray", runner="ray", workers=2, on_progress=kill_workers_at(cluster, [5, 50]), **options
    )
    ckpt_tools.convert(large, tmp_path / "threads", workers=1, **options)
    assert files_below(tmp_path / "ray") == files_below(tmp_path / "threads")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.extended
def test_from_s3_to_s3_with_a_worker_killed(larger, cluster, s3_server, tmp_path):
    """Workers that share no file system and no environment with the driver: they are told where the service is, and
    how to be let in."""
    prefix, storage = s3_server.new_prefix(), tmp_path / "threads"
    s3_server.upload(f"{prefix}in/", larger.parent)
    root = f"s3://{BUCKET}/{prefix}"
    access = {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": s3_server.endpoint, "region": REGION}
    on_ray: dict[str, Any] = {"to": "dcp", "runner": "ray", "workers": 2, "storage_options": access}
    planned = ckpt_tools.plan(f"{root}in", f"{root}out", **on_ray)
    done = ckpt_tools.convert(f"{root}in", f"{root}out", **on_ray, on_progress=kill_workers_at(cluster, [30]))
    assert done.plan == planned
    ckpt_tools.convert(larger, storage, to="dcp")
    assert s3_server.files(f"{prefix}out/") == files_below(storage)
    assert not s3_server.open_uploads(prefix)


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_tools", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.extended
def test_the_command_prints_its_report_alone(large, cluster, tmp_path):
    words = ["convert", large, tmp_path / "out", "--to", "safetensors", "--memory", SMALL, "--json", "--quiet"]
    done = run(*words, "--runner", "ray", "--address", cluster.address, "--workers", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["bytes_written"] == sum(map(len, files_below(tmp_path / "out").values()))
    again = run(*words, "--runner", "ray", "--address", cluster.address)
    assert again.returncode == 8 and again.stdout == "" and again.stderr.count("\n") == 1


@pytest.mark.extended
def test_a_cluster_that_cannot_be_used_is_one_sentence(large, tmp_path):
    done = run("convert", large, tmp_path / "out", "--to", "dcp", "--runner", "ray", "--address", "127.0.0.1:1")
    assert done.returncode == 5
    assert "no Ray cluster could be reached at 127.0.0.1:1" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())
