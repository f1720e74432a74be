"""A folder with several checkpoints: the others are no part of the one that is meant, and change nothing about it."""

from __future__ import annotations

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
from ckpt_tools.trainers.run_folders import step_in
from tests.runs.test_completeness_of_layouts import RUNS, Run
from tests.support.sweep import thinned

LAYOUTS = {run.layout: run for run in reversed(RUNS)}

CHOOSING = (
    "megatron",
    "deepspeed-zero1-fp32",
    "deepspeed-zero3-bf16",
    "deepspeed-pipeline-tp-zero1-fp32",
    "deepspeed-moe-fp32",
    "deepspeed-universal",
)
"""Layouts whose run has a file that says which checkpoint is meant."""

TAGS = [name for name in CHOOSING if name != "megatron"]

COMMANDS: dict[str, Callable[..., Any]] = {
    "inspect": lambda src, out, **how: ckpt_tools.inspect(src, **how),
    "plan": lambda src, out, **how: ckpt_tools.plan(src, out, to="dcp", **how),
    "convert": lambda src, out, **how: ckpt_tools.convert(src, out, to="dcp", strict=True, **how),
    "reshard": lambda src, out, **how: ckpt_tools.reshard(src, out, world_size=3, strict=True, **how),
    "consolidate": lambda src, out, **how: ckpt_tools.consolidate(src, out, strict=True, **how),
    "verify": lambda src, out, **how: ckpt_tools.verify(src, **how),
    "checksum": lambda src, out, **how: ckpt_tools.checksum(src, output="-", **how),
}

DIFF = {"diff": lambda src, out: ckpt_tools.diff(src, src)}
"""``tag`` is that of the first checkpoint alone."""


def outcome(command: Callable[..., Any], source: str, folder: Path, **how: Any) -> object:
    """What a command says, without the names of the folder."""
    out = folder.parent / "out"
    try:
        found = command(source, out, **how)
        notes = [(note.outcome, note.what, note.why) for note in getattr(getattr(found, "plan", found), "notes", ())]
        said: object = notes, getattr(found, "equal", None), getattr(found, "digests", None)
    except CkptError as error:
        said = type(error), str(error).replace(str(folder), "RUN")
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    return said


@pytest.fixture
def pair(tmp_path):
    """A run of two checkpoints, and the same run with one of them alone."""

    def made(run: Run, kept: int) -> tuple[Path, Path]:
        both, alone = tmp_path / "both" / "run", tmp_path / "alone" / "run"
        run.lay(both)
        shutil.copytree(both, alone)
        other = alone / run.names[1 - kept].partition("/")[0]
        shutil.rmtree(other)
        if run.latest[0] and kept == 0:
            (alone / run.latest[0]).write_text((both / run.latest[0]).read_text().replace(run.names[1], run.names[0]))
        return both, alone

    return made


def said_of_both(run: Run, command: str, pair: Any, endings: list[str]) -> None:
    both, alone = pair(run, 1)
    for ending in endings:
        said, expected = (outcome((COMMANDS | DIFF)[command], f"{folder}{ending}", folder) for folder in (both, alone))
        assert said == expected, ending


@pytest.mark.parametrize("command", [*COMMANDS, "diff"])
@pytest.mark.parametrize("layout", thinned(CHOOSING, 2))
def test_another_checkpoint_of_the_run_changes_nothing(layout, command, pair):
    run = LAYOUTS[layout]
    said_of_both(run, command, pair, ["", "@latest", f"@{run.names[1]}", f"@step={step_in(run.names[1])}"])


@pytest.mark.parametrize("layout", [name for name, run in LAYOUTS.items() if not run.latest[0]])
def test_runs_that_do_not_choose(layout, pair):
    run = LAYOUTS[layout]
    said_of_both(run, "convert", pair, ["@latest", f"@{run.names[1]}", f"@step={step_in(run.names[1])}"])


@pytest.mark.parametrize("layout", [name for name, run in LAYOUTS.items() if not run.latest[0]])
def test_a_run_that_does_not_choose_says_how_to_name_one(layout, pair):
    both, _ = pair(LAYOUTS[layout], 1)
    with pytest.raises(SeveralCheckpointsError, match=f"{both}@latest"):
        ckpt_tools.inspect(both)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("layout", TAGS)
def test_a_tag_is_the_same_beside_others(layout, command, pair):
    """Also the one that ``latest`` does not name."""
    run = LAYOUTS[layout]
    both, alone = pair(run, 0)
    said = outcome(COMMANDS[command], str(both), both, tag=run.names[0])
    assert said == outcome(COMMANDS[command], str(alone), alone)


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


def test_one_tag_needs_no_file_latest(tags):
    (tags / "latest").unlink()
    assert ckpt_tools.inspect(tags, tag="best").notes == ()
    shutil.rmtree(tags / "best")
    assert ckpt_tools.inspect(tags).notes == ()


def test_a_torn_tag_is_refused_alone(tags):
    next((tags / "best").glob("*optim_states.pt")).unlink()
    with pytest.raises(IncompleteError, match="best/"):
        ckpt_tools.inspect(tags, tag="best")
    assert ckpt_tools.inspect(tags).notes == ()


def test_latest_names_a_tag_that_is_not_there(tags):
    (tags / "latest").write_text("gone")
    with pytest.raises(IncompleteError, match="'gone', which does not exist; the tags are final, best"):
        ckpt_tools.inspect(tags)
    with pytest.raises(SourceNotFoundError, match="no tag 'gone'; it has final, best"):
        ckpt_tools.inspect(tags, tag="gone")


@pytest.fixture
def finished(tmp_path):
    """What the Trainer leaves: the last model, and checkpoints below it."""
    run = tmp_path / "run"
    LAYOUTS["hf-trainer"].lay(run)
    save_file({"w": torch.zeros(2)}, run / "model.safetensors")
    return run


def test_a_model_above_the_checkpoints_of_its_run_takes_nothing_from_them(finished):
    found = ckpt_tools.inspect(finished)
    assert (found.notes, found.step, found.num_parameters) == ((), None, 2)


def test_small_files_in_other_folders_are_not_those_of_the_model(finished):
    (finished / "best").mkdir()
    shutil.copy(finished / "checkpoint-2" / "scheduler.pt", finished / "best")
    assert [note.what for note in ckpt_tools.inspect(finished).notes] == ["best/scheduler.pt"]


def test_steps_in_two_formats_are_several_checkpoints(tmp_path):
    LAYOUTS["torchtitan"].lay(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-6")
    (tmp_path / "run" / "step-6").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "run" / "step-6" / "model.safetensors")
    with pytest.raises(
        SeveralCheckpointsError, match=r"\(step-6, step-3\); name the folder of one, or write .*@latest"
    ):
        ckpt_tools.inspect(tmp_path / "run")
