"""Pipelines whose layers tensor parallelism cuts too: files that do not fit each other, and a run that goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from fixtures import launch
from fixtures.corpus import deepspeed_pipeline_cut
from tests.support.damage import Damage, assert_is_named, changed, copied_run, swap, unlink

pytestmark = pytest.mark.extended

LAYER = "layer_{:02d}-model_{:02d}-model_states.pt"
MODEL = "mp_rank_{:02d}_model_states.pt"
OPTIM = "zero_pp_rank_0_mp_rank_{:02d}_optim_states.pt"


@pytest.fixture
def native(tmp_path):
    return copied_run("deepspeed-pipeline-tp-zero1-fp32", tmp_path)


def frozen(tag: Path) -> None:
    for part in range(2):
        torch.save({"weight": torch.ones(9, 6)}, tag / LAYER.format(2, part))


without_rules = changed(MODEL.format(0), lambda content: content.pop("universal_checkpoint_info"))


def fewer_parts(tag: Path) -> None:
    for layer in (0, 1, 3, 4):
        for number in (1, 2):
            content = torch.load(tag / LAYER.format(layer, 0), weights_only=False)
            torch.save(content, tag / LAYER.format(layer, number))


DAMAGED: dict[str, Damage] = {
    "a part of a layer": (unlink(LAYER.format(3, 1)), IncompleteError, r"layer_03-model_01\S+: this file of a layer"),
    "a layer": (unlink(LAYER.format(3, 0), LAYER.format(3, 1)), IncompleteError, r"3\.\S+: no file of a layer"),
    "the last rank": (unlink(MODEL.format(3), OPTIM.format(3)), IncompleteError, "mp_rank_03 is missing"),
    "an optimizer": (unlink(OPTIM.format(2)), IncompleteError, r"mp_rank_02\S+: .*optimizer's file of this stage"),
    "all parts of a rank": (
        unlink(*(LAYER.format(layer, 1) for layer in (0, 1, 3, 4))),
        MalformedError,
        "both have this layer",
    ),
    "the rules": (without_rules, UnsupportedError, "no universal_checkpoint_info"),
    "a frozen layer": (frozen, UnsupportedError, "it has only frozen parameters"),
    "more parts than ranks": (fewer_parts, MalformedError, "cut into 3 parts, and the 4 parts of the model"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_files_that_do_not_fit_are_an_error(name, native):
    assert_is_named(DAMAGED[name], native)


def test_parts_that_are_swapped_are_refused(native):
    swapped = swap(LAYER.format(1, 0), LAYER.format(1, 1))
    assert_is_named((swapped, MalformedError, "saved as layer_01-model_01"), native)


def test_the_run_goes_on_without_parallelism(tmp_path):
    state, losses = deepspeed_pipeline_cut.run_cut(tmp_path / "run", 1, "fp32")
    ckpt_tools.convert(tmp_path / "run", tmp_path / "out", to="zero2", world_size=3)
    resumed, next_losses = launch.pool(3).run(deepspeed_pipeline_cut.load_whole, str(tmp_path / "out"), 2, "fp32")[0]
    assert resumed.optimizer.keys() == state.optimizer.keys()
    for key, tensor in state.optimizer.items():
        assert torch.equal(resumed.optimizer[key], tensor), key
    for name, tensor in state.weights.items():
        assert torch.equal(resumed.weights[name], tensor), name
    np.testing.assert_allclose(next_losses, losses, rtol=1e-5)
