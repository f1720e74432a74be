"""Two mappings with the same tensors: the whole state asks which one the optimizer belongs to, weights alone do not."""

from __future__ import annotations

from typing import Any

import pytest
import schedulefree
import torch
from torch import nn

import ckpt_tools
from ckpt_tools.errors import UnsupportedError, UsageError


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3, 4), value), "bias": torch.full((3,), value)}


def optimizer_state(*, named: bool) -> dict[str, Any]:
    state = trained()[1].state_dict()
    if named:
        names = ("weight", "bias")
        state["state"] = {names[number]: slots for number, slots in state["state"].items()}
        state["param_groups"][0]["params"] = list(names)
    return state


UNKNOWN = [("model", "teacher"), ("state_dict", "current_model_state"), ("module", "target")]
AVERAGES = [
    ("state_dict", "state_dict_ema"), ("model", "model_ema"), ("model", "ema_state_dict"), ("model", "swa_model"),
    ("model", "average_model_state"), ("net", "ema"), ("unet", "unet_ema"),
]  # fmt: skip


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("keys", UNKNOWN)
def test_the_whole_state_asks(tmp_path, keys, named):
    usual, other = keys
    state = {usual: weights(1.0), other: weights(2.0), "optimizer": optimizer_state(named=named)}
    torch.save(state, tmp_path / "source.pt")
    for action in (
        lambda: ckpt_tools.convert(tmp_path / "source.pt", tmp_path / "out", to="zero2"),
        lambda: ckpt_tools.convert(tmp_path / "source.pt", tmp_path / "out.pt", state="all"),
        lambda: ckpt_tools.load_into(*trained(), tmp_path / "source.pt"),
    ):
        with pytest.raises(UnsupportedError, match=f"model_key='{usual}' or model_key='{other}'"):
            action()
    for key, value in zip(keys, (1.0, 2.0), strict=True):
        ckpt_tools.convert(tmp_path / "source.pt", tmp_path / f"{key}.pt", state="all", model_key=key)
        assert torch.load(tmp_path / f"{key}.pt", weights_only=True)[key]["bias"].unique().tolist() == [value]


@pytest.mark.parametrize("keys", UNKNOWN)
def test_weights_alone_are_those_of_the_usual_key_with_a_note(tmp_path, keys):
    usual, other = keys
    torch.save({usual: weights(1.0), other: weights(2.0), "optimizer": optimizer_state(named=False)}, tmp_path / "s.pt")
    report = ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "out.safetensors")
    assert ckpt_tools.open(tmp_path / "out.safetensors")["bias"][...].tolist() == [1.0] * 3
    assert any(other in note.why and "model_key" in note.why for note in report.notes)
    model, _ = trained()
    ckpt_tools.load_into(model, None, tmp_path / "s.pt")
    assert model.bias.tolist() == [1.0] * 3  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("keys", AVERAGES)
def test_a_mapping_called_an_average_is_never_the_trained_one(tmp_path, keys, named):
    usual, average = keys
    state = {average: weights(2.0), usual: weights(1.0), "optimizer": optimizer_state(named=named)}
    torch.save(state, tmp_path / "source.pt")
    ckpt_tools.convert(tmp_path / "source.pt", tmp_path / "out.pt", state="all")
    out, source = (torch.load(tmp_path / name, weights_only=True) for name in ("out.pt", "source.pt"))
    assert out.keys() == source.keys()
    assert out[usual]["bias"].unique().tolist() == [1.0]


@pytest.mark.parametrize("named", [False, True])
def test_lightning_says_which_weights_were_trained(tmp_path, named):
    state = {
        "pytorch-lightning_version": "2.6.1",
        "state_dict": weights(2.0),
        "current_model_state": weights(1.0),
        "averaging_state": {"n_averaged": torch.tensor(4)},
        "optimizer_states": [optimizer_state(named=named)],
    }
    torch.save(state, tmp_path / "source.ckpt")
    ckpt_tools.convert(tmp_path / "source.ckpt", tmp_path / "out.pt", state="all")
    whole = torch.load(tmp_path / "out.pt", weights_only=True)
    assert whole.keys() == state.keys()
    assert whole["current_model_state"]["bias"].unique().tolist() == [1.0]
    assert whole["state_dict"]["bias"].unique().tolist() == [2.0]
    report = ckpt_tools.convert(tmp_path / "source.ckpt", tmp_path / "average.safetensors")
    assert ckpt_tools.open(tmp_path / "average.safetensors")["bias"][...].tolist() == [2.0] * 3
    assert any("current_model_state" in note.why for note in report.notes)
    for output in ("out.pt", "average.safetensors"):
        assert ckpt_tools.verify(tmp_path / "source.ckpt", tmp_path / output).equal


