"""Every change of a checkpoint's files is noticed, and nothing else in its folder."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tools
from ckpt_tools.errors import SourceNotFoundError
from tests.support.s3_server import BUCKET

pytestmark = pytest.mark.quick


def write_model(folder: Path, value: float) -> Path:
    """Two shards, their index and ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in (1, 2):
        save_file({f"w{number}": np.full(8, value, np.float32)}, folder / f"model-0000{number}-of-00002.safetensors")
    index = {"weight_map": {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "x"}')
    return folder


def copied_with_times(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-p", source, target], check=True)


def renamed(source: Path, target: Path) -> None:
    """A copy with the same times is renamed over the target."""
    copied_with_times(source, target.with_name("copy"))
    target.with_name("copy").rename(target)


def appended(_: Path, target: Path) -> None:
    with target.open("ab") as file:
        file.write(b"x")


def unfinished(source: Path, target: Path) -> None:
    """As rsync writes, before it renames."""
    target.with_name(f".{target.name}.Xy12").write_bytes(source.read_bytes()[:10])


def removed(_: Path, target: Path) -> None:
    target.unlink()


@pytest.mark.parametrize("change", [copied_with_times, renamed, appended, unfinished, removed])
@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_change_of_any_file_is_noticed(tmp_path, name, change):
    """Both files have the same size and time of writing."""
    model, other = write_model(tmp_path / "model", 1), write_model(tmp_path / "other", 2)
    for folder in (model, other):
        os.utime(folder / name, (1e9, 1e9))
    before = ckpt_tools.fingerprint(model)
    assert before == before.again()
    change(other / name, model / name)
    assert before != before.again()


def test_logs_and_other_checkpoints_do_not_count(tmp_path):
    model = write_model(tmp_path / "model", 1)
    write_model(model / "checkpoint-1", 1)
    (model / "train.log").write_text("1")
    before = ckpt_tools.fingerprint(model)
    (model / "train.log").write_text("1\n2")
    (model / "runs").mkdir()
    (model / "runs" / "events.out.tfevents.1").write_text("2")
    write_model(model / "checkpoint-1", 2)
    write_model(model / "checkpoint-2", 2)
    assert before == before.again()
    assert len(before.files) == 4 and before.changed is not None


def test_other_tags_of_deepspeed_do_not_count(tmp_path):
    run = tmp_path / "run"
    ckpt_tools.convert(write_model(tmp_path / "model", 1), run, to="zero2", world_size=2)
    before = ckpt_tools.fingerprint(run)
    tag = (run / "latest").read_text()
    assert {path.partition("/")[0] for path in before.files} == {"latest", tag}
    shutil.copytree(run / tag, run / "global_step999")
    assert before == before.again()
    (run / "latest").write_text("global_step999")
    assert before != before.again()


def test_a_name_of_a_run_means_another_checkpoint_later(tmp_path):
    write_model(tmp_path / "run" / "step-1", 1)
    before = ckpt_tools.fingerprint(f"{tmp_path}/run@latest")
    assert before.url == f"{tmp_path}/run/step-1"
    write_model(tmp_path / "run" / "step-2", 1)
    assert before.again().url == f"{tmp_path}/run/step-2"


def test_a_damaged_checkpoint_has_a_state_too(tmp_path):
    model = write_model(tmp_path / "model", 1)
    before = ckpt_tools.fingerprint(model)
    (model / "model-00001-of-00002.safetensors").write_bytes(b"damaged")
    assert before != before.again() == ckpt_tools.fingerprint(model)
    with pytest.raises(SourceNotFoundError):
        ckpt_tools.fingerprint(tmp_path / "none")


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_an_object_of_the_same_size_is_noticed(scheme, s3, tmp_path):
    model, other = write_model(tmp_path / "model", 1), write_model(tmp_path / "other", 2)
    prefix, fs = s3.new_prefix(), fsspec.filesystem("memory")
    url = f"s3://{BUCKET}/{prefix}" if scheme == "s3" else f"memory://{tmp_path.name}/model"

    def put(files: dict[str, bytes]) -> None:
        if scheme == "s3":
            s3.put(prefix, files)
        else:
            fs.pipe({f"{url}/{name}": data for name, data in files.items()})

    put({file.name: file.read_bytes() for file in model.iterdir()})
    before = ckpt_tools.fingerprint(url)
    assert before == before.again()
    assert before.changed is None
    name = "model-00002-of-00002.safetensors"
    put({name: (other / name).read_bytes()})
    assert before != before.again()
