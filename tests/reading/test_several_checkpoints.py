"""A folder with several checkpoints: the others are no part of the one that is meant, and change nothing about it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.cli.main import group
from ckpt_tools.errors import CkptError, IncompleteError, LossError, SeveralCheckpointsError, SourceNotFoundError
from ckpt_tools.trainers.saved import parse_step
from tests.runs.test_completeness import RUNS, Run
from tests.support.sweep import extended

LAYOUTS = {run.layout: run for run in reversed(RUNS)}

COMMANDS: dict[str, Callable[..., Any]] = {
    "inspect": lambda src, out, **how: ckpt_tools.inspect(src, **how),
    "plan": lambda src, out, **how: ckpt_tools.plan(src, out, to="dcp", **how),
    "convert": lambda src, out, **how: ckpt_tools.convert(src, out, to="dcp", strict=True, **how),
    "reshard": lambda src, out, **how: ckpt_tools.reshard(src, out, world_size=3, strict=True, **how),
    "consolidate": lambda src, out, **how: ckpt_tools.consolidate(src, out, strict=True, **how),
    "verify": lambda src, out, **how: ckpt_tools.verify(src, **how),
    "checksum": lambda src, out, **how: ckpt_tools.checksum(src, output="-", **how),
    "diff": lambda src, out: ckpt_tools.diff(src, src),
}


def outcome(command: str, source: str, folder: Path, **how: Any) -> object:
    """What a command says, without the names of the folder."""
    out = folder.parent / "out"
    try:
        found = COMMANDS[command](source, out, **how)
        notes = [(note.outcome, note.what, note.why) for note in getattr(getattr(found, "plan", found), "notes", ())]
        said: object = notes, getattr(found, "equal", None), getattr(found, "digests", None)
    except CkptError as error:
        said = type(error), str(error).replace(str(folder), "RUN")
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    return said


def pair(run: Run, kept: int, folder: Path) -> tuple[Path, Path]:
    """A run of two checkpoints, and the same run with one of them alone."""
    both, alone = folder / "both" / "run", folder / "alone" / "run"
    run.lay(both)
    shutil.copytree(both, alone)
    shutil.rmtree(alone / run.names[1 - kept].partition("/")[0])
    if run.latest[0] and kept == 0:
        (alone / run.latest[0]).write_text((both / run.latest[0]).read_text().replace(run.names[1], run.names[0]))
    return both, alone


STAGE_3, UNIVERSAL, PARALLEL = "deepspeed-zero3-bf16", "deepspeed-universal", "deepspeed-pipeline-tp-zero1-fp32"
MEANT = [(STAGE_3, command) for command in ("inspect", "convert", "reshard", "verify", "diff")]
OTHERS = [(STAGE_3, command) for command in ("plan", "consolidate", "checksum")]
OTHERS += [(UNIVERSAL, "diff"), (PARALLEL, "reshard"), ("deepspeed-moe-fp32", "convert"), ("megatron", "reshard")]


@pytest.mark.parametrize(("layout", "command"), [*MEANT, (UNIVERSAL, "inspect"), *extended(*OTHERS)])
def test_another_checkpoint_of_the_run_changes_nothing(layout, command, tmp_path):
    run = LAYOUTS[layout]
    folders = pair(run, 1, tmp_path)
    for ending in ("", "@latest", f"@{run.names[1]}", f"@step={parse_step(run.names[1])}"):
        said, expected = (outcome(command, f"{folder}{ending}", folder) for folder in folders)
        assert said == expected, ending


@pytest.mark.parametrize("layout", ["hf-trainer", "torchtitan"])
def test_a_run_that_does_not_choose_says_how_to_name_one_and_then_reads_it_alone(layout, tmp_path):
    run = LAYOUTS[layout]
    both, alone = pair(run, 1, tmp_path)
    with pytest.raises(SeveralCheckpointsError, match=f"{both}@latest"):
        ckpt_tools.inspect(both)
    for ending in ("@latest", f"@{run.names[1]}", f"@step={parse_step(run.names[1])}"):
        said, expected = (outcome("convert", f"{folder}{ending}", folder) for folder in (both, alone))
        assert said == expected, ending


TAGS = [("deepspeed-zero1-fp32", "convert"), ("deepspeed-zero1-fp32", "verify"), (UNIVERSAL, "inspect")]
OTHER_TAGS = [(STAGE_3, "reshard"), ("deepspeed-moe-fp32", "reshard"), (PARALLEL, "consolidate"), (UNIVERSAL, "verify")]


@pytest.mark.parametrize(("layout", "command"), [*TAGS, *extended(*OTHER_TAGS)])
def test_a_tag_is_the_same_beside_others(layout, command, tmp_path):
    """Also the one that ``latest`` does not name."""
    both, alone = pair(LAYOUTS[layout], 0, tmp_path)
    said = outcome(command, str(both), both, tag=LAYOUTS[layout].names[0])
    assert said == outcome(command, str(alone), alone)


@pytest.fixture
def tags(tmp_path):
    """Two tags of stage 3 with names of the user's choice, the second universal too."""
    run = replace(LAYOUTS["deepspeed-zero3-bf16"], names=("best", "final"), latest=("latest", "final"))
    run.lay(tmp_path / "run")
    universal = LAYOUTS["deepspeed-universal"]
    replace(universal, names=("best_universal", "final_universal"), latest=("latest_universal", "best_universal")).lay(
        tmp_path / "run"
    )
    (tmp_path / "run" / "zero_to_fp32.py").write_text("")
    return tmp_path / "run"


