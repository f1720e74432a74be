"""Files of ranks, from and to other formats at another world size, judged by the frameworks' own resuming."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

import ckpt_tools
from fixtures.store import Fixture
from tests.end_to_end.test_matrix import assert_same_course, assert_same_state
from tests.support.truth import Truth

Checkpoint = Callable[[str, str, int], Fixture]


@pytest.mark.parametrize("world_size", [1, 3])
def test_verl_resumes_at_another_world_size(checkpoint, world_size, resume, tmp_path):
    root = checkpoint("fsdp2-verl", "plain", 2).root
    ckpt_tools.reshard(root / "checkpoint", tmp_path / "out", world_size=world_size)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    items = ("model", "optim", "extra_state")
    wanted = {f"{item}_world_size_{world_size}_rank_{n}.pt" for item in items for n in range(world_size)}
    assert names == wanted | {"fsdp_config.json", "huggingface"}
    assert json.loads((tmp_path / "out" / "fsdp_config.json").read_text())["world_size"] == world_size
    config = tmp_path / "out" / "huggingface" / "config.json"
    assert config.read_bytes() == (root / "checkpoint" / "huggingface" / "config.json").read_bytes() != b""
    truth, found = Truth.load(root), resume("fsdp2-verl", "plain", tmp_path / "out", world_size)
    assert_same_state(truth, found)
    assert_same_course(truth, found, exactly=False)


TARGETS = [("dcp", "fsdp2"), ("zero2", "zero2-fp32"), ("zero3", "zero3-fp32"), ("universal", "universal-zero2-fp32")]


@pytest.mark.parametrize(("to", "kind"), TARGETS, ids=[to for to, _ in TARGETS])
def test_other_frameworks_resume_from_it(checkpoint, to, kind, resume, tmp_path):
    root = checkpoint("fsdp2-verl", "plain", 2).root
    ranked = {} if to == "universal" else {"world_size": 3}
    ckpt_tools.convert(root / "checkpoint", tmp_path / "out", to=to, **ranked)
    truth, found = Truth.load(root), resume(kind, "plain", tmp_path / "out", 3)
    assert_same_state(truth, found)
    assert_same_course(truth, found, exactly=False)


@pytest.mark.parametrize("kind", ["fsdp2", "zero3-fp32"])
def test_another_format_becomes_verls(kind, checkpoint, tmp_path):
    """A mesh of GPUs cannot be used on a CPU: torch loads the files, and the whole state is in them."""
    source = checkpoint(kind, "awkward", 2).checkpoint
    report = ckpt_tools.convert(source, tmp_path / "out", to="sharded", world_size=3)
    assert "the device mesh" in {note.what for note in report.plan.notes}
    assert ckpt_tools.verify(source, tmp_path / "out").equal
    model = torch.load(tmp_path / "out" / "model_world_size_3_rank_2.pt", weights_only=True)
    weight = model["embed.weight"]
    assert weight.device_mesh.device_type == "cuda" and weight.device_mesh.mesh_dim_names == ("fsdp",)
    assert weight.shape == (13, 7) and weight.to_local().shape == (3, 7)
    assert not hasattr(model["keepsakes.table32"], "to_local")
