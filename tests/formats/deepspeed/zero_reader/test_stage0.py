"""Runs of DeepSpeed without ZeRO: resumed elsewhere, flat masters, and files that contradict themselves."""

from collections.abc import Callable
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.errors import MalformedError, UnsupportedError, UsageError
from fixtures import launch
from fixtures.corpus import deepspeed, make
from fixtures.truth import State
from tests.layouts.contents import contents, of_tensor
from tests.support.ranks import for_ranks
from tests.support.refusals import refusal_test
from tests.support.sweep import extended


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(dtype)`: what two ranks wrote, its truth, and the losses of the next steps."""

    @cache
    def get(dtype: str) -> tuple[Path, State, list[float]]:
        folder = tmp_path_factory.mktemp(dtype)
        arguments = (str(folder), "plain", deepspeed.config_of(0, dtype), dtype)
        return folder, *launch.pool(2).run(deepspeed.save_run, *arguments)[0]

    return get


@pytest.mark.parametrize(
    ("dtype", "to", "kind"),
    [
        ("fp32", "zero2", "zero2-fp32"),
        ("fp16", "zero3", "zero3-fp16"),
        *extended(("fp32", "dcp", "fsdp2"), ("bf16", "zero1", "zero1-bf16")),
        *extended(("bf16", "universal", "universal-zero2-bf16")),
    ],
)
def test_the_run_goes_on_elsewhere(dtype, to, kind, saved, resume, tmp_path):
    folder, state, losses = saved(dtype)
    ckpt_tools.convert(folder, tmp_path / "out", to=to, **for_ranks(to, 3))
    resumed = resume(kind, "plain", tmp_path / "out", 3)
    for (name, slot), tensor in state.optimizer.items():
        if to != "dcp" or slot != "master":
            assert resumed.tensors[name, slot].tobytes() == tensor.numpy().tobytes(), (name, slot)
    np.testing.assert_allclose(resumed.facts["losses"], losses, rtol=1e-5 if dtype == "fp32" else 1e-2)


def test_it_has_a_tag_and_no_world_size_to_change(tmp_path):
    run = make("deepspeed-stage0-bf16").folder
    assert ckpt_tools.inspect(run, tag="global_step4").format == "zero0"
    with pytest.raises(UsageError, match="no world size"):
        ckpt_tools.reshard(run, tmp_path / "out", world_size=3)
    path = run / "global_step4" / "mp_rank_00_model_states.pt"
    with pytest.raises(UnsupportedError, match=r"fp32 masters lie in its optimizer.*deepspeed"):
        ckpt_tools.inspect(path, from_="torch")
    assert ckpt_tools.inspect(path).format == "zero0"


def flat_file() -> tuple[dict[str, Any], State]:
    """A stand-in for FP16_Optimizer, which needs a GPU: weights are views into a storage for each group."""
    weights, slots, groups = {}, {}, [{"a.weight": (3, 2), "b.bias": (5,)}, {"c.weight": (2, 2)}]
    state: dict[int, Any] = {}
    masters = []
    for number, group in enumerate(groups):
        flat = torch.arange(sum(map(prod, group.values()))).float() + 100 * number
        half, moment, cursor = flat.bfloat16(), flat * 0.5, 0
        state[number] = {"step": torch.tensor(7.0), "exp_avg": moment}
        masters.append(flat)
        for name, shape in group.items():
            cut = slice(cursor, cursor + prod(shape))
            weights[name] = half[cut].view(shape)
            slots |= {(name, "master"): flat[cut].view(shape), (name, "exp_avg"): moment[cut].view(shape)}
            slots[name, "step"] = torch.tensor(7.0)
            cursor = cut.stop
    inner = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}, {"params": [1]}]}
    # Names in another order than the vectors: it is the storage that says where each lies.
    module = {name: weights[name] for name in ("b.bias", "c.weight", "a.weight")} | {"frozen": torch.ones(3)}
    optimizer = {"optimizer_state_dict": inner, "fp32_groups_flat": masters, "clip_grad": 0.0}
    content = {"module": module, "buffer_names": [], "optimizer": optimizer, "param_shapes": None, "lr_scheduler": None}
    sizes = {"global_steps": 7, "dp_world_size": 2, "mp_world_size": 1, "ds_version": "0.19.8"}
    return content | sizes, State(module, slots)


def save(content: Any, folder: Path) -> Path:
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    return folder / "mp_rank_00_model_states.pt"


def test_flat_masters_lie_where_the_weights_do(tmp_path):
    content, truth = flat_file()
    manifest, found = contents(save(content, tmp_path))
    wanted = {StateKey(name): of_tensor(tensor) for name, tensor in truth.weights.items()}
    wanted |= {StateKey(name, slot): of_tensor(tensor) for (name, slot), tensor in truth.optimizer.items()}
    assert found == wanted
    assert [group.params for group in manifest.groups] == [("a.weight", "b.bias"), ("c.weight",)]
    manifest, _ = contents(save(content | {"optimizer": None}, tmp_path))
    assert not manifest.groups and {key.fqn for key in manifest.tensors} == set(truth.weights)


def read(folder: Path, change: Callable[[Any, Any], object]) -> None:
    content, _ = flat_file()
    change(content["optimizer"], content["optimizer"]["optimizer_state_dict"])
    ckpt_tools.inspect(save(content, folder))


def same_storage(own: Any, inner: Any) -> None:
    own["fp32_groups_flat"][1], inner["state"][1] = own["fp32_groups_flat"][0], inner["state"][0]


def another_size(own: Any, inner: Any) -> None:
    own["fp32_groups_flat"][1] = torch.ones(9)


WRONG, OTHER = MalformedError, UnsupportedError
HARMS: list[tuple[str, Callable[[Any, Any], object], type[MalformedError | UnsupportedError], str]] = [
    ("two groups of one storage", same_storage, OTHER, "fp32 masters are flat"),
    ("no storage of that size", another_size, OTHER, "fp32 masters are flat"),
    ("fewer masters than groups", lambda own, _: own["fp32_groups_flat"].pop(), WRONG, "1 lists of masters"),
    ("masters that are no tensors", lambda own, _: own.update(fp32_groups_flat=[1, 2]), WRONG, "are not tensors"),
    ("an optimizer of somebody's own", lambda own, _: own.pop("fp32_groups_flat"), OTHER, "ZeRO stage 1"),
    ("no groups", lambda _, inner: inner.pop("param_groups"), WRONG, "param_groups"),
    ("state under names", lambda _, inner: inner.update(state={"a": {}}), WRONG, "by the number"),
    ("one in two groups", lambda _, inner: inner["param_groups"][1].update(params=[0]), WRONG, "twice"),
    ("a short moment", lambda _, inner: inner["state"][0].update(exp_avg=torch.ones(2)), OTHER, "not cut like its"),
    ("a slot called master", lambda _, inner: inner["state"][0].update(master=torch.ones(2)), OTHER, "reserved name"),
]
test_what_contradicts_itself_is_refused = refusal_test(
    *((name, partial(read, change=change), error, words) for name, change, error, words in HARMS)
)
