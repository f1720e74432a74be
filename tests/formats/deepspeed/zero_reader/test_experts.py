"""Runs with ``deepspeed.moe``: files that do not fit each other, and runs that go on elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import MASTER, StateKey
from ckpt_tools.errors import DifferenceError, IncompleteError, MalformedError, UnsupportedError
from fixtures import launch
from fixtures.corpus import deepspeed_moe, make
from fixtures.truth import State
from tests.layouts.contents import contents
from tests.support.damage import Damage, assert_is_named, changed, copied_run, save, swap, unlink

EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
MODEL = "mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
NAME = "first.deepspeed_moe.experts.deepspeed_experts.{}.{}"


@pytest.fixture
def native(tmp_path):
    """A copy of a run with ZeRO-2, the experts over 2 of 4 ranks."""
    return copied_run("deepspeed-moe-zero2-fp32", tmp_path)


@pytest.fixture
def without_zero(tmp_path):
    return copied_run("deepspeed-moe-fp32", tmp_path)


def other_mapping(content: Any) -> None:
    content["optimizer_state_dict"]["param_slice_mappings"][2][NAME.format(0, "up.weight")].start += 1


def other_rate(content: Any) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][2]["lr"] = 0.5


def other_counts(content: Any) -> None:
    content["optimizer_state_dict"]["partition_count"] = [2, 2, 4, 4]


def renamed(content: Any) -> None:
    for name in list(content):
        content[name.replace("experts.1.", "experts.3.")] = content.pop(name)


DAMAGED: dict[str, Damage] = {
    "an expert is missing": (
        unlink(EXPERT.format(0, 2)),
        IncompleteError,
        r"layer_0_expert_2.*is missing; layer 0 has 4",
    ),
    "the last expert is missing": (unlink(EXPERT.format(0, 3)), IncompleteError, r"layer_0_expert_3.*is missing"),
    "a layer is missing": (unlink(EXPERT.format(1, "*")), IncompleteError, r"layer_1_expert_0.*is missing"),
    "all experts are missing": (unlink("layer_*"), IncompleteError, "no files of experts"),
    "an expert too many": (save(EXPERT.format(1, 2), {}), MalformedError, "layer 1 has 2 experts; this file"),
    "a layer too many": (save(EXPERT.format(2, 0), {}), MalformedError, "there are 2 layers"),
    "two experts are swapped": (
        swap(EXPERT.format(0, 1), EXPERT.format(0, 2)),
        MalformedError,
        "it was saved as layer_0_expert_2",
    ),
    "the content of another expert": (changed(EXPERT.format(0, 1), renamed), MalformedError, "the file of expert 1"),
    "a tensor of an expert is missing": (
        changed(EXPERT.format(0, 1), lambda c: c.pop(NAME.format(1, "up.bias"))),
        MalformedError,
        r"its up\.bias is not as that of",
    ),
    "a tensor of another shape": (
        changed(EXPERT.format(0, 1), lambda c: c.update({NAME.format(1, "up.bias"): torch.ones(6)})),
        MalformedError,
        r"its up\.bias is not as that of",
    ),
    "an expert without tensors": (save(EXPERT.format(1, 0), {}), MalformedError, "does not hold one expert"),
    "a rank is missing": (unlink(OPTIM.format(3)), IncompleteError, "one of 4, is missing"),
    "the model's file is missing": (unlink(MODEL), IncompleteError, "this file of the"),
    "a rank says another place": (
        changed(OPTIM.format(1), other_mapping),
        MalformedError,
        "param_slice_mappings do not",
    ),
    "ranks of other hyperparameters": (
        changed(OPTIM.format(1), other_rate),
        MalformedError,
        "its param groups are not",
    ),
    "groups in another order": (changed(OPTIM.format(1), other_counts), UnsupportedError, "PYTHONHASHSEED"),
    "no numbers of experts": (
        changed(MODEL, lambda content: content.update(num_experts=4)),
        UnsupportedError,
        "its num_experts is 4",
    ),
    "no buffer of an expert": (
        changed(MODEL, lambda content: content["buffer_names"].append(NAME.format(0, "other"))),
        IncompleteError,
        "no file contains this buffer",
    ),
    "more experts than the rank has": (
        changed(MODEL, lambda content: content["buffer_names"].append(NAME.format(2, "table"))),
        MalformedError,
        r"rank 0 has the experts \[0, 1, 2\] of 4",
    ),
    "an optimizer of a run without ZeRO": (
        save("expp_rank_0_mp_rank_00_optim_states.pt", {}),
        MalformedError,
        "of a run without ZeRO",
    ),
    "a pipeline": (save("layer_00-model_states.pt", {}), UnsupportedError, "a pipeline with experts"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_files_that_do_not_fit_are_an_error(name, native):
    assert_is_named(DAMAGED[name], native)


EXPERT_OPTIM = "expp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("missing", [(0,), (1,), (0, 1)])
def test_without_zero_every_rank_has_an_optimizer(missing, without_zero):
    for rank in missing:
        (without_zero / "global_step4" / EXPERT_OPTIM.format(rank)).unlink()
    with pytest.raises(IncompleteError, match=r"expp_rank_\d.*missing"):
        contents(without_zero)


def test_without_zero_numbers_that_are_not_proven_are_carried_for_each_rank(without_zero):
    def reverse(content: Any) -> None:
        content["optimizer"]["param_groups"][1]["params"].reverse()

    for rank in range(2):
        changed(EXPERT_OPTIM.format(rank), reverse)(without_zero / "global_step4")
    manifest = contents(without_zero)[0]
    assert manifest.extra["optimizer"].keys() == {"expp_rank_0", "expp_rank_1"}
    assert any("do not identify them" in note.why for note in manifest.notes)


def test_without_zero_masters_that_are_not_proven_are_refused(tmp_path):
    native = copied_run("deepspeed-moe-bf16", tmp_path)

    def reverse(content: Any) -> None:
        content["optimizer"]["optimizer_state_dict"]["param_groups"][1]["params"].reverse()
        content["optimizer"]["fp32_groups"][1].reverse()

    changed(EXPERT_OPTIM.format(1), reverse)(native / "global_step4")
    with pytest.raises(UnsupportedError, match=r"its fp32 masters lie under numbers.*save it with ZeRO stage 1"):
        contents(native)


@pytest.mark.parametrize("missing", [(0,), (1,), (0, 1)])
def test_autoep_without_zero_every_rank_has_an_optimizer(missing, tmp_path):
    native = copied_run("deepspeed-autoep-bf16", tmp_path)
    for rank in missing:
        (native / "global_step4" / EXPERT_OPTIM.format(rank)).unlink()
    with pytest.raises(IncompleteError, match=r"expp_rank_\d.*(missing|not all there)"):
        contents(native)


def test_autoep_without_zero_steps_of_experts_must_be_equal(tmp_path):
    native = copied_run("deepspeed-autoep-bf16", tmp_path)

    def delay(content: Any) -> None:
        inner = content["optimizer"]["optimizer_state_dict"]
        (experts,) = (group["params"] for group in inner["param_groups"] if group.get("moe"))
        inner["state"][experts[1]]["step"] -= 1

    changed(EXPERT_OPTIM.format(1), delay)(native / "global_step4")
    with pytest.raises(DifferenceError, match="expert-parallel ranks 0 and 1"):
        ckpt_tools.convert(native, tmp_path / "out", to="dcp")


def test_names_and_order_are_those_of_a_model_with_all_experts(native):
    manifest = contents(native)[0]
    names = [key.fqn for key in manifest.tensors if key.slot == "weight" and key.fqn.endswith("down.weight")]
    assert names == [NAME.format(n, "down.weight") for n in range(4)] + [
        *(f"second.deepspeed_moe.experts.deepspeed_experts.{n}.down.weight" for n in range(2)),
        "second.mlp.down.weight",
    ]
    assert manifest.groups[3].params == tuple(
        f"{layer}.deepspeed_moe.experts.deepspeed_experts.{n}.up.bias"
        for layer, count in (("first", 4), ("second", 2))
        for n in range(count)
    )
    assert manifest.world_size == 4


def test_round_robin_gradients(tmp_path):
    """``param_slice_mappings`` are then in another order than the partitions, so that DeepSpeed's own truth is not
    one; in fp32 the masters are the weights."""
    more = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    deepspeed_moe.run_experts(tmp_path, 2, 2, "fp32", (2, 1), **more)
    manifest, found = contents(tmp_path)
    masters = [key for key in found if key.slot == MASTER]
    assert len(masters) == 29
    assert all(found[key] == found[StateKey(key.fqn)] for key in masters)
    assert manifest.groups[0].params[:3] == (
        "embed.weight",
        "first.deepspeed_moe.gate.wg.weight",
        "second.deepspeed_moe.gate.wg.weight",
    )


# Runs that go on

Saved = tuple[Path, State, list[float]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return folder, *deepspeed_moe.run_experts(folder, 2, 1, "fp32", (2, 2))


def check(found: Any, saved: Saved, without: tuple[str, ...] = ()) -> None:
    (resumed, losses), (_, state, next_losses) = found, saved
    wanted = {key: tensor for key, tensor in state.optimizer.items() if key[1] not in without}
    assert {key for key in resumed.optimizer if key[1] not in without} == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(resumed.optimizer[key], tensor), key
    for name, tensor in state.weights.items():
        assert torch.equal(resumed.weights[name], tensor), name
    np.testing.assert_allclose(losses, next_losses, rtol=1e-5)


@pytest.mark.parametrize("to", ["zero2", "zero3", "universal"])
def test_the_run_goes_on_in_a_model_without_deepspeed_moe(to, saved, tmp_path):
    options: dict[str, Any] = {} if to == "universal" else {"world_size": 3}
    ckpt_tools.convert(saved[0], tmp_path / "out", to=to, **options)  # type: ignore[arg-type]
    stage = 2 if to == "universal" else int(to[-1])
    arguments = (str(tmp_path / "out"), stage, "fp32", to == "universal")
    check(launch.pool(3).run(deepspeed_moe.load_plain, *arguments)[0], saved)


def test_the_run_goes_on_in_plain_torch(saved, tmp_path):
    ckpt_tools.convert(saved[0], tmp_path / "out", to="dcp")
    check(launch.pool(3).run(deepspeed_moe.load_dcp, str(tmp_path / "out"))[0], saved, without=(MASTER,))


def test_the_run_goes_on_with_all_experts_on_each_rank(saved, tmp_path):
    ckpt_tools.convert(saved[0], tmp_path / "out", to="universal")
    check(launch.pool(3).run(deepspeed_moe.load_experts, str(tmp_path / "out"), 2, "fp32", (1, 1))[0], saved)


def test_deepspeed_does_not_give_every_rank_the_experts_of_rank_0(saved, tmp_path):
    """Without the mark of an expert in the files of a universal checkpoint it does, and says nothing."""
    ckpt_tools.convert(saved[0], tmp_path / "out", to="universal")
    told = launch.pool(2).run(deepspeed_moe.why_not_loaded, str(tmp_path / "out"), 2, "fp32", (2, 2))
    assert all("Expert param in" in text for text in told), told


@pytest.mark.parametrize("to", ["dcp", "universal", "zero1", "safetensors"])
def test_other_formats_hold_the_same(to, tmp_path):
    source = make("deepspeed-moe-zero1-bf16").source
    ckpt_tools.convert(source, tmp_path / "out", to=to)  # type: ignore[arg-type]
    report = ckpt_tools.verify(source, tmp_path / "out")
    assert report.equal, report.differences
