"""The step of a checkpoint that says none is that of its folder's name: in ``ls``, ``inspect``, and DeepSpeed's tag."""

from __future__ import annotations

import shutil

import orbax.checkpoint as ocp
import pytest
import torch

import ckpt_tools
from fixtures.corpus import make

NAMES = {
    "step_3": 3, "checkpoint-500": 500, "global_step7": 7, "iter_0000010": 10, "epoch=1-step=242": 242, "12": 12,
    "epoch_4": None, "llama-3-8b": None, "model": None,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_folder(name, tmp_path):
    run, step = tmp_path / "run", NAMES[name]
    (run / name).mkdir(parents=True)
    state = {"model": {"a.weight": torch.ones(2, 3)}, "note": "mine"}
    torch.save(state, run / name / "state.pt")
    assert ckpt_tools.inspect(run / name).step == ckpt_tools.open(run / name).step == step
    if step is not None and name != "12":
        assert [each.step for each in ckpt_tools.ls(run).checkpoints] == [step]
    ckpt_tools.convert(run / name, tmp_path / "zero", to="zero2")
    assert (tmp_path / "zero" / "latest").read_text() == f"global_step{step or 0}"
    assert ckpt_tools.inspect(tmp_path / "zero").step == (step or 0)
    assert ckpt_tools.verify(run / name, tmp_path / "zero").equal
    shutil.copytree(run / name, tmp_path / "step_99")
    assert ckpt_tools.verify(run / name, tmp_path / "step_99").equal, "a name is no content"
    assert ckpt_tools.diff(run / name, tmp_path / "step_99").equal


def test_a_file_and_what_it_says_itself(tmp_path):
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "model_step_8.pt")
    assert ckpt_tools.inspect(tmp_path / "model_step_8.pt").step == 8
    torch.save({"model": {"a.weight": torch.ones(2)}, "global_step": 5}, tmp_path / "model_step_8.pt")
    assert ckpt_tools.inspect(tmp_path / "model_step_8.pt").step == 5


def test_other_checkpoints_below_do_not_count(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(make("hf-pretrained-sharded").source, run)
    shutil.copytree(run, run / "checkpoint-5")
    assert ckpt_tools.inspect(run).step is None


def test_a_step_of_orbax_without_metadata_at_the_top(tmp_path):
    """As versions before that file wrote it: the name tells Orbax that the step is finished."""
    shutil.copytree(make("orbax-manager").folder / "run", tmp_path / "run")
    step = tmp_path / "run" / "5"
    (step / "_CHECKPOINT_METADATA").unlink()
    assert ocp.path.step.is_checkpoint_finalized(step)
    found = {each.step: each.problem for each in ckpt_tools.ls(tmp_path / "run").checkpoints}
    assert found[5] is None and ckpt_tools.inspect(step).step == 5
