"""``inspect``: hyperparameters and state are shown, bounded; tensors fit a terminal; sizes mean the same everywhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.bounded_values import MAX_ITEMS, MAX_TEXT_CHARS, BoundedValues
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note, Outcome
from tests.support.commands import printed, run_command


def test_hyperparameters_and_state_are_shown(checkpoint):
    source = checkpoint("zero3-fp32", "awkward", 2).checkpoint
    text = " ".join(printed("inspect", source).split())
    for part in (
        "step 4",
        "epoch 2",
        "3 parameter groups of 21 parameters",
        "group 0 8 parameters; lr: 0.00330709, betas: [0.9, 0.95], eps: 1e-08, weight_decay: 0.1",
        "group 2 1 parameter; lr: 0.00167082",
        "client_state epoch: 2, best_accuracy: 0.8125, history: [1.5, 0.25], tags: {run: näïve}",
    ):
        assert part in text
    found = json.loads(printed("inspect", source, "--json"))
    assert found["groups"][0]["options"]["betas"] == [0.9, 0.95]
    assert found["extras"]["client_state"]["best_accuracy"] == 0.8125
    assert found["epoch"] == 2


def saved(path: Path, **extra: Any) -> Path:
    torch.save({"model": {"w": torch.ones(2)}, **extra}, path / "m.pt")
    return path / "m.pt"


def test_values_are_bounded(tmp_path):
    source = saved(
        tmp_path,
        epoch=1,
        many=list(range(MAX_ITEMS + 1)),
        text="x" * 10**5 * 2,
        tensor=torch.ones(3, 4),
        number=10**400,
        odd=float("nan"),
        wide=[[0] * 300 for _ in range(300)],
        raw=b"12345",
    )
    found = ckpt_tools.inspect(source)
    text = json.dumps(found.to_json(), allow_nan=False)
    assert len(text) < 100_000
    assert found.extras["many"] == {"$list": MAX_ITEMS + 1}
    assert len(found.extras["text"]) == MAX_TEXT_CHARS + 3
    assert found.extras["tensor"] == {"$tensor": "float32 [3, 4]"}
    assert found.extras["number"] == {"$int": (10**400).bit_length()}
    assert found.extras["odd"] == {"$float": "nan"}
    assert found.extras["raw"] == {"$bytes": 5}
    loop: list[Any] = [1]
    loop += [loop, loop]
    assert len(json.dumps(BoundedValues(Manifest("test", {})).convert(loop))) < 10_000
    said = printed("inspect", source)
    assert len(said) < 20_000
    assert "<list of 1,001 items>" in said and "<tensor float32 [3, 4]>" in said and "<bytes of 5 bytes>" in said


def test_what_reading_did_not_settle_and_files_that_are_left_out_are_told(tmp_path):
    """A model with an optimizer whose numbers could mean several parameters has a note of the reader."""
    weights = {name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "b", "c")}
    optimizer = torch.optim.AdamW([{"params": [weights["c"]]}, {"params": [weights["a"], weights["b"]], "lr": 0.5}])
    torch.stack([*weights.values()]).sum().backward()
    optimizer.step()
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "m.pt")
    (note,) = ckpt_tools.inspect(tmp_path / "m.pt").notes
    assert (note.outcome.value, note.what) == ("kept", "optimizer")
    said = printed("inspect", tmp_path / "m.pt")
    why = note.why.replace("param_order=", "--param-order")
    assert f"kept: optimizer ({why})" in said.split("\n")
    assert json.loads(printed("inspect", tmp_path / "m.pt", "--json"))["notes"] == [{**note.to_json(), "why": why}]
    (tmp_path / "run").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "run" / "pytorch_model.bin")
    (tmp_path / "run" / "scheduler.pt").write_bytes(b"damaged")
    assert "dropped: scheduler.pt (it cannot be read" in printed("inspect", tmp_path / "run")


def test_notes_are_bounded(monkeypatch, tmp_path):
    """Few lines of few names in the terminal, all of them in JSON, and a short line in Python."""
    notes = tuple(Note(Outcome.DROPPED, f"file {n}", f"reason {n % 30}") for n in range(3000))
    known = ckpt_tools.inspect(saved(tmp_path))
    monkeypatch.setattr(ckpt_tools.api, "inspect", lambda *_, **__: replace(known, notes=notes))
    said = printed("inspect", tmp_path / "m.pt").split("\n")
    told = [line for line in said if line.startswith("dropped: ")]
    assert len(told) == 20 and max(map(len, told)) < 400
    assert "and 10 more notes; see --json" in said
    assert len(json.loads(printed("inspect", tmp_path / "m.pt", "--json"))["notes"]) == 3000
    assert len(repr(replace(known, notes=notes))) < 200 and "notes=<3000>" in repr(replace(known, notes=notes))


def test_a_large_entry_is_one_line(tmp_path):
    config = {f"key{n}": {"values": list(range(50))} for n in range(40)}
    source = saved(tmp_path, ds_config=config, args={"lr": 0.5, "layers": list(range(300))})
    said = printed("inspect", source).split("\n")
    assert "1 tensor in 1 shard of 1 file" in " ".join(" ".join(said).split())
    assert "ds_config\t40 keys; see --json" in said
    assert "args\tlr: 0.5, layers: <300 items>" in said
    assert json.loads(printed("inspect", source, "--json"))["extras"]["ds_config"] == config


def test_an_option_that_selects_nothing_is_refused(tmp_path):
    for words in (["--all"], ["--depth", "0"], ["--sample"], ["--memory", "1GB"], ["--include", "x*"]):
        assert run_command("inspect", saved(tmp_path), *words).code == 2, words


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """The whole state of a model with a tied weight and a buffer, in two formats."""
    folder = tmp_path_factory.mktemp("tied")
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(7, 4), "head": torch.nn.Linear(4, 7), "n": torch.nn.BatchNorm1d(4)}
    )
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "m.pt")
    ckpt_tools.convert(folder / "m.pt", folder / "dcp", to="dcp")
    ckpt_tools.convert(
        folder / "m.pt", folder / "zero3", to="zero3", world_size=2, dtype="bfloat16", buffers=["n.run*", "n.num*"]
    )
    return {name: folder / name for name in COUNTS}


COUNTS = {
    "dcp": "19 tensors (7 weights, 12 of the optimizer",
    "zero3": "23 tensors (7 weights, 4 fp32 masters, 12 of the optimizer",
}


@pytest.mark.parametrize("name", COUNTS)
def test_every_command_counts_the_same_tensors(name, tied, tmp_path):
    """Weights and buffers, a tied one once, and what the optimizer keeps; a commands says all of it, or JSON does."""
    source, out = tied[name], tmp_path / "out"
    keeps = ("--to", name, "--state", "all")
    said = {
        "inspect": printed("inspect", source),
        "plan": printed("plan", source, out, *keeps),
        "convert": printed("convert", source, out, *keeps, "-q"),
        "verify": printed("verify", source, "-q"),
        "verify pair": printed("verify", source, out, "--state", "all", "-q"),
        "diff": printed("diff", source, out, "-q"),
        "checksum": printed("checksum", source, "-q"),
    }
    assert [command for command, text in said.items() if COUNTS[name] not in text] == []
    for command in ("inspect", "plan", "convert"):
        assert "head.weight is tied to embed.weight" in said[command], command
    counts = [
        json.loads(printed(*words, "--json"))["tensors_by_role"]
        for words in (
            ("inspect", source),
            ("plan", source, tmp_path / "b", *keeps),
            ("verify", source),
            ("diff", source, out),
        )
    ]
    assert counts == [counts[0]] * len(counts)
    assert COUNTS[name].startswith(f"{sum(counts[0].values())} tensors ({counts[0]['weights']} weights")


def test_a_tie_that_one_side_stores_apart_is_said(tmp_path):
    weight = torch.ones(2, 3)
    torch.save({"a": weight, "b": weight}, tmp_path / "tied.pt")
    torch.save({"a": weight, "b": weight.clone()}, tmp_path / "apart.pt")
    said = printed("diff", tmp_path / "tied.pt", tmp_path / "apart.pt", "-q")
    assert said.split("\n")[:2] == [
        "1 tensor and 1 tied name, 24 B: all are the same, bit for bit",
        "b is tied to a; it is stored once on one side, and not on the other",
    ]
    report = ckpt_tools.diff(tmp_path / "tied.pt", tmp_path / "apart.pt")
    assert (report.num_tensors, report.num_compared, report.tied) == (1, 2, {"b": "a"})
    assert ckpt_tools.diff(tmp_path / "apart.pt", tmp_path / "tied.pt").num_tensors == 2
