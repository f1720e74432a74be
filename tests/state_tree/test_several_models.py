"""A tree with several models or optimizers: one rule for all formats of trees. Two mappings with the same tensors: the
whole state asks which one the optimizer belongs to, weights alone do not."""

from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.errors import UnsupportedError, UsageError
from tests.support.every_verb import READING, USING, refusal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Tree = dict[str, Any]


def net(rows: int = 3, value: float | None = None) -> dict[str, torch.Tensor]:
    value = float(rows) if value is None else value
    return {"weight": torch.full((rows, 2), value), "bias": torch.full((rows,), value)}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def adamw(*, named: bool = False) -> Tree:
    state = trained()[1].state_dict()
    if named:
        names = ("weight", "bias")
        state["state"] = {names[number]: slots for number, slots in state["state"].items()}
        state["param_groups"][0]["params"] = list(names)
    return state


def saved(tree: Tree, folder: Path, kind: str = "torch") -> Path:
    if kind == "torch":
        torch.save(tree, folder / "in.pt")
        return folder / "in.pt"
    dcp.save(tree, checkpoint_id=str(folder / "in"), no_dist=True)
    return folder / "in"


def bias(path: Path) -> list[float]:
    return ckpt_tools.open(path)["bias"][...].tolist()  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Tree, str]] = {
    "a GAN": ({"gen": net(), "disc": net(4)}, "model_key='gen' or model_key='disc'"),
    "actor and critic": ({"actor": net(), "critic": net(), "epoch": 3}, "model_key='actor' or model_key='critic'"),
    "an optimizer by number": ({"gen": net(), "disc": net(), "optim": adamw()}, "model_key='gen' or model_key='disc'"),
    "two names of a model": ({"model": net(), "state_dict": net(4)}, "model_key='model' or model_key='state_dict'"),
    "below": ({"nets": {"gen": net(), "disc": net()}}, "model_key='nets.gen' or model_key='nets.disc'"),
    "of two trainers": ({"a": {"model": net()}, "b": {"model": net()}}, "model_key='a.model' or model_key='b.model'"),
    "optimizers": ({"model": net(), "opt_a": adamw(), "opt_b": adamw()}, "optim_key='opt_a' or optim_key='opt_b'"),
}

READ: dict[str, tuple[Tree, str]] = {
    "an average": ({"params": net(), "params_ema": net()}, "params"),
    "an average of a state dict": ({"ema_state_dict": net(), "model_state_dict": net()}, "model_state_dict"),
    "Lightning": ({"state_dict": net(), "hyper_parameters": {"table": torch.ones(9, 9)}}, "state_dict"),
    "a model by name": ({"disc": net(4), "model": net()}, "model"),
    "a model in parts": ({"model": {"encoder": net(), "decoder": net()}}, "model"),
    "integers": ({"net": net(), "rng": {"cpu": torch.arange(99, dtype=torch.uint8)}}, "net"),
}


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("case", REFUSED)
def test_every_verb_refuses_it_with_the_choices(case, kind, tmp_path):
    """Those that take weights alone need no choice of an optimizer."""
    tree, choices = REFUSED[case]
    verbs = {**READING, **USING}
    for name in ("plan, strict", "consolidate", "load_into") if case == "optimizers" else ():
        del verbs[name]
    code, sentence = refusal(saved(tree, tmp_path, kind), tmp_path / "out", verbs)
    assert code == 4 and "there are several" in sentence and sentence.endswith(f"choose one with {choices}")


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("case", READ)
def test_a_rule_says_which_is_the_model(case, kind, tmp_path):
    tree, model = READ[case]
    opened = ckpt_tools.open(saved(tree, tmp_path, kind))
    if case == "a model in parts":
        assert set(opened) == {f"{part}.{name}" for part in tree[model] for name in net()}
    else:
        assert set(opened) == {"weight", "bias"}
        assert opened["weight"][...].tolist() == net()["weight"].tolist()


@pytest.mark.parametrize("key", ["gen", "disc"])
def test_a_choice_is_read_and_the_other_is_told(key, tmp_path):
    source = saved({"gen": net(), "disc": net(4)}, tmp_path)
    report = ckpt_tools.convert(source, tmp_path / "out.safetensors", model_key=key)
    assert len(bias(tmp_path / "out.safetensors")) == (3 if key == "gen" else 4)
    (other,) = {"gen", "disc"} - {key}
    assert any(note.outcome is Outcome.DROPPED and note.what == other for note in report.plan.notes)
    ckpt_tools.convert(source, tmp_path / "whole", to="torch", state="all", model_key=key)
    assert set(torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)) == {key, other}


