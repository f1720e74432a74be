"""Training that keeps its checkpoints on a real S3 server, and goes on from there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import CliRunner
from fsspec.core import url_to_fs

import ckpt_tools
from ckpt_tools.cli.main import group
from fixtures.launch import pool
from tests.support.s3_server import BUCKET
from tests.training.jobs import NUM_SAMPLES, NUM_WORKERS, SECONDS
from tests.training.s3_jobs import EPOCHS, train_all
from training.__main__ import main
from training.checkpoints.run_folder import remove_shards
from training.config.train_config import TrainConfig
from training.loop.result import RunResult

# One process and one local Ray for both: starting Ray and its workers is most of the time.
SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path
from ckpt_tools.errors import CkptError
from training.config.train_config import TrainConfig
from training.launchers import launch
from training.launchers.ray_train import cluster

out, url, num_samples, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
is_soak = sys.argv[5] == "soak"
size = {"model": "cnn", "num_samples": num_samples, "epochs": epochs}
first = TrainConfig(out=out / "stored", engine="fsdp2", storage=url, until=1, **size)
with cluster(2):
    launch(first)
    launch(replace(first, until=2, resume="latest"))
    try:
        if is_soak:
            launch(replace(first, out=out / "lost", storage="memory://lost"))
    except CkptError as error:
        (out / "lost/error.json").write_text(json.dumps([type(error).__name__, str(error)]))
"""

Result = Callable[[str], RunResult]


@pytest.fixture(scope="module")
def storage(s3_server):
    """The URL below which the runs keep their checkpoints."""
    return f"s3://{BUCKET}/{s3_server.new_prefix()}runs"


@pytest.fixture(scope="module")
def s3_out(tmp_path_factory):
    return tmp_path_factory.mktemp("s3")


@pytest.fixture(scope="module")
def result(s3_server, storage, s3_out):
    """The result of a run of the jobs by its folder."""
    pool(NUM_WORKERS).run(train_all, s3_out, storage, s3_server.environment, seconds=SECONDS)
    return lambda name: RunResult.read(s3_out / name / "result.json")


@pytest.fixture(scope="module")
def stored(s3_server, storage, s3_out, pytestconfig):
    """Of a run by Ray on S3 that was interrupted."""
    out = s3_out
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment = clean | s3_server.environment | {"OMP_NUM_THREADS": "1"}
    length = "soak" if pytestconfig.getoption("--soak") else "short"
    command = [sys.executable, "-c", SCRIPT, str(out), f"{storage}/fsdp2", str(NUM_SAMPLES), str(EPOCHS), length]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return RunResult.read(out / "stored/result.json")


@pytest.mark.extended
def test_a_run_on_s3_resumes_from_its_latest_bit_for_bit(stored, result, s3):
    plain = result("plain")
    assert [epoch.epoch for epoch in stored.history] == [2]
    assert stored.history[0].losses == plain.history[1].losses
    assert stored.predicted == plain.predicted
    compared = ckpt_tools.diff(stored.checkpoint, plain.checkpoint)
    assert compared.equal
    assert compared.num_tensors > 8  # of which 8 are weights


@pytest.mark.extended
def test_all_workers_upload_into_one_checkpoint(stored, s3, storage):
    assert stored.checkpoint == f"{storage}/fsdp2/checkpoints/epoch_0002"
    below = f"{storage.removeprefix(f's3://{BUCKET}/')}/fsdp2/"
    shards = {f"checkpoints/epoch_{epoch:04d}/{name}" for epoch in (1, 2)
              for name in (".metadata", "config.json", "__0_0.distcp", "__1_0.distcp")}  # fmt: skip
    record = {"checkpoints/checkpoint_manager_snapshot.json", "checkpoints/.validate_storage_marker"}
    assert {*s3.keys(below)} == shards | record
    assert not s3.open_uploads(below)


@pytest.mark.extended
def test_training_does_not_stand_still_during_an_upload(stored):
    """The only save of that run is the last, whose upload is waited for at the end."""
    [save] = stored.saves
    assert 0 < save.stall_seconds < save.seconds


@pytest.mark.soak
def test_an_upload_that_fails_ends_the_run_with_its_reason(stored, s3_out):
    """The workers do not share this store with the command."""
    kind, message = json.loads((s3_out / "lost/error.json").read_text())
    assert kind == "StoreError"
    assert re.match(r"epoch_0001 could not be saved: rank \d: RuntimeError: Unable to set up cluster storage", message)


def test_what_a_killed_run_has_uploaded_is_removed_before_it_is_written_again(s3, storage, tmp_path):
    """Shards of ranks that are no more would stay. What is not the run's own stays."""
    config = TrainConfig(out=tmp_path, engine="fsdp2", storage=f"{storage}/killed")
    fs, folder = url_to_fs(f"{storage}/killed/checkpoints")
    ours = ["__3_0.distcp", "config.json", "global_step4/zero_pp_rank_3_mp_rank_00_optim_states.pt"]
    for name in [f"epoch_0001/{each}" for each in [*ours, "notes.txt"]] + ["epoch_0002/__0_0.distcp"]:
        fs.pipe_file(f"{folder}/{name}", b"x")
    remove_shards(config, "epoch_0001")
    fs.invalidate_cache()
    assert [path.removeprefix(f"{folder}/") for path in fs.find(folder)] == [
        "epoch_0001/notes.txt",
        "epoch_0002/__0_0.distcp",
    ]


@pytest.mark.extended
def test_inspect_sees_the_checkpoint(stored, s3):
    seen = CliRunner().invoke(group, ["inspect", stored.checkpoint])
    assert seen.exit_code == 0
    assert "105,866" in seen.stdout


def test_another_engine_continues_from_s3(result):
    zero, plain = result("zero3"), result("plain")
    assert [epoch.epoch for epoch in zero.history] == [2, 3]
    assert zero.history[0].losses == pytest.approx(plain.history[1].losses, rel=1e-5)


def test_deepspeed_continues_its_own_from_s3_bit_for_bit(result):
    zero, again = result("zero3"), result("again")
    assert [epoch.losses for epoch in again.history] == [zero.history[1].losses]
    assert again.predicted == zero.predicted
    assert ckpt_tools.diff(zero.checkpoint, again.checkpoint).equal


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (("--storage={storage}/plain",), 8, "/plain already holds checkpoints of a run"),
        (("--storage={storage}/none", "--resume=latest"), 3, "/none holds no checkpoint to resume from"),
        (("--storage=s3://no-such-bucket/x",), 3, "there is no bucket no-such-bucket"),
        (("--storage={storage}/new", "--resume={storage}/none"), 3, "there is no file or folder"),
        (("--storage={storage}/new", "--launcher=torchrun"), 2, "--storage is Ray Train's"),
        (("--storage=folder",), 2, "--storage is a URL"),
        (("--storage=what://x",), 2, "what://x cannot be used"),
    ],
)
def test_what_cannot_begin_says_why(
    args,
    code,
    sentence,
    result,
    s3,
    storage,
    tmp_path,
):
    given = [arg.format(storage=storage) for arg in args]
    done = CliRunner().invoke(main, ["--engine=fsdp2", "--model=cnn", f"--out={tmp_path / 'run'}", *given])
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1), done.stderr
    assert sentence in done.stderr
    assert not (tmp_path / "run").exists()
