"""``ckpt-tools ls``: the checkpoints of a run as a person, a program and ``RUN@latest`` see them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import SourceNotFoundError
from tests.support.commands import printed, run_command
from tests.support.s3_server import BUCKET


def saved(folder: Path, step: int) -> Path:
    folder.mkdir(parents=True)
    torch.save({"model": {"w": torch.full((1,), float(step))}, "global_step": step}, folder / "model.pt")
    return folder


@pytest.fixture
def run(tmp_path):
    for step in (5, 10, 15):
        os.utime(saved(tmp_path / "run" / f"step_{step}", step) / "model.pt", (1e9 + step, 1e9 + step))
    cut = tmp_path / "run" / "step_15" / "model.pt"
    cut.write_bytes(cut.read_bytes()[:-1])
    (tmp_path / "run" / "log.txt").write_text("x")
    return tmp_path / "run"


def test_newest_first_and_the_incomplete_say_why(run):
    lines = printed("ls", run).splitlines()
    assert lines[0].split() == ["checkpoint", "step", "time", "(UTC)", "size", "format", "ranks", "complete"]
    assert [line.split()[0] for line in lines[1:]] == ["step_15", "step_10", "step_5"]
    assert lines[1].endswith("no: model.pt has no end: it is cut off")
    assert "\t2001-09-09 01:46\t" in lines[2] and lines[2].endswith("yes")


def test_json_is_what_the_function_returns_and_links_are_not_listed_twice(run):
    found = json.loads(printed("ls", run, "--json"))
    assert found == ckpt_tools.ls(run).to_json()
    assert found["latest"] == "step_10"
    assert [each["is_complete"] for each in found["checkpoints"]] == [False, True, True]
    (run / "best").symlink_to(run / "step_5")
    assert [each.name for each in ckpt_tools.ls(run).checkpoints] == ["step_15", "step_10", "step_5"]


def test_latest_is_the_newest_complete_one_and_says_so(run, caplog):
    assert float(ckpt_tools.open(f"{run}@latest")["w"][0]) == 10
    assert caplog.messages == [
        "latest is step_10: the newer step_15 is not complete: model.pt has no end: it is cut off"
    ]
    assert "the newer step_15 is not complete" in run_command("inspect", f"{run}@latest").err
    caplog.clear()
    (run / "step_15").rename(run / "../step_15")
    ckpt_tools.open(f"{run}@latest")
    assert not caplog.messages
    shutil.rmtree(run / "step_5")
    shutil.rmtree(run / "step_10")
    (run / "../step_15").rename(run / "step_15")
    with pytest.raises(SourceNotFoundError, match="no complete checkpoint; the newest is step_15"):
        ckpt_tools.inspect(f"{run}@latest")


@pytest.mark.parametrize("place", ["/step_10", "/step_10/model.pt", "@latest"])
def test_one_checkpoint_lists_itself(place, run):
    (found,) = ckpt_tools.ls(f"{run}{place}").checkpoints
    url = f"{run}/step_10" if place == "@latest" else f"{run}{place}"
    assert (found.url, found.step, found.is_complete) == (url, 10, True)
    assert found.name == "." or place != "@latest"


@pytest.mark.parametrize("names", [[], ["notes.txt", "src/main.py"]])
def test_a_folder_without_checkpoints_is_not_found(names, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    done = run_command("ls", tmp_path)
    assert (done.code, done.out, "holds no checkpoints" in done.err) == (3, "", True)


def test_a_bucket_is_listed_once(s3, run, monkeypatch):
    from ckpt_tools.stores.s3.client import Bucket

    prefix = s3.new_prefix()
    s3.put(prefix, {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()})
    listings = []
    pages = Bucket._list_pages
    monkeypatch.setattr(Bucket, "_list_pages", lambda *words, **given: listings.append(words) or pages(*words, **given))
    found = ckpt_tools.ls(f"s3://{BUCKET}/{prefix}")
    assert len(listings) == 1
    assert [(each.name, each.is_complete) for each in found.checkpoints] == [
        ("step_15", False), ("step_10", True), ("step_5", True)
    ]  # fmt: skip
    assert all(each.time is not None for each in found.checkpoints)


@pytest.mark.parametrize("command", [("ls",), ("prune", "--keep-last", "1")])
def test_a_terminal_of_any_width_shows_it(command, run):
    """No line is longer than the terminal, but for a name alone, and no sentence is a word a line."""
    long = "model_name=0--val_loss=1.51-step=20-consumed_samples=160.0-last"
    saved(run / long / "weights", 20)
    plain = printed(command[0], run, *command[1:]).partition("\n")[2]
    for columns in (60, 80, 120, 200):
        lines = run_command(command[0], run, *command[1:], columns=columns).out.splitlines()
        assert not [line for line in lines if len(line) > columns and line != long]
        assert len([line for line in lines if len(line.split()) == 1]) <= len(ckpt_tools.ls(run).checkpoints)
        shown = {word.strip(",") for line in lines for word in line.split()}
        assert {word.strip(",") for word in plain.split()} <= shown


def test_ranks_are_not_counted_while_files_of_some_are_missing(checkpoint, tmp_path):
    shutil.copytree(checkpoint("fsdp2", "plain", 3).checkpoint, tmp_path / "run" / "step-1")
    (found,) = ckpt_tools.ls(tmp_path / "run").checkpoints
    assert found.world_size == 3
    (tmp_path / "run" / "step-1" / "__2_0.distcp").unlink()
    (found,) = ckpt_tools.ls(tmp_path / "run").checkpoints
    assert found.world_size is None and not found.is_complete