# Two mappings with the same tensors

UNKNOWN = [("model", "teacher"), ("state_dict", "current_model_state"), ("module", "target")]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("keys", UNKNOWN)
def test_the_whole_state_asks_and_weights_alone_are_those_of_the_usual_key(tmp_path, keys, named):
    usual, other = keys
    source = saved({usual: net(value=1.0), other: net(value=2.0), "optimizer": adamw(named=named)}, tmp_path)
    for action in (
        lambda: ckpt_tools.convert(source, tmp_path / "out", to="zero2"),
        lambda: ckpt_tools.convert(source, tmp_path / "out.pt", state="all"),
        lambda: ckpt_tools.load_into(*trained(), source),
    ):
        with pytest.raises(UnsupportedError, match=f"model_key='{usual}' or model_key='{other}'"):
            action()
    for key, value in zip(keys, (1.0, 2.0), strict=True):
        ckpt_tools.convert(source, tmp_path / f"{key}.pt", state="all", model_key=key)
        assert torch.load(tmp_path / f"{key}.pt", weights_only=True)[key]["bias"].unique().tolist() == [value]
    report = ckpt_tools.convert(source, tmp_path / "out.safetensors")
    assert bias(tmp_path / "out.safetensors") == [1.0] * 3
    assert any(other in note.why and "model_key" in note.why for note in report.notes)
    model, _ = trained()
    ckpt_tools.load_into(model, None, source)
    assert model.bias.tolist() == [1.0] * 3  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("named", [False, True])
def test_lightning_says_which_weights_were_trained(tmp_path, named):
    state = {"pytorch-lightning_version": "2.6.1", "optimizer_states": [adamw(named=named)]}
    state |= {"state_dict": net(value=2.0), "current_model_state": net(value=1.0)}
    state["averaging_state"] = {"n_averaged": torch.tensor(4)}
    torch.save(state, tmp_path / "source.ckpt")
    ckpt_tools.convert(tmp_path / "source.ckpt", tmp_path / "out.pt", state="all")
    whole = torch.load(tmp_path / "out.pt", weights_only=True)
    assert whole.keys() == state.keys()
    for key, value in (("current_model_state", 1.0), ("state_dict", 2.0)):
        assert whole[key]["bias"].unique().tolist() == [value]
    report = ckpt_tools.convert(tmp_path / "source.ckpt", tmp_path / "average.safetensors")
    assert bias(tmp_path / "average.safetensors") == [2.0] * 3
    assert any("current_model_state" in note.why for note in report.notes)
    for output in ("out.pt", "average.safetensors"):
        assert ckpt_tools.verify(tmp_path / "source.ckpt", tmp_path / output).equal


def test_a_model_is_joined_with_the_optimizer_in_another_file(tmp_path):
    model, optimizer = trained()
    run, apart = tmp_path / "run", tmp_path / "apart"
    for folder in (run, apart):
        folder.mkdir()
        torch.save(optimizer.state_dict(), folder / "adam.pt")
    torch.save(model.state_dict(), run / "net.pt")
    with pytest.raises(UnsupportedError, match=r"several files here .* goes with optimizer_file="):
        ckpt_tools.inspect(run)
    for source, file in ((run, run), (run / "net.pt", run), (run / "net.pt", apart)):
        other, fresh = trained()
        ckpt_tools.load_into(other, fresh, source, optimizer_file=file / "adam.pt")
        for slot in ("exp_avg", "exp_avg_sq"):
            pairs = zip(other.parameters(), model.parameters(), strict=True)
            assert all(torch.equal(fresh.state[a][slot], optimizer.state[b][slot]) for a, b in pairs)
    ckpt_tools.convert(run / "net.pt", tmp_path / "dcp", to="dcp", optimizer_file=apart / "adam.pt")
    assert ckpt_tools.verify(tmp_path / "dcp").equal
    assert ckpt_tools.inspect(tmp_path / "dcp").tensors_by_role["optimizer"] == 6
    whole = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    with pytest.raises(UsageError, match="optimizer_file= is for a model alone"):
        ckpt_tools.inspect(whole, optimizer_file=apart / "adam.pt")


@pytest.mark.parametrize("is_training", [True, False])
def test_weights_of_schedule_free_in_train_mode_get_a_note(tmp_path, is_training):
    model, _ = trained()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1)
    optimizer.train()
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    if not is_training:
        optimizer.eval()
    source = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    notes = ckpt_tools.convert(source, tmp_path / "w.safetensors").notes
    assert any(note.what == "weights of training" for note in notes) is is_training
