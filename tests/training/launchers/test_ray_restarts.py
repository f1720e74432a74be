"""Ray loses a machine, and the run goes on with the workers that are left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_tools.errors import StoreError, UsageError
from tests.training.jobs import small_config
from training.checkpoints.run_folder import restarted
from training.config.train_config import TrainConfig
from training.launchers.failures import Failure, RunFailedError
from training.launchers.ray_restarts import AttemptFailedError, on_what_is_left, with_restarts
from training.loop.result import RunResult

# Two machines of one processor each. The second is lost as soon as there is a checkpoint.
SCRIPT = """
import sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from tests.support.ray_cluster import HEALTH, NODE
from tests.training.launchers.test_ray_restarts import lossy
from training.checkpoints.run_folder import saved_checkpoints
from training.launchers import launch

config = lossy(Path(sys.argv[1]))
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": HEALTH, **NODE})
node = cluster.add_node(num_cpus=1, **NODE)

def lose():
    while not saved_checkpoints(config.out):
        time.sleep(0.02)
    cluster.remove_node(node, allow_graceful=False)

ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
threading.Thread(target=lose, daemon=True).start()
try:
    launch(config)
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def lossy(out: Path) -> TrainConfig:
    usual = small_config(out, engine="fsdp2", save_every_steps=1)
    return replace(usual, launcher="ray", max_restarts=1, min_workers=1)


@pytest.mark.soak
def test_a_run_goes_on_with_the_machines_that_are_left(tmp_path, small_run):
    """Each step has the same loss as if nothing had been lost: the same batch of samples, in the same order."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("restart 1 of 1: rank ") for line in lines), done.stdout
    assert "continuing with 1 of 2 workers" in lines
    result, whole = RunResult.read(tmp_path / "result.json"), small_run("fsdp2")
    assert result.num_workers == 1
    for ours, theirs in zip(result.history, whole.history[-len(result.history) :], strict=True):
        assert ours.losses == pytest.approx(theirs.losses[ours.earlier_steps :], rel=1e-5)
        assert ours.mean_loss == pytest.approx(theirs.mean_loss, rel=1e-5)


@pytest.mark.parametrize(
    ("room", "used", "values"),
    [
        (8, 8, {}),
        (9, 8, {}),
        (7, 4, {}),  # 64 samples divide over neither 7 nor 6 nor 5 workers
        (3, 2, {}),
        (1, None, {}),
        (7, 6, {"batch_size": 48, "num_workers": 6}),
        (7, 4, {"strategy": "hybrid_shard", "shard_size": 4, "num_workers": 8, "min_workers": 4}),
        (3, None, {"strategy": "hybrid_shard", "shard_size": 4, "num_workers": 8, "min_workers": 4}),
    ],
)
def test_as_many_workers_are_used_as_the_batch_divides_over(room, used, values, tmp_path):
    usual = {"engine": "fsdp2", "num_workers": 8, "min_workers": 2, "max_restarts": 1}
    found = on_what_is_left(TrainConfig(out=tmp_path, **(usual | values)), room)  # type: ignore[arg-type]
    assert (found and found.num_workers) == used


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"launcher": "torchrun"}, "^--min-workers is for --launcher ray"),
        ({"max_restarts": 0}, "^--min-workers is for --max-restarts"),
        ({"min_workers": 0}, "^--min-workers is at least 1, not 0$"),
        ({"min_workers": 3}, "^--min-workers 3 is more than --num-workers 2$"),
        ({"min_workers": 3, "num_workers": 4}, r"64 does not divide over 3 workers"),
    ],
)
def test_what_min_workers_needs(values, sentence, tmp_path):
    usual = {"engine": "fsdp2", "min_workers": 1, "max_restarts": 1}
    with pytest.raises(UsageError, match=sentence):
        TrainConfig(out=tmp_path, **(usual | values))  # type: ignore[arg-type]


def attempts(*outcomes: Failure | int) -> Callable[[TrainConfig], int]:
    """Attempts of a run that fail or succeed so, one after the other."""
    left = iter(outcomes)

    def attempt(_: TrainConfig) -> int:
        if isinstance(outcome := next(left), Failure):
            raise AttemptFailedError(outcome)
        return outcome

    return attempt


def failure(kind: str, message: str) -> Failure:
    return Failure(1, kind, message, "details")


def test_each_restart_is_said_and_the_last_failure_ends_the_run(tmp_path):
    config = TrainConfig(out=tmp_path, engine="fsdp2", max_restarts=2)
    said: list[str] = []
    failing = attempts(*[failure("ValueError", word) for word in ("one", "two", "three")])
    with pytest.raises(RunFailedError, match=r"^rank 1 failed with ValueError: three \(see "):
        with_restarts(config, failing, said.append)
    assert said == [
        "restart 1 of 2: rank 1 failed with ValueError: one",
        "restart 2 of 2: rank 1 failed with ValueError: two",
    ]


def test_an_attempt_that_succeeds_is_the_last(tmp_path):
    config = TrainConfig(out=tmp_path, engine="fsdp2", max_restarts=2)
    resumed = replace(config, resume="auto")
    assert with_restarts(config, attempts(failure("OSError", "gone"), 7), print) == (resumed, 7)


def test_a_restart_before_the_first_checkpoint_resumes_what_the_run_began_with(tmp_path, small_run):
    checkpoint = small_run("fsdp2").checkpoint
    config = TrainConfig(out=tmp_path, engine="fsdp2", resume=checkpoint)
    assert restarted(config) == config
    shutil.copytree(checkpoint, tmp_path / "checkpoints/epoch_0002", copy_function=os.link)
    assert restarted(config) == replace(config, resume="auto")


def test_without_restarts_the_first_failure_ends_the_run(tmp_path):
    config = TrainConfig(out=tmp_path, engine="fsdp2")
    with pytest.raises(StoreError, match=r"^full$"):
        with_restarts(config, attempts(failure("StoreError", "full"), 7), print)
