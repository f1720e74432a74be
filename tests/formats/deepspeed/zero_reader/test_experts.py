"""Runs with ``deepspeed.moe``: files that do not fit each other, and runs that go on elsewhere."""

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
from tests.support.damage import TAG, changed, copied_run, damage_test, save, swap, unlink, updated
from tests.support.ranks import for_ranks

EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
MODEL = "mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
EXPERT_OPTIM = "expp_rank_{}_mp_rank_00_optim_states.pt"
NAME = "first.deepspeed_moe.experts.deepspeed_experts.{}.{}"
NATIVE = "deepspeed-moe-zero2-fp32"
"""A run with ZeRO-2, the experts over 2 of 4 ranks."""


def other_mapping(content: Any) -> None:
    content["optimizer_state_dict"]["param_slice_mappings"][2][NAME.format(0, "up.weight")].start += 1


def other_rate(content: Any) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][2]["lr"] = 0.5


def other_counts(content: Any) -> None:
    content["optimizer_state_dict"]["partition_count"] = [2, 2, 4, 4]


def renamed(content: Any) -> None:
    for name in list(content):
        content[name.replace("experts.1.", "experts.3.")] = content.pop(name)


def more_buffers(name: str) -> Any:
    return changed(MODEL, lambda content: content["buffer_names"].append(name))


MISSING, WRONG, OTHER = IncompleteError, MalformedError, UnsupportedError
BIAS = NAME.format(1, "up.bias")
test_files_that_do_not_fit_are_an_error = damage_test(
    NATIVE,
    ("an expert of another part", save(EXPERT.format(0, 0).replace("_00", "_01"), {}), OTHER, "a tensor-parallel run"),
    ("an optimizer of one", save(EXPERT_OPTIM.format(0).replace("_00", "_01"), {}), OTHER, "a tensor-parallel run"),
    ("an expert is missing", unlink(EXPERT.format(0, 2)), MISSING, r"layer_0_expert_2.*is missing; layer 0 has 4"),
    ("the last expert is missing", unlink(EXPERT.format(0, 3)), MISSING, r"layer_0_expert_3.*is missing"),
    ("a layer is missing", unlink(EXPERT.format(1, "*")), MISSING, r"layer_1_expert_0.*is missing"),
    ("all experts are missing", unlink("layer_*"), MISSING, "no files of experts"),
    ("an expert too many", save(EXPERT.format(1, 2), {}), WRONG, "layer 1 has 2 experts; this file"),
    ("a layer too many", save(EXPERT.format(2, 0), {}), WRONG, "there are 2 layers"),
    ("two swapped", swap(EXPERT.format(0, 1), EXPERT.format(0, 2)), WRONG, "it was saved as layer_0_expert_2"),
    ("the content of another", changed(EXPERT.format(0, 1), renamed), WRONG, "the file of expert 1"),
    ("no bias", changed(EXPERT.format(0, 1), lambda c: c.pop(BIAS)), WRONG, r"its up\.bias is not as that of"),
    ("another shape", updated(EXPERT.format(0, 1), **{BIAS: torch.ones(6)}), WRONG, r"its up\.bias is not as that of"),
    ("an expert without tensors", save(EXPERT.format(1, 0), {}), WRONG, "does not hold one expert"),
    ("a rank is missing", unlink(OPTIM.format(3)), MISSING, "one of 4, is missing"),
    ("the model's file is missing", unlink(MODEL), MISSING, "this file of the"),
    ("a rank says another place", changed(OPTIM.format(1), other_mapping), WRONG, "param_slice_mappings do not"),
    ("ranks of other hyperparameters", changed(OPTIM.format(1), other_rate), WRONG, "its param groups are not"),
    ("groups in another order", changed(OPTIM.format(1), other_counts), OTHER, "PYTHONHASHSEED"),
    ("no numbers of experts", updated(MODEL, num_experts=4), OTHER, "its num_experts is 4"),
    ("no buffer of an expert", more_buffers(NAME.format(0, "other")), MISSING, "no file contains this buffer"),
    ("an expert of another rank", more_buffers(NAME.format(2, "table")), WRONG, r"rank 0 has the experts \[0, 1, 2\]"),
    ("an optimizer without ZeRO", save(EXPERT_OPTIM.format(0), {}), WRONG, "of a run without ZeRO"),
    ("a pipeline", save("layer_00-model_states.pt", {}), OTHER, "a pipeline with experts"),
)


def reverse(content: Any) -> None:
    """The order in which a rank without ZeRO has the second group, so that its numbers do not say the names."""
    own = content["optimizer"].get("optimizer_state_dict", content["optimizer"])
    own["param_groups"][1]["params"].reverse()
    if "fp32_groups" in content["optimizer"]:
        content["optimizer"]["fp32_groups"][1].reverse()


test_without_zero_every_rank_has_an_optimizer = damage_test(
    "deepspeed-moe-fp32",
    *((f"without {ranks}", unlink(*(EXPERT_OPTIM.format(rank) for rank in ranks)), MISSING,
        r"expp_rank_\d.*missing") for ranks in ((0,), (1,), (0, 1))),
)  # fmt: skip
test_without_zero_masters_that_are_not_proven_are_refused = pytest.mark.extended(
    damage_test(
        "deepspeed-moe-bf16",
        ("reversed", changed(EXPERT_OPTIM.format(1), reverse), OTHER, "fp32 masters lie under numbers.*ZeRO stage 1"),
    )
)
test_autoep_without_zero_every_rank_has_an_optimizer = pytest.mark.extended(
    damage_test(
        "deepspeed-autoep-bf16",
        ("the first", unlink(EXPERT_OPTIM.format(0)), MISSING, r"expp_rank_\d.*(missing|not all there)"),
        ("the second", unlink(EXPERT_OPTIM.format(1)), MISSING, r"expp_rank_\d.*(missing|not all there)"),
        ("both", unlink(EXPERT_OPTIM.format("*")), MISSING, r"expp_rank_\d.*(missing|not all there)"),
    )
)


