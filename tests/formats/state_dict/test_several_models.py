"""A tree with several models or several optimizers: one rule for all formats of trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from tests.support.every_verb import READING, USING, refusal

Tree = dict[str, Any]


def net(rows: int = 3) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((rows, 2), float(rows)), "bias": torch.ones(rows)}


def adamw(rows: int = 3) -> Tree:
    model = torch.nn.Linear(2, rows)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def saved(tree: Tree, kind: str, folder: Path) -> Path:
    if kind == "torch":
        torch.save(tree, folder / "in.pt")
        return folder / "in.pt"
    dcp.save(tree, checkpoint_id=str(folder / "in"), no_dist=True)
    return folder / "in"


REFUSED: dict[str, tuple[Tree, str]] = {
    "a GAN": ({"gen": net(), "disc": net(4)}, "model_key='gen' or model_key='disc'"),
    "actor and critic": ({"actor": net(), "critic": net(), "epoch": 3}, "model_key='actor' or model_key='critic'"),
    "an optimizer by number": ({"gen": net(), "disc": net(), "optim": adamw()}, "model_key='gen' or model_key='disc'"),
    "two names of a model": ({"model": net(), "state_dict": net(4)}, "model_key='model' or model_key='state_dict'"),
    "below": ({"nets": {"gen": net(), "disc": net()}}, "model_key='nets.gen' or model_key='nets.disc'"),
    "of two trainers": ({"a": {"model": net()}, "b": {"model": net()}}, "model_key='a.model' or model_key='b.model'"),
    "optimizers": ({"model": net(), "opt_a": adamw(), "opt_b": adamw()}, "optim_key='opt_a' or optim_key='opt_b'"),
}

OF_WEIGHTS_ALONE = ("plan, strict", "consolidate", "load_into")
"""Verbs that need no optimizer, so that none has to be chosen."""

READ: dict[str, tuple[Tree, str]] = {
    "an average": ({"params": net(), "params_ema": net()}, "params"),
    "an average of a state dict": ({"ema_state_dict": net(), "model_state_dict": net()}, "model_state_dict"),
    "timm": ({"state_dict_ema": net(), "state_dict": net(), "optimizer": adamw()}, "state_dict"),
    "Lightning": ({"state_dict": net(), "hyper_parameters": {"table": torch.ones(9, 9)}}, "state_dict"),
    "a model by name": ({"disc": net(4), "model": net()}, "model"),
    "a model in parts": ({"model": {"encoder": net(), "decoder": net()}}, "model"),
    "single numbers": ({"net": net(), "losses": {"gen": torch.tensor(0.5), "disc": torch.ones(1)}}, "net"),
    "integers": ({"net": net(), "rng": {"cpu": torch.arange(99, dtype=torch.uint8)}}, "net"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("case", REFUSED)
def test_every_verb_refuses_it_with_the_choices(case, kind, tmp_path):
    tree, choices = REFUSED[case]
    verbs = {**READING, **USING}
    for name in OF_WEIGHTS_ALONE if case == "optimizers" else ():
        del verbs[name]
    code, sentence = refusal(saved(tree, kind, tmp_path), tmp_path / "out", verbs)
    assert code == 4 and "there are several" in sentence and sentence.endswith(f"choose one with {choices}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("case", READ)
def test_a_rule_says_which_is_the_model(case, kind, tmp_path):
    tree, model = READ[case]
    source = saved(tree, kind, tmp_path)
    weights = net() if isinstance(tree[model], dict) and "weight" in tree[model] else None
    opened = ckpt_tools.open(source)
    assert set(opened) == ({"weight", "bias"} if weights else {f"{a}.{b}" for a in tree[model] for b in net()})
    if weights:
        assert opened["weight"][...].tolist() == weights["weight"].tolist()


@pytest.mark.parametrize("key", ["gen", "disc"])
def test_a_choice_is_read_and_the_other_is_told(key, tmp_path):
    source = saved({"gen": net(), "disc": net(4)}, "torch", tmp_path)
    report = ckpt_tools.convert(source, tmp_path / "out.safetensors", model_key=key)
    assert ckpt_tools.open(tmp_path / "out.safetensors")["weight"].shape == ((3, 2) if key == "gen" else (4, 2))
    (other,) = {"gen", "disc"} - {key}
    assert any(note.outcome is Outcome.DROPPED and note.what == other for note in report.plan.notes)
    ckpt_tools.convert(source, tmp_path / "whole", to="torch", state="all", model_key=key)
    found = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)
    assert set(found) == {key, other}


@pytest.mark.filterwarnings("ignore")
def test_a_tree_that_was_kept_is_verified_by_the_same_key(tmp_path):
    source = saved({"gen": net(), "disc": net(4)}, "dcp", tmp_path)
    ckpt_tools.reshard(source, tmp_path / "out", world_size=2, model_key="disc", checksum=True)
    assert ckpt_tools.verify(source, tmp_path / "out", model_key="disc").equal
    assert ckpt_tools.verify(tmp_path / "out", model_key="disc").num_digests
