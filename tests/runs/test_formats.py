"""``ls`` names the format of a checkpoint as ``inspect`` does, and the pages list every format that is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools.formats.index import built_in

DOCS = Path(__file__).parent.parent.parent / "docs"
WRITTEN = [each.name for each in built_in() if each.writes and not each.asks_adapter_config]
"""A folder of PEFT is safetensors by its files."""
SHOWN = dict.fromkeys(["zero1", "zero2", "zero3"], "deepspeed")
"""The stage is in the files; ``ls`` reads names."""


@pytest.fixture
def model(tmp_path):
    torch.save({"model": torch.nn.Linear(3, 2).state_dict()}, tmp_path / "m.pt")
    return tmp_path / "m.pt"


@pytest.mark.parametrize("to", WRITTEN)
def test_a_run_lists_each_format_by_its_name_and_as_complete(to, model, tmp_path):
    saved = tmp_path / "run" / "step_1"
    ckpt_tools.convert(model, saved / f"m.{to}" if to in ("gguf", "npz") else saved, to=to)
    (listed,) = ckpt_tools.ls(tmp_path / "run").checkpoints
    assert (listed.format, listed.problem) == (SHOWN.get(to, to), None)
    names = (DOCS / "json.md").read_text().partition("The layouts of files are")[2].partition("\n\n")[0]
    assert f"`{listed.format}`" in names and "torch_dist" not in names


def test_a_megatron_checkpoint_in_a_folder_of_its_own_lacks_what_is_written_last(model, tmp_path):
    ckpt_tools.convert(model, tmp_path / "run" / "step_1", to="megatron")
    next((tmp_path / "run").rglob("metadata.json")).unlink()
    (listed,) = ckpt_tools.ls(tmp_path / "run").checkpoints
    assert listed.problem is not None and "metadata.json" in listed.problem


@pytest.mark.parametrize("to", WRITTEN)
def test_the_files_that_overwrite_replaces_are_documented(to, model, tmp_path):
    target = tmp_path / (f"x.{to}" if to in ("gguf", "npz") else to)
    ckpt_tools.convert(model, target, to=to)
    removed = ckpt_tools.convert(model, target, to=to, overwrite=True).plan.removed_files
    assert removed
    text = (DOCS / "crashes.md").read_text().partition("- DCP: `.metadata`")
    rows = re.findall(r"^- ([^:]+):", "".join(text[1:]).partition("\n\n")[0], re.MULTILINE)
    family = "DeepSpeed" if to.startswith("zero") else to
    assert any(family.lower() in row.lower() for row in rows), rows