def test_without_zero_numbers_that_are_not_proven_are_carried_for_each_rank(tmp_path):
    run = copied_run("deepspeed-moe-fp32", tmp_path)
    for rank in range(2):
        changed(EXPERT_OPTIM.format(rank), reverse)(run / TAG)
    manifest = contents(run)[0]
    assert manifest.extra["optimizer"].keys() == {"expp_rank_0", "expp_rank_1"}
    assert any("do not identify them" in note.why for note in manifest.notes)


@pytest.mark.extended
def test_autoep_without_zero_steps_of_experts_must_be_equal(tmp_path):
    def delay(content: Any) -> None:
        inner = content["optimizer"]["optimizer_state_dict"]
        (experts,) = (group["params"] for group in inner["param_groups"] if group.get("moe"))
        inner["state"][experts[1]]["step"] -= 1

    run = copied_run("deepspeed-autoep-bf16", tmp_path)
    changed(EXPERT_OPTIM.format(1), delay)(run / TAG)
    with pytest.raises(DifferenceError, match="expert-parallel ranks 0 and 1"):
        ckpt_tools.convert(run, tmp_path / "out", to="dcp")


def test_names_and_order_are_those_of_a_model_with_all_experts():
    manifest = contents(make(NATIVE).folder)[0]
    endings = ("wg.weight", "down.weight")
    names = [key.fqn for key in manifest.tensors if key.slot == "weight" and key.fqn.endswith(endings)]
    assert names == [
        "first.deepspeed_moe.gate.wg.weight",
        *(NAME.format(n, "down.weight") for n in range(4)),
        "second.deepspeed_moe.gate.wg.weight",
        *(f"second.deepspeed_moe.experts.deepspeed_experts.{n}.down.weight" for n in range(2)),
        "second.mlp.down.weight",
    ]
    assert manifest.groups[3].params == tuple(
        f"{layer}.deepspeed_moe.experts.deepspeed_experts.{n}.up.bias"
        for layer, count in (("first", 4), ("second", 2))
        for n in range(count)
    )
    assert manifest.world_size == 4


@pytest.mark.extended
def test_round_robin_gradients(tmp_path):
    """``param_slice_mappings`` are then in another order than the partitions, so that DeepSpeed's own truth is not
    one; in fp32 the masters are the weights."""
    more = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    deepspeed_moe.run_experts(tmp_path, 2, 2, "fp32", (2, 1), **more)
    manifest, found = contents(tmp_path)
    masters = [key for key in found if key.slot == MASTER]
    assert len(masters) == 29
    assert all(found[key] == found[StateKey(key.fqn)] for key in masters)
    first = ("embed.weight", "first.deepspeed_moe.gate.wg.weight", "second.deepspeed_moe.gate.wg.weight")
    assert manifest.groups[0].params[:3] == first


# Runs that go on


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return folder, *deepspeed_moe.run_experts(folder, 2, 1, "fp32", (2, 2))


def check(found: Any, saved: tuple[Path, State, list[float]], without: str = "") -> None:
    (resumed, losses), (_, state, next_losses) = found, saved
    wanted = {key: tensor for key, tensor in state.optimizer.items() if key[1] != without}
    assert {key for key in resumed.optimizer if key[1] != without} == wanted.keys()
    assert all(torch.equal(resumed.optimizer[key], tensor) for key, tensor in wanted.items())
    assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in state.weights.items())
    np.testing.assert_allclose(losses, next_losses, rtol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("to", ["zero2", "universal", pytest.param("zero3", marks=pytest.mark.soak)])
def test_the_run_goes_on_in_a_model_without_deepspeed_moe(to, saved, tmp_path):
    ckpt_tools.convert(saved[0], tmp_path / "out", to=to, **for_ranks(to, 3))
    arguments = (str(tmp_path / "out"), 3 if to == "zero3" else 2, "fp32", to == "universal")
    check(launch.pool(3).run(deepspeed_moe.load_plain, *arguments)[0], saved)


@pytest.mark.extended
def test_the_run_goes_on_in_plain_torch(saved, tmp_path):
    ckpt_tools.convert(saved[0], tmp_path / "out", to="dcp")
    check(launch.pool(3).run(deepspeed_moe.load_dcp, str(tmp_path / "out"))[0], saved, without=MASTER)


@pytest.mark.extended
def test_the_run_goes_on_with_all_experts_on_each_rank(saved, tmp_path):
    """Or DeepSpeed says that it cannot. Without the mark of an expert in the files it would give every rank the experts
    of rank 0, and say nothing."""
    out = str(tmp_path / "out")
    ckpt_tools.convert(saved[0], out, to="universal")
    check(launch.pool(3).run(deepspeed_moe.load_experts, out, 2, "fp32", (1, 1))[0], saved)
    told = launch.pool(2).run(deepspeed_moe.why_not_loaded, out, 2, "fp32", (2, 2))
    assert all("Expert param in" in text for text in told), told