@pytest.mark.parametrize("state", [None, "model"])
def test_weights_alone_need_no_choice_of_an_optimizer(tmp_path, state):
    tree = {
        "generator": weights(1.0),
        "critic": weights(2.0),
        "generator_ema": weights(3.0),
        "generator_optimizer": optimizer_state(named=False),
        "critic_optimizer": optimizer_state(named=False),
    }
    torch.save(tree, tmp_path / "source.pt")
    ckpt_tools.convert(tmp_path / "source.pt", tmp_path / "w.safetensors", model_key="generator_ema", state=state)
    assert ckpt_tools.open(tmp_path / "w.safetensors")["bias"][...].tolist() == [3.0] * 3
    model, optimizer = trained()
    ckpt_tools.load_into(model, None, tmp_path / "source.pt", model_key="critic")
    assert model.bias.tolist() == [2.0] * 3  # type: ignore[union-attr, operator]
    with pytest.raises(UnsupportedError, match="several optimizers"):
        ckpt_tools.load_into(model, optimizer, tmp_path / "source.pt", model_key="critic")


def test_a_model_is_joined_with_the_optimizer_in_another_file(tmp_path):
    model, optimizer = trained()
    apart = tmp_path / "apart"
    for folder in (tmp_path / "run", apart):
        folder.mkdir()
    torch.save(model.state_dict(), tmp_path / "run" / "net.pt")
    torch.save(optimizer.state_dict(), tmp_path / "run" / "adam.pt")
    torch.save(optimizer.state_dict(), apart / "adam.pt")
    with pytest.raises(UnsupportedError, match=r"several files here .* goes with optimizer_file="):
        ckpt_tools.inspect(tmp_path / "run")
    for source, file in (
        (tmp_path / "run", tmp_path / "run" / "adam.pt"),
        (tmp_path / "run" / "net.pt", tmp_path / "run" / "adam.pt"),
        (tmp_path / "run" / "net.pt", apart / "adam.pt"),
    ):
        other, fresh = trained()
        ckpt_tools.load_into(other, fresh, source, optimizer_file=file)
        for slot in ("exp_avg", "exp_avg_sq"):
            assert all(
                torch.equal(fresh.state[a][slot], optimizer.state[b][slot])
                for a, b in zip(other.parameters(), model.parameters(), strict=True)
            )
    ckpt_tools.convert(tmp_path / "run" / "net.pt", tmp_path / "dcp", to="dcp", optimizer_file=apart / "adam.pt")
    assert ckpt_tools.verify(tmp_path / "dcp").equal
    assert ckpt_tools.inspect(tmp_path / "dcp").tensors_by_role["optimizer"] == 6
    whole = tmp_path / "whole.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, whole)
    with pytest.raises(UsageError, match="optimizer_file= is for a model alone"):
        ckpt_tools.inspect(whole, optimizer_file=apart / "adam.pt")


def test_the_note_on_bias_correction_is_for_adam(tmp_path):
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "adam.pt")
    other = optimizer.state_dict()
    other["state"] = {n: {**slots, "exp_avg_diff": slots["exp_avg"]} for n, slots in other["state"].items()}
    torch.save({"model": model.state_dict(), "optimizer": other}, tmp_path / "adan.pt")
    noted = {
        name: any(
            "bias_correction" in note.what
            for note in ckpt_tools.plan(tmp_path / f"{name}.pt", tmp_path / "z", to="zero2").notes
        )
        for name in ("adam", "adan")
    }
    assert noted == {"adam": True, "adan": False}


@pytest.mark.parametrize("is_training", [True, False])
def test_weights_of_schedule_free_in_train_mode_get_a_note(tmp_path, is_training):
    model, _ = trained()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1)
    optimizer.train()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if not is_training:
        optimizer.eval()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "free.pt")
    notes = ckpt_tools.convert(tmp_path / "free.pt", tmp_path / "w.safetensors").notes
    assert any(note.what == "weights of training" for note in notes) is is_training
