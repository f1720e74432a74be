"""Two checkpoints whose tensors are the same and whose other values differ are not said to be the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt_tools
from ckpt_tools.cli.main import group

pytestmark = pytest.mark.quick


def saved(path: Path, *, step: int = 5, seed: int = 1, **options: Any) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0].update(options)
    own = {"step": step, "args": {"seed": seed, "name": "run"}, "rng": torch.arange(4)}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **own}, path)
    return path


@pytest.fixture
def a(tmp_path):
    return saved(tmp_path / "a.pt")


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": 5e-4}, "lr of weight and 1 more: 0.001 in A, 0.0005 in B"),
    "betas": ({"betas": (0.8, 0.99)}, "betas of weight and 1 more: [0.9, 0.999] in A, [0.8, 0.99] in B"),
    "step": ({"step": 6}, "step: 5 in A, 6 in B"),
    "own": ({"seed": 2}, "args.seed: 1 in A, 2 in B"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_value_is_a_difference(name, a, tmp_path):
    changed, line = DIFFERENT[name]
    b = saved(tmp_path / "b.pt", **changed)
    assert not ckpt_tools.verify(a, b).equal
    shown = CliRunner().invoke(group, ["diff", str(a), str(b)])
    assert shown.exit_code == 6
    assert shown.stdout.splitlines() == [
        "9 tensors (2 weights, 6 of the optimizer, 1 other) are the same, bit for bit; "
        "1 value beside the tensors differs",
        line,
    ]
    found = json.loads(CliRunner().invoke(group, ["diff", str(a), str(b), "--json"]).stdout)
    assert (found["num_differing"], found["num_entries"], found["equal"]) == (0, 1, False)
    assert ckpt_tools.diff(a, b, state="model").equal


def test_tensors_and_values_are_counted_apart(a, tmp_path):
    b = saved(tmp_path / "b.pt", lr=1.0)
    value = torch.load(b)
    value["model"]["bias"] += 1
    torch.save(value, b)
    lines = CliRunner().invoke(group, ["diff", str(a), str(b)]).stdout.splitlines()
    assert lines[0] == "1 of 9 tensors differs: 1 in values; 1 value beside the tensors differs"


@pytest.mark.parametrize("to", ["dcp", "zero2", "universal", "torch", "sharded"])
def test_a_conversion_keeps_them(to, a, tmp_path):
    """The user's own tensor too, which other formats have at another path."""
    written = {"state": "all"} if to == "torch" else {} if to == "universal" else {"world_size": 2}
    ckpt_tools.convert(a, tmp_path / "out", to=to, **written)
    report = ckpt_tools.verify(a, tmp_path / "out", **({"state": "all"} if to == "torch" else {}))
    assert report.equal, report.differences
    other = saved(tmp_path / "b.pt", lr=0.5, step=9)
    shown = [each.key.fqn for each in ckpt_tools.verify(other, tmp_path / "out", state="all").differences]
    assert shown == ["lr of weight and 1 more", "step"]


def test_objects_are_said_not_to_be_compared(a, tmp_path):
    for path in (a, tmp_path / "b.pt"):
        value = torch.load(saved(path))
        torch.save({**value, "when": Path("x")}, path)
    (note,) = ckpt_tools.diff(a, tmp_path / "b.pt").notes
    assert (note.outcome.value, note.what) == ("not compared", "when")
    assert note.why == "it is neither a tensor nor a plain value"
