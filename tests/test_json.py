"""The pages on JSON list the keys of every command's object, in order, and these are attributes of the result."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from tests.support.commands import run_command

pytestmark = pytest.mark.quick

DOCS = Path(__file__).parent.parent / "docs"
SCHEMAS = {
    section.partition("\n")[0].strip(): re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    for page in (DOCS / "json.md", DOCS / "json_others.md")
    for section in page.read_text().split("\n## ")[1:]
}


def printed(words: str) -> Any:
    return json.loads(run_command(*words.split(), "--json").out)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A file with a state of training, in the working directory."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}, tmp_path / "m.pt")
    return tmp_path / "m.pt"


DOCUMENTED = {
    "inspect m.pt --tensors": {"inspect": "", "tensor": "tensors 0", "parameter group": "groups 0"},
    "make-loadable foreign.pt plain.pt": {"make-loadable": "", "left out": "left_out 0", "replaced": "replaced 0"},
    "plan m.pt p --to safetensors": {"plan": "", "note": "notes 0"},
    "convert m.pt zero3 --to zero3": {"convert": ""},
    "consolidate m.pt c": {"convert": "", "plan": "plan"},
    "reshard zero3 other --world-size 2": {"convert": "", "plan": "plan"},
    "delta c b.pt weight_v000001": {"delta": ""},
    "verify m.pt": {"verify": ""},
    "diff c b.pt": {"verify": "", "difference": "differences 0", "deviation": "differences 0 deviation"},
    "check nan.pt": {"check": "", "health finding": "findings 0"},
    "checksum m.pt --output -": {"checksum": ""},
    "scan noise": {"scan": "", "finding": "findings 0"},
    "clean out": {"clean": ""},
    "formats": {"formats": "0"},
    "recipes": {"recipes": "0"},
    "recipes show vit_timm": {"card of a recipe": "card", "proof of a recipe": "card proofs 0"},
    "recipes check r.toml m.pt": {
        "recipes check": "",
        "mapped tensor": "tensors 0",
        "recipe of a conversion": "recipe",
    },
    "ls run": {"ls": "", "checkpoint of a run": "checkpoints 0"},
    "convert-run run every/{step} --to safetensors --last 1": {"convert-run": "", "convert": "report"},
    "prune run --keep-last 1": {"prune": "", "pruned checkpoint": "checkpoints 0"},
}
"""By command line, the sections of the pages, and where the object of each lies in what is printed."""


def test_what_is_printed_is_as_documented(model):
    torch.save({"w": torch.ones(1), "class": torch.nn.Linear, "set": frozenset({1})}, "foreign.pt")
    torch.save({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, "b.pt")
    torch.save({"weight": torch.full((2, 3), torch.nan)}, "nan.pt")
    Path("noise").mkdir()
    Path("noise/x.pt").write_bytes(b"noise")
    Path("r.toml").write_text('others = "same"\nmap = [{left = "weight", right = "w"}]\n')
    for step in (1, 2):
        ckpt_tools.convert(model, f"run/step_{step}", to="safetensors")
    for words, sections in DOCUMENTED.items():
        found = printed(words)
        for section, place in sections.items():
            each = found
            for part in place.split():
                each = each[int(part) if part.isdigit() else part]
            assert list(each) == SCHEMAS[section], (words, section)
    without = {name: value for name, value in printed("inspect m.pt --tensors").items() if name != "tensors"}
    assert printed("inspect m.pt") == without
    recipe = {"name": "r", "inverse": False, "before": "left", "after": "right"}
    planned = printed("plan m.pt p --to safetensors --recipe r.toml")
    assert planned["recipe"] == printed("recipes check r.toml m.pt")["recipe"] == recipe


def test_keys_are_attributes(model, tmp_path):
    results = [
        ckpt_tools.inspect(model),
        ckpt_tools.plan(model, tmp_path / "p", to="dcp"),
        ckpt_tools.convert(model, tmp_path / "c", to="dcp"),
        ckpt_tools.verify(model),
        ckpt_tools.diff(model, tmp_path / "c"),
        ckpt_tools.checksum(model, output="-"),
        ckpt_tools.scan(model),
        ckpt_tools.clean(tmp_path / "none"),
        *ckpt_tools.list_formats(),
    ]
    for result in results:
        found = result.to_json()
        json.dumps(found, allow_nan=False)
        for name, value in found.items():
            if isinstance(value, str | int | float | None):
                assert getattr(result, name) == value, (type(result), name)
            else:
                assert hasattr(result, name), (type(result), name)
