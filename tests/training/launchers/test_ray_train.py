"""Ray Train against torchrun: the same loop, so the same losses; and its own record of the latest checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.jobs import EPOCHS, NUM_SAMPLES
from training.loop.result import RunResult

# One process and one local Ray for all: starting Ray and its workers is most of the time.
SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path
from ckpt_tools.errors import CkptError
from training.config.train_config import TrainConfig
from training.launchers import launch
from training.launchers.ray_train import cluster

out, num_samples, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
run = TrainConfig(out=out / "run", engine="zero3", model="cnn", num_samples=num_samples, epochs=epochs, resume="latest")
with cluster(2):
    launch(run)
    try:
        if sys.argv[4] == "soak":
            bad = str(out / "run/checkpoints/epoch_0002")
            launch(replace(run, out=out / "bad", num_workers=1, until=1, resume=bad))
    except CkptError as error:
        (out / "error.json").write_text(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture(scope="module")
def ray_run(tmp_path_factory, small_run, pytestconfig):
    """The folder of the second epoch of a ZeRO-3 run whose first was not under Ray, and in the soak of a run that fails
    on its workers."""
    out = tmp_path_factory.mktemp("ray")
    first = Path(small_run("zero3").checkpoint).with_name("epoch_0001")
    shutil.copytree(first, out / "run/checkpoints/epoch_0001")
    length = "soak" if pytestconfig.getoption("--soak") else "short"
    command = [sys.executable, "-c", SCRIPT, str(out), str(NUM_SAMPLES), str(EPOCHS), length]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (out / "printed.txt").write_text(done.stdout)
    return out


def test_ray_resumes_from_the_latest_and_trains_as_torchrun_does(ray_run, small_run):
    second, whole = RunResult.read(ray_run / "run/result.json"), small_run("zero3")
    assert [epoch.losses for epoch in second.history] == [whole.history[1].losses]
    assert second.predicted == whole.predicted


def test_every_worker_uploads_its_shards_into_one_checkpoint(ray_run):
    checkpoint = Path(RunResult.read(ray_run / "run/result.json").checkpoint)
    assert checkpoint.name == "epoch_0002"
    shards = sorted(path.name for path in (checkpoint / (checkpoint / "latest").read_text()).iterdir())
    assert shards == [
        f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (0, 1) for kind in ("model", "optim")
    ]


def test_ray_records_the_metrics_of_each_checkpoint(ray_run):
    record = json.loads((ray_run / "run/checkpoints/checkpoint_manager_snapshot.json").read_text())
    assert [entry["metrics"]["epoch"] for entry in record["checkpoint_results"]] == [2], "those of the last start"


def test_a_person_sees_one_line_an_epoch(ray_run):
    printed = (ray_run / "printed.txt").read_text().splitlines()
    assert [line.split()[0] for line in printed][:2] == ["resuming", "epoch"]


@pytest.mark.soak
def test_a_failing_worker_is_heard_as_its_own_error(ray_run):
    kind, message = json.loads((ray_run / "error.json").read_text())
    assert kind == "UsageError"
    assert message.endswith("nothing is left to train")
