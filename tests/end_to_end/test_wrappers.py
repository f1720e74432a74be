"""Wrappers in names, in any order and as often as there are, are taken off weights and optimizer state."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools.core.names import map_to_bare_names, may_have_wrappers, zero_numbers
from ckpt_tools.errors import IncompleteError, UsageError

PARTS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "model0")


def test_wrappers_in_any_order():
    for count in range(len(PARTS) + 1):
        for order in permutations(PARTS, count):
            for repeated in (order, order * 2):
                front = "".join(f"{part}." for part in repeated)
                names = {f"{front}0.weight": "0.weight", f"{front}0._orig_mod.module.bias": "0.module.bias"}
                assert map_to_bare_names(names) == names


@pytest.mark.parametrize("names", [["a.b", "module.c"], ["a._orig_mod.b"], ["model0.a"], ["a", "a._forward_module"]])
def test_names_that_may_have_wrappers(names):
    assert may_have_wrappers(names)
    assert not may_have_wrappers(["a.module.b", "model.a", "my_module.0.model0.b"])


def test_numbers_are_whole_parts():
    assert zero_numbers("12.layers.3.w4.5x.06.\u0663") == "0.layers.0.w4.5x.0.0"


STATE: dict[str, Any] = {}


def trained() -> tuple[dict[str, Any], dict[str, Any]]:
    """A model with its optimizer's state by name."""
    if not STATE:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.named_parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        STATE.update(model=model.state_dict(), optimizer=optimizer.state_dict())
    return STATE["model"], STATE["optimizer"]


def by_name(prefix: str) -> dict[str, Any]:
    model, optimizer = trained()
    names = [f"{prefix}{name}" for name in model]
    (group,) = optimizer["param_groups"]
    options = {name: value for name, value in group.items() if name != "param_names"}
    return {
        "state": {names[number]: state for number, state in optimizer["state"].items()},
        "param_groups": [{**options, "params": names}],
    }


def check(made: Path) -> None:
    """torch reads the bare names, and the same bits."""
    model, optimizer = trained()
    found = torch.load(made, weights_only=True)
    assert list(found["model"]) == list(model) and all(torch.equal(found["model"][name], model[name]) for name in model)
    (group,) = found["optimizer"]["param_groups"]
    assert group["params"] == list(model)
    for number, name in enumerate(model):
        for slot, tensor in optimizer["state"][number].items():
            assert torch.equal(found["optimizer"]["state"][name][slot], tensor), (name, slot)


FRONTS = ("", "module.", "_orig_mod.module.", "_checkpoint_wrapped_module.module._orig_mod.")


@pytest.mark.parametrize("front", FRONTS)
def test_the_whole_state_and_weights_alone(front, tmp_path):
    """The optimizer has the names of the model, or those of the same model in other wrappers."""
    model, _ = trained()
    wrapped = {f"{front}{name}": tensor for name, tensor in model.items()}
    for other in (front, "", "module."):
        torch.save({"model": wrapped, "optimizer": by_name(other)}, tmp_path / "whole.pt")
        made = {"state": "all", "strip": "auto", "overwrite": True}
        ckpt_tools.convert(tmp_path / "whole.pt", tmp_path / "bare.pt", **made)
        check(tmp_path / "bare.pt")
    ckpt_tools.convert(tmp_path / "whole.pt", tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == model.keys() and all(torch.equal(found[name], model[name]) for name in model)


@pytest.mark.parametrize("front", FRONTS)
def test_names_that_the_optimizer_says_by_number(front, tmp_path):
    """``param_names`` are those of the module that the optimizer was made with."""
    model, optimizer = trained()
    torch.save({"model": {f"{front}{name}": model[name] for name in model}, "optimizer": optimizer}, tmp_path / "a.pt")
    ckpt_tools.convert(tmp_path / "a.pt", tmp_path / "b.pt", state="all", strip="auto")
    found = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]
    assert found["state"].keys() == optimizer["state"].keys()
    assert found["param_groups"][0]["param_names"] == list(model)


def test_other_names_are_not_taken_for_each_other(tmp_path):
    """Without the option names stay as they are; two weights never become one."""
    model, _ = trained()
    torch.save({"model": model, "optimizer": by_name("module.")}, tmp_path / "a.pt")
    with pytest.raises(IncompleteError, match=r"no such weight; .*strip='auto'"):
        ckpt_tools.convert(tmp_path / "a.pt", tmp_path / "zero", to="zero1")
    torch.save({"model": {**model, "_orig_mod.0.bias": model["0.bias"]}}, tmp_path / "b.pt")
    with pytest.raises(UsageError, match="names must stay distinct"):
        ckpt_tools.convert(tmp_path / "b.pt", tmp_path / "b.safetensors")
