"""The pages on JSON list the keys of every command's object, in order, and these are attributes of the result."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from tests.support import commands

pytestmark = pytest.mark.quick

DOCS = Path(__file__).parent.parent / "docs"
SCHEMAS = {
    section.partition("\n")[0].strip(): re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    for page in (DOCS / "json.md", DOCS / "json_others.md")
    for section in page.read_text().split("\n## ")[1:]
}


def printed(*words: str | Path) -> Any:
    return json.loads(commands.run_command(*words, "--json").out)


@pytest.fixture
def model(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def check(section: str, found: dict[str, Any]) -> None:
    assert list(found) == SCHEMAS[section]


def test_summaries_are_as_documented(model):
    found = printed("inspect", model, "--tensors")
    check("inspect", found)
    check("tensor", found["tensors"][0])
    check("parameter group", found["groups"][0])
    assert printed("inspect", model) == {name: value for name, value in found.items() if name != "tensors"}


def test_what_make_loadable_lists_is_as_documented(tmp_path):
    torch.save({"w": torch.ones(1), "class": torch.nn.Linear, "set": frozenset({1})}, tmp_path / "m.pt")
    found = printed("make-loadable", tmp_path / "m.pt", tmp_path / "plain.pt")
    check("make-loadable", found)
    check("left out", found["left_out"][0])
    check("replaced", found["replaced"][0])


def test_conversions_are_as_documented(model, tmp_path):
    planned = printed("plan", model, tmp_path / "p", "--to", "safetensors")
    check("plan", planned)
    check("note", planned["notes"][0])
    check("convert", printed("convert", model, tmp_path / "a", "--to", "zero3"))
    check("convert", printed("consolidate", model, tmp_path / "c"))
    done = printed("reshard", tmp_path / "a", tmp_path / "r", "--world-size", "2")
    check("convert", done)
    check("plan", done["plan"])


def test_comparisons_are_as_documented(model, tmp_path):
    torch.save({"weight": torch.ones(2, 3)}, tmp_path / "b.pt")
    ckpt_tools.consolidate(model, tmp_path / "a.pt")
    check("verify", printed("verify", model))
    found = printed("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    check("verify", found)
    for difference in found["differences"]:
        check("difference", difference)
    check("deviation", next(each["deviation"] for each in found["differences"] if each["aspect"] == "values"))
    check("checksum", printed("checksum", model, "--output", "-"))


def test_the_others_are_as_documented(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"noise")
    found = printed("scan", tmp_path)
    check("scan", found)
    check("finding", found["findings"][0])
    check("clean", printed("clean", tmp_path / "out"))
    for row in printed("formats"):
        check("formats", row)
    for row in printed("recipes"):
        check("recipes", row)


def test_a_recipe_is_as_documented(model, tmp_path):
    (tmp_path / "r.toml").write_text('others = "same"\nmap = [{left = "weight", right = "w"}]\n')
    checked = printed("recipes", "check", tmp_path / "r.toml", model)
    check("recipes check", checked)
    check("mapped tensor", checked["tensors"][0])
    check("recipe of a conversion", checked["recipe"])
    planned = printed("plan", model, tmp_path / "p", "--to", "safetensors", "--recipe", tmp_path / "r.toml")
    assert planned["recipe"] == checked["recipe"] == {"name": "r", "inverse": False, "before": "left", "after": "right"}


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


def test_runs_are_as_documented(model):
    found = printed("ls", model.parent)
    check("ls", found)
    check("checkpoint of a run", found["checkpoints"][0])
    for step in (1, 2):
        ckpt_tools.convert(model, model.parent / "run" / f"step_{step}", to="safetensors")
    pruned = printed("prune", model.parent / "run", "--keep-last", "1")
    check("prune", pruned)
    check("pruned checkpoint", pruned["checkpoints"][0])


def test_a_file_whose_name_is_no_text_is_shown_as_the_command_line_shows_it(model):
    folder = model.parent / "folder"
    folder.mkdir()
    model.rename(folder / "m.pt")
    (folder / os.fsdecode(b"\xff.gguf")).touch()
    (note,) = ckpt_tools.inspect(folder).to_json()["notes"]
    assert note["what"] == r"\udcff.gguf"
