"""``load_into`` with a recipe: a live model of another layout, and its optimizer, go on as the one that was saved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import UsageError
from tests.support import moe


def test_a_model_of_another_layout_goes_on(tmp_path):
    fused, optimizer = moe.write(tmp_path)
    saved = moe.apart(fused.state_dict())
    model = moe.Apart()
    its = moe.adamw(model)
    ckpt_tools.load_into(model, its, tmp_path / "fused.pt", recipe=tmp_path / "moe.toml")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        state = {name: optimizer.state[each][slot] for name, each in fused.named_parameters()}
        wanted = dict.fromkeys(saved, state["gate.weight"]) if slot == "step" else moe.apart(state)
        assert all(torch.equal(its.state[each][slot], wanted[name]) for name, each in model.named_parameters())
    losses = moe.train(fused, optimizer, 3, seed=2)
    np.testing.assert_allclose(moe.train(model, its, 3, seed=2), losses, rtol=1e-5)


def test_the_way_back(tmp_path):
    fused, optimizer = moe.write(tmp_path)
    ckpt_tools.convert(tmp_path / "fused.pt", tmp_path / "dcp", to="dcp", world_size=2, recipe=tmp_path / "moe.toml")
    model = moe.Fused()
    its = moe.adamw(model)
    recipe = {"recipe": tmp_path / "moe.toml", "inverse": True, "config": tmp_path}
    ckpt_tools.load_into(model, its, tmp_path / "dcp", **recipe)  # type: ignore[arg-type]
    assert moe.train(model, its, 3, seed=2) == moe.train(fused, optimizer, 3, seed=2)


def test_a_model_of_the_wrong_side_is_refused(tmp_path):
    moe.write(tmp_path)
    model = moe.Fused()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"does not fit the model: not in the checkpoint: gate\.weight, experts"):
        ckpt_tools.load_into(model, None, tmp_path / "fused.pt", recipe=tmp_path / "moe.toml")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_config_is_for_a_recipe(tmp_path):
    moe.write(tmp_path)
    with pytest.raises(
        UsageError, match=r"config= is for the sizes of a recipe, with recipe=, and for dequantize=; no recipe"
    ):
        ckpt_tools.load_into(moe.Fused(), None, tmp_path / "fused.pt", config=tmp_path)