@pytest.mark.parametrize("words", [[], ["--tag", "best"], ["--from", "universal"]])
def test_strict_is_about_this_checkpoint(words, tags, tmp_path):
    call = ["convert", str(tags), str(tmp_path / "out"), "--to", "zero3", "--strict", *words]
    done = CliRunner().invoke(group, call)
    assert done.exit_code == 0, done.output
    assert "dropped" not in done.output


def test_what_of_the_tag_itself_is_lost_is_still_said(tags, tmp_path):
    for tag in ("best", "final"):
        (tags / tag / "rng_rank_0.pt").write_bytes(b"")
    (tags / "scaler.pt").write_bytes(b"")
    notes = {note.what for note in ckpt_tools.inspect(tags).notes}
    assert {"final/rng_rank_0.pt", "scaler.pt"} <= notes
    with pytest.raises(LossError, match="final/rng_rank_0"):
        ckpt_tools.convert(tags, tmp_path / "out", to="zero3", strict=True)


def test_tags_are_read_and_refused_each_by_itself(tags):
    (tags / "latest").write_text("gone")
    with pytest.raises(IncompleteError, match="'gone', which does not exist; the tags are final, best"):
        ckpt_tools.inspect(tags)
    with pytest.raises(SourceNotFoundError, match="no tag 'gone'; it has final, best"):
        ckpt_tools.inspect(tags, tag="gone")
    (tags / "latest").unlink()
    assert ckpt_tools.inspect(tags, tag="best").notes == ()
    next((tags / "best").glob("*optim_states.pt")).unlink()
    with pytest.raises(IncompleteError, match="best/"):
        ckpt_tools.inspect(tags, tag="best")
    assert ckpt_tools.inspect(tags, tag="final").notes == ()
    shutil.rmtree(tags / "best")
    assert ckpt_tools.inspect(tags).notes == (), "one tag needs no file latest"


def test_a_model_above_the_checkpoints_of_its_run_takes_nothing_from_them(tmp_path):
    """The Trainer leaves the last model, and checkpoints below it."""
    run = tmp_path / "run"
    LAYOUTS["hf-trainer"].lay(run)
    save_file({"w": torch.zeros(2)}, run / "model.safetensors")
    found = ckpt_tools.inspect(run)
    assert (found.notes, found.step, found.num_parameters) == ((), None, 2)
    (run / "best").mkdir()
    shutil.copy(run / "checkpoint-2" / "scheduler.pt", run / "best")
    assert [note.what for note in ckpt_tools.inspect(run).notes] == ["best/scheduler.pt"]
