"""``inspect``: hyperparameters and state are shown, bounded; tensors fit a terminal; sizes mean the same everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt_tools
from ckpt_tools.cli.inspect import folded
from ckpt_tools.cli.main import group
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.summary import MAX_ITEMS, MAX_TEXT_CHARS, ShownValues
from tests.cli.terminals import shown as on_terminal


def printed(*words: str | Path) -> str:
    done = CliRunner().invoke(group, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_hyperparameters_and_state_are_shown(checkpoint: Any) -> None:
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


def test_values_are_bounded(tmp_path: Path) -> None:
    source = saved(
        tmp_path,
        epoch=1,
        many=list(range(MAX_ITEMS + 1)),
        text="x" * 10**6,
        tensor=torch.ones(3, 4),
        number=10**400,
        odd=float("nan"),
        wide=[[0] * 900 for _ in range(900)],
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
    said = printed("inspect", source)
    assert len(said) < 20_000
    assert "<list of 1,001 items>" in said and "<tensor float32 [3, 4]>" in said and "<bytes of 5 bytes>" in said


def test_a_value_inside_itself_has_an_end() -> None:
    loop: list[Any] = [1]
    loop += [loop, loop]
    assert len(json.dumps(ShownValues(Manifest("test", {})).of(loop))) < 10_000


@pytest.mark.parametrize("more", [(), ("--json",), ("--tensors",), ("--tensors", "--json")])
def test_a_checkpoint_does_not_command_the_terminal(more: tuple[str, ...], tmp_path: Path) -> None:
    bad = "a\x1b[31m\x9b\u202e\x07b"
    torch.save({"model": {bad: torch.ones(2)}, bad: {bad: bad}}, tmp_path / "m.pt")
    said = printed("inspect", tmp_path / "m.pt", *more)
    assert all(c.isprintable() or c == "\n" for c in said)
    if "--json" in more:
        assert json.loads(said)["extras"] == {bad: {bad: bad}}


LONG = "encoder.layers.encoder_layer_6.self_attention.out_proj.weight"


def test_tensors_fit_the_terminal(tmp_path: Path) -> None:
    torch.save({LONG: torch.ones(4, 5), "a." * 60 + "b": torch.ones(2)}, tmp_path / "m.pt")
    _, text = on_terminal("inspect", tmp_path / "m.pt", "--tensors", columns=80)
    lines = text.split("\n")
    assert LONG in lines
    assert all(len(line) <= 80 for line in lines if str(tmp_path)[:8] not in line)
    assert "".join(line for line in lines if line.startswith("a.")) == "a." * 40 + "a." * 20 + "b"


def test_a_pipe_gets_a_line_a_tensor(tmp_path: Path) -> None:
    names = [f"{LONG}.{LONG}.{LONG}.{number}" for number in range(3)]
    torch.save({name: torch.ones(4, 5) for name in names}, tmp_path / "m.pt")
    lines = [line for line in printed("inspect", tmp_path / "m.pt", "--tensors").split("\n") if LONG in line]
    assert [line.split()[0] for line in lines] == names
    assert lines[0].split()[1:] == ["weight", "parameter", "float32", "4", "x", "5", "80", "1"]


@pytest.mark.parametrize(("width", "lines"), [(80, ["ab.cd.ef"]), (6, ["ab.cd.", "ef"]), (1, ["ab.", "cd.", "ef"])])
def test_names_fold_at_dots(width: int, lines: list[str]) -> None:
    assert folded("ab.cd.ef", width) == lines


def test_plurals(tmp_path: Path) -> None:
    text = printed("inspect", saved(tmp_path))
    assert "1 tensor in 1 shard of 1 file" in " ".join(text.split())


def test_the_size_of_tensors_is_the_same_in_every_command(tmp_path: Path) -> None:
    """A weight that ZeRO-3 stores only as its master, shards with padding, headers: none of it changes the figure."""
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(7)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "m.pt")
    source, out = tmp_path / "source", tmp_path / "out"
    ckpt_tools.convert(tmp_path / "m.pt", source, to="zero3", world_size=2)
    summary = ckpt_tools.inspect(source)
    figures = (summary.num_tensors, summary.num_bytes)
    assert sum(tensor.num_bytes for tensor in summary.tensors) == sum(summary.bytes_by_dtype.values()) == figures[1]
    planned = ckpt_tools.plan(source, out, to="zero3", world_size=3)
    done = ckpt_tools.reshard(source, out, world_size=3)
    reports = (
        planned,
        done.plan,
        ckpt_tools.inspect(out),
        ckpt_tools.checksum(source, output="-"),
        ckpt_tools.verify(source),
        ckpt_tools.verify(source, out),
        ckpt_tools.diff(source, out),
    )
    assert [(report.num_tensors, report.num_bytes) for report in reports] == [figures] * len(reports)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert done.plan.file_bytes == done.bytes_written == written


def numbered(path: Path) -> Path:
    """A model with an optimizer whose numbers could mean several parameters, and a note of a reader with it."""
    weights = {name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "b", "c")}
    optimizer = torch.optim.AdamW([{"params": [weights["c"]]}, {"params": [weights["a"], weights["b"]], "lr": 0.5}])
    torch.stack([*weights.values()]).sum().backward()
    optimizer.step()
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, path / "m.pt")
    return path / "m.pt"


def test_what_reading_did_not_settle_is_told(tmp_path: Path) -> None:
    source = numbered(tmp_path)
    (note,) = ckpt_tools.inspect(source).notes
    assert (note.outcome.value, note.what) == ("kept", "optimizer")
    said = printed("inspect", source)
    assert f"kept: optimizer ({note.why})" in said.split("\n")
    assert json.loads(printed("inspect", source, "--json"))["notes"] == [note.to_json()]


def test_files_that_are_left_out_are_told(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "scheduler.pt").write_bytes(b"damaged")
    said = printed("inspect", tmp_path)
    assert "dropped: scheduler.pt (it cannot be read" in said


def test_notes_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
