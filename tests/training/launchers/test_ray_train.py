"""Ray Train against torchrun: the same loop, so the same losses; its own record of the latest checkpoint; restarts, by
the workers that are left if a machine is lost."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_tools.errors import StoreError
from tests.training.jobs import by_ray, check_same_end, losses, result_of, small_config
from training.config.train_config import TrainConfig
from training.launchers.failures import RankFailure, RunFailedError
from training.launchers.ray_restarts import AttemptFailedError, run_with_restarts, shrink_to_room


@pytest.mark.parametrize(("engine", "workers"), [("fsdp2", 1), pytest.param("zero3", 2, marks=pytest.mark.soak)])
def test_ray_resumes_from_the_latest_and_trains_as_torchrun_does(engine, workers, tmp_path, small_run, pytestconfig):
    """The second epoch of a run of two ranks whose first was not under Ray, bit for bit if it has as many; in the soak
    also runs that fail on their workers. ``test_s3`` has two of FSDP2."""
    whole = small_run(engine)
    shutil.copytree(Path(whole.checkpoint).with_name("epoch_0001"), tmp_path / "run/checkpoints/epoch_0001")
    config = small_config(tmp_path / "run", launcher="ray", engine=engine, num_workers=workers, resume="latest")
    finished = str(config.out / "checkpoints/epoch_0002")
    bad = replace(config, out=tmp_path / "bad", num_workers=1, until=1, resume=finished)
    lost = replace(config, out=tmp_path / "lost", resume=None, until=1, storage="memory://lost")
    printed = by_ray(config, *((bad, lost) if pytestconfig.getoption("--soak") else ()))
    assert [line.split()[0] for line in printed][:2] == ["resuming", "epoch"], "a person sees one line an epoch"
    found = result_of(config)
    assert found.checkpoint == finished
    assert losses(found) == pytest.approx(whole.history[1].losses, rel=1e-5)
    if workers == 2:
        check_same_end(found, whole)
        names = {path.relative_to(finished) for path in Path(finished).rglob("*")}
        assert names == {path.relative_to(whole.checkpoint) for path in Path(whole.checkpoint).rglob("*")}
    record = json.loads((config.out / "checkpoints/checkpoint_manager_snapshot.json").read_text())
    assert [entry["metrics"]["epoch"] for entry in record["checkpoint_results"]] == [2], "those of the last start"
    if pytestconfig.getoption("--soak"):
        told = [line for line in printed if line.startswith(("UsageError", "StoreError"))]
        assert told[0].endswith("nothing is left to train")
        # The workers do not share this store with the command.
        full = r"StoreError epoch_0001 could not be saved: rank \d: RuntimeError: Unable to set up cluster storage"
        assert re.match(full, told[1])


# Two machines of one processor each. The second is lost as soon as there is a checkpoint.
LOSSY = """
import sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from tests.support.ray_cluster import HEALTH, NODE
from tests.training.launchers.test_ray_train import lossy
from training.checkpoints.run_folder import list_saved_checkpoints
from training.launchers import launch

config = lossy(Path(sys.argv[1]))
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": HEALTH, **NODE})
node = cluster.add_node(num_cpus=1, **NODE)

def lose():
    while not list_saved_checkpoints(config.out):
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
    return small_config(out, launcher="ray", engine="fsdp2", save_every_steps=1, max_restarts=1, min_workers=1)


@pytest.mark.soak
def test_a_run_goes_on_with_the_machines_that_are_left(tmp_path, small_run):
    """Each step has the same loss as if nothing had been lost: the same batch of samples, in the same order."""
    command = [sys.executable, "-c", LOSSY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("restart 1 of 1: rank ") for line in lines), done.stdout
    assert "continuing with 1 of 2 workers" in lines
    result, whole = result_of(tmp_path), small_run("fsdp2")
    assert result.num_workers == 1
    for ours, theirs in zip(result.history, whole.history[-len(result.history) :], strict=True):
        assert ours.losses == pytest.approx(theirs.losses[ours.earlier_steps :], rel=1e-5)
        assert ours.mean_loss == pytest.approx(theirs.mean_loss, rel=1e-5)


# Ray keeps the placement group of an actor that is gone, as of a controller whose worker was lost while it started.
LEFT = """
import ray
from training.launchers.ray_restarts import list_placement_groups, remove_placement_groups

@ray.remote(num_cpus=0)
class Controller:
    def reserve(self):
        ray.get(ray.util.placement_group([{"CPU": 1}]).ready())

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
controller = Controller.remote()
ray.get(controller.reserve.remote())
ray.kill(controller)
remove_placement_groups(list_placement_groups())
ray.get(ray.util.placement_group([{"CPU": 1}]).ready(), timeout=60)
"""


@pytest.mark.extended
def test_what_a_failed_attempt_has_reserved_is_free_for_the_next():
    subprocess.run([sys.executable, "-c", LEFT], check=True, timeout=300)


@pytest.mark.parametrize(
    ("room", "used", "values"),
    [
        (9, 8, {}),
        (7, 4, {}),  # 64 samples divide over neither 7 nor 6 nor 5 workers
        (1, None, {}),
        (7, 4, {"strategy": "hybrid_shard", "shard_size": 4, "num_workers": 8, "min_workers": 4}),
        (3, None, {"strategy": "hybrid_shard", "shard_size": 4, "num_workers": 8, "min_workers": 4}),
    ],
)
def test_as_many_workers_are_used_as_the_batch_divides_over(room, used, values, tmp_path):
    usual = {"engine": "fsdp2", "num_workers": 8, "min_workers": 2, "max_restarts": 1}
    found = shrink_to_room(TrainConfig(out=tmp_path, **(usual | values)), room)
    assert (found and found.num_workers) == used


def attempts(*outcomes: RankFailure | int) -> Callable[[TrainConfig], int]:
    """Attempts of a run that fail or succeed so, one after the other."""
    left = iter(outcomes)

    def attempt(_: TrainConfig) -> int:
        if isinstance(outcome := next(left), RankFailure):
            raise AttemptFailedError(outcome)
        return outcome

    return attempt


def failure(kind: str, message: str) -> RankFailure:
    return RankFailure(1, kind, message, "details")


def test_each_restart_is_said_and_the_last_failure_or_first_success_ends_the_run(tmp_path):
    config = TrainConfig(out=tmp_path, engine="fsdp2", max_restarts=2)
    said: list[str] = []
    failing = attempts(*[failure("ValueError", word) for word in ("one", "two", "three")])
    with pytest.raises(RunFailedError, match=r"^rank 1 failed with ValueError: three \(see "):
        run_with_restarts(config, failing, said.append)
    words = {1: "one", 2: "two"}
    assert said == [f"restart {n} of 2: rank 1 failed with ValueError: {word}" for n, word in words.items()]
    resumed = replace(config, resume="auto")
    assert run_with_restarts(config, attempts(failure("OSError", "gone"), 7), print) == (resumed, 7)
    with pytest.raises(StoreError, match=r"^full$"):
        run_with_restarts(replace(config, max_restarts=0), attempts(failure("StoreError", "full"), 7), print)
