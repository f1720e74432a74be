"""The model's copy of a weight is a cast of its fp32 master; where it is more than rounding away, a note says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools

NAMES = ("a", "b", "c")


def run(folder: Path, changes: dict[str, torch.Tensor], *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A ZeRO-2 run whose masters are random, and whose weights are casts of these plus ``changes``."""
    torch.manual_seed(0)
    masters = {name: torch.randn(64, 80) for name in NAMES}
    weights = {name: (each + changes.get(name, torch.zeros(()))).to(dtype) for name, each in masters.items()}
    slots = {
        name: {"master_param": m, "exp_avg": m, "exp_avg_sq": m, "step": torch.tensor(3.0)}
        for name, m in masters.items()
    }
    groups = [{"params": list(NAMES), "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}]
    torch.save({"model": weights, "optim": {"state": slots, "param_groups": groups}}, folder / "run.pt")
    ckpt_tools.convert(folder / "run.pt", folder / "zero2", to="zero2", world_size=2)
    return folder / "zero2"


def notes(report: Any) -> list[Any]:
    return [note for note in report.notes if "more than rounding" in note.why]


SET = {"b": torch.tensor(0.5), "c": torch.tensor([0.0] * 79 + [0.25])}


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "zero3", "universal"])
def test_copies_that_differ_are_named(to, tmp_path):
    source = run(tmp_path, SET)
    (note,) = notes(ckpt_tools.convert(source, tmp_path / "made", to=to))
    assert note.what == "2 weights of 3" and note.count == 2 and "by up to 0.5" in note.why and "in b" in note.why
    ending = "both are written" if to in ("zero3", "universal") else "the master is written; weights='model' writes"
    assert ending in note.why
    if to == "safetensors":
        (note,) = notes(ckpt_tools.convert(source, tmp_path / "own", to=to, weights="model"))
        assert note.why.endswith("the model's is written")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_no_difference(dtype, tmp_path):
    """To the nearest number, or stochastic: the one beside it."""
    source = run(tmp_path, {}, dtype=dtype)
    assert not notes(ckpt_tools.convert(source, tmp_path / "made.safetensors"))
    assert not notes(ckpt_tools.verify(source))
    kind = torch.int32 if dtype is torch.float32 else torch.int16
    for ulps, count in ((1, 0), (2, 1)):
        path = source / "global_step0" / "mp_rank_00_model_states.pt"
        content = torch.load(path, weights_only=False)
        content["module"]["a"] = (content["module"]["a"].view(kind) + 1).view(dtype)
        torch.save(content, path)
        found = notes(ckpt_tools.convert(source, tmp_path / "made.safetensors", overwrite=True))
        assert len(found) == count, ulps


def test_verify_reads_all_and_convert_a_sample(tmp_path):
    torch.manual_seed(0)
    masters = {"w": torch.randn(1 << 17)}
    weights = {"w": masters["w"].bfloat16()}
    weights["w"][-1] = 9
    groups = [{"params": ["w"], "lr": 0.1}]
    state = {"state": {"w": {"master_param": masters["w"], "exp_avg": masters["w"]}}, "param_groups": groups}
    torch.save({"model": weights, "optim": state}, tmp_path / "run.pt")
    assert not notes(ckpt_tools.convert(tmp_path / "run.pt", tmp_path / "made.safetensors"))
    (note,) = notes(ckpt_tools.verify(tmp_path / "run.pt"))
    assert note.what == "1 weight of 1" and note.why.endswith("an export takes the master's")


def test_under_zenflow_the_model_is_newer(tmp_path):
    source = run(tmp_path, SET)
    path = source / "global_step0" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["ds_config"] = {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.2}}}
    torch.save(content, path)
    (note,) = notes(ckpt_tools.convert(source, tmp_path / "made.safetensors"))
    assert "the model's is written, as ZenFlow" in note.why
    made = load_file(tmp_path / "made.safetensors")
    assert all(torch.equal(made[name], content["module"][name]) for name in NAMES)
    assert torch.equal(ckpt_tools.open(source)["b"].torch(), content["module"]["b"])
    assert ckpt_tools.verify(source, tmp_path / "made.safetensors").equal
    ckpt_tools.convert(source, tmp_path / "masters.safetensors", weights="master")
    assert torch.equal(
        load_file(tmp_path / "masters.safetensors")["b"], ckpt_tools.open(source).state("b", "master").torch()
    )
    (note,) = notes(ckpt_tools.verify(source))
    assert note.why.endswith("an export takes the model's")
