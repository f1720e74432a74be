"""Training that keeps its checkpoints on a real S3 server, and goes on from there."""

import os
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from fsspec.core import url_to_fs

import ckpt_tools
from ckpt_tools.cli.main import group
from fixtures.launch import pool
from tests.support.s3_server import BUCKET
from tests.training.jobs import NUM_WORKERS, SECONDS, by_ray, check_same_end, result_of, small_config, train
from training.__main__ import main
from training.checkpoints.run_folder import remove_shards
from training.config.train_config import TrainConfig


@pytest.fixture
def storage(s3_server, s3):
    """The URL below which a run keeps its checkpoints."""
    return f"s3://{BUCKET}/{s3_server.new_prefix()}run"


@pytest.fixture
def uploaded(storage, small_run):
    """``uploaded(engine)``: the run's URL, to which the first epoch of a small run was put."""

    def upload(engine):
        first = Path(small_run(engine).checkpoint).with_name("epoch_0001")
        fs, path = url_to_fs(f"{storage}/checkpoints/epoch_0001")
        fs.put(f"{first}/", f"{path}/", recursive=True)
        return storage

    return upload


@pytest.mark.extended
def test_a_run_on_s3_resumes_from_its_latest_bit_for_bit(uploaded, small_run, s3, tmp_path):
    """By Ray. All workers upload into one checkpoint, and training does not stand still meanwhile: the only save of the
    run is the last, whose upload is waited for at the end."""
    storage = uploaded("fsdp2")
    config = small_config(tmp_path / "run", launcher="ray", engine="fsdp2", storage=storage, resume="latest")
    by_ray(config, **s3.environment)
    result = result_of(config)
    assert result.checkpoint == f"{storage}/checkpoints/epoch_0002"
    check_same_end(result, small_run("fsdp2"))
    assert ckpt_tools.diff(result.checkpoint, small_run("fsdp2").checkpoint).num_tensors > 8  # of which 8 are weights
    below = storage.removeprefix(f"s3://{BUCKET}/")
    names = (".metadata", "config.json", "__0_0.distcp", "__1_0.distcp")
    shards = {f"/checkpoints/epoch_{epoch:04d}/{name}" for epoch in (1, 2) for name in names}
    record = {"/checkpoints/checkpoint_manager_snapshot.json", "/checkpoints/.validate_storage_marker"}
    assert {*s3.keys(below)} == shards | record
    assert not s3.open_uploads(below)
    [save] = result.saves
    assert 0 < save.stall_seconds < save.seconds
    seen = CliRunner().invoke(group, ["inspect", result.checkpoint])
    assert (seen.exit_code, "105,866" in seen.stdout) == (0, True)


def test_what_a_killed_run_has_uploaded_is_removed_before_it_is_written_again(storage, tmp_path):
    """Shards of ranks that are no more would stay. What is not the run's own stays."""
    config = TrainConfig(out=tmp_path, engine="fsdp2", storage=storage)
    fs, folder = url_to_fs(f"{storage}/checkpoints")
    ours = ["__3_0.distcp", "config.json", "global_step4/zero_pp_rank_3_mp_rank_00_optim_states.pt"]
    for name in [f"epoch_0001/{each}" for each in [*ours, "notes.txt"]] + ["epoch_0002/__0_0.distcp"]:
        fs.pipe_file(f"{folder}/{name}", b"x")
    remove_shards(config, "epoch_0001")
    fs.invalidate_cache()
    left = [path.removeprefix(f"{folder}/") for path in fs.find(folder)]
    assert left == ["epoch_0001/notes.txt", "epoch_0002/__0_0.distcp"]


def train_with(environment: Mapping[str, str], config: TrainConfig) -> None:
    """On each rank; ``environment`` says where S3 is."""
    with patch.dict(os.environ, environment):
        train(config)


@pytest.mark.extended
@pytest.mark.parametrize("other", ["fsdp2", "zero3"])
def test_deepspeed_continues_from_s3(other, uploaded, small_run, s3, tmp_path):
    """Its own run bit for bit."""
    config = small_config(tmp_path / "run", engine="zero3", resume=f"{uploaded(other)}/checkpoints/epoch_0001")
    pool(NUM_WORKERS).run(train_with, s3.environment, config, seconds=SECONDS)
    result, whole = result_of(config), small_run(other)
    assert [epoch.epoch for epoch in result.history] == [2]
    assert result.history[0].losses == pytest.approx(whole.history[1].losses, rel=1e-5)
    if other == "zero3":
        check_same_end(result, whole)


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (("--storage={storage}",), 8, "/run already holds checkpoints of a run"),
        (("--storage=s3://no-such-bucket/x",), 3, "there is no bucket no-such-bucket"),
        (("--storage={storage}/new", "--launcher=torchrun"), 2, "--storage is Ray Train's"),
        (("--storage=what://x",), 2, "what://x cannot be used"),
    ],
)
def test_what_cannot_begin_says_why(args, code, sentence, uploaded, tmp_path):
    storage = uploaded("fsdp2")
    given = [arg.format(storage=storage) for arg in args]
    done = CliRunner().invoke(main, ["--engine=fsdp2", "--model=cnn", f"--out={tmp_path / 'run'}", *given])
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1), done.stderr
    assert sentence in done.stderr
    assert not (tmp_path / "run").exists()
