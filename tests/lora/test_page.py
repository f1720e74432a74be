"""Runs docs/lora.md: each command does what is printed under it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.lora.models import CASES, adapted, made
from tests.support.pages import ROOT, check_commands

pytestmark = pytest.mark.extended


def test_every_command_prints_what_the_page_says(tmp_path):
    made(CASES["experts"], tmp_path)
    (tmp_path / "base").rename(tmp_path / "moe")
    (tmp_path / "adapter").rename(tmp_path / "moe-adapter")
    with warnings.catch_warnings(action="ignore"):
        model = adapted(CASES["linear"], tmp_path)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
        tokens = torch.arange(16)[None]
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        model.save_pretrained(str(tmp_path / "adapter"))
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "run", no_dist=True)
    settings = (tmp_path / "adapter" / "adapter_config.json").read_bytes()
    (tmp_path / "run" / "adapter_config.json").write_bytes(settings)
    check_commands(ROOT / "docs" / "lora.md", tmp_path)
