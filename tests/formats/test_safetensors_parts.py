"""safetensors that are no model: one file a rank of tensor parallelism, and what a trainer publishes of its changes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import UnsupportedError
from tests.support.every_verb import refusal

NAMES = {
    "vllm": ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"],
    "vllm, two parts": [f"model-rank-{rank}-part-{part}.safetensors" for rank in range(2) for part in range(2)],
    "deepseek": ["model0-mp2.safetensors", "model1-mp2.safetensors"],
    "tensorrt-llm": ["rank0.safetensors", "rank1.safetensors"],
    "neuronx": ["tp_rank_00_pp_rank_00.safetensors", "tp_rank_01_pp_rank_00.safetensors"],
    "neuronx, data parallel": [f"dp_rank_00_tp_rank_0{rank}_pp_rank_00.safetensors" for rank in range(2)],
}


def merging(base: Path, out: Path) -> str:
    with pytest.raises(UnsupportedError) as found:
        ckpt_tools.merge_lora(base, base, out, to="safetensors")
    return str(found.value)


def saved(folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for number, name in enumerate(names):
        save_file({"up.weight": torch.full((3, 2), float(number)), "norm.weight": torch.ones(2)}, folder / name)
    return folder


@pytest.mark.parametrize("kind", NAMES)
def test_a_file_a_rank_is_no_model(kind, tmp_path):
    folder = saved(tmp_path / "run", NAMES[kind])
    for src in (folder, folder / NAMES[kind][0]):
        for more in ({}, {"from_": "safetensors"}):
            code, sentence = refusal(src, tmp_path / "out", **more)
            assert code == 4 and "of a model that tensor parallelism cut" in sentence
    # vLLM copies the index of the model that it cut.
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"up.weight": "model-1.safetensors"}}')
    assert "tensor parallelism cut" in refusal(folder, tmp_path / "out")[1]
    (found,) = ckpt_tools.ls(folder).checkpoints
    assert found.problem is not None and "of a model that tensor parallelism cut" in found.problem
    assert "tensor parallelism cut" in merging(folder, tmp_path / "out")


def test_shards_with_the_names_of_others_are_no_model(tmp_path):
    """Mistral numbers its ranks as others number their shards."""
    folder = saved(tmp_path / "run", [f"consolidated-0000{number}-of-00002.safetensors" for number in (1, 2)])
    assert "this tensor is in two files" in refusal(folder, tmp_path / "out")[1]
    assert "this is one file of a checkpoint" in refusal(min(folder.glob("*.safetensors")), tmp_path / "out")[1]
    (found,) = ckpt_tools.ls(folder).checkpoints
    assert found.problem is not None and "are in two files" in found.problem


@pytest.mark.parametrize("name", ["model0-mp1.safetensors", "rankings.safetensors", "tp_ranker.safetensors"])
def test_other_names_are_those_of_models(name, tmp_path):
    folder = saved(tmp_path / "run", [name])
    assert ckpt_tools.inspect(folder).num_tensors == 2
    assert ckpt_tools.ls(folder).checkpoints[0].problem is None


def published(folder: Path, encoding: str, num_files: int) -> Path:
    """As slime does (update_weight_from_disk_delta.py): tensors are compressed changes, the files count from 0."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number in range(num_files):
        name = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        changes = {f"layers.{number}.{part}": np.frombuffer(b"(\xb5/\xfd change", np.uint8) for part in ("up", "down")}
        blob = safetensors.numpy.save(changes, metadata=dict.fromkeys(changes, "1a2b3c4d"))
        (folder / name).write_bytes(blob)
        weight_map |= dict.fromkeys(changes, name)
    metadata = {"version": "000002", "base_version": "000001", "delta_encoding": encoding, "compression_format": "zstd"}
    index = {"metadata": metadata, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("num_files", [1, 2])
def test_a_published_delta_is_no_model(encoding, num_files, tmp_path):
    folder = published(tmp_path / "disk" / "weight_v000002", encoding, num_files)
    code, sentence = refusal(folder, tmp_path / "out")
    assert code == 4 and "it is a delta against an earlier version: '000001'; apply it" in sentence
    (found,) = ckpt_tools.ls(folder.parent).checkpoints
    assert found.problem is not None and "it is a delta against an earlier version" in found.problem
    assert "it is a delta against" in merging(folder, tmp_path / "out")
    (folder / "model.safetensors.index.json").unlink()
    if num_files == 1:
        for src in (folder, min(folder.glob("*.safetensors"))):
            assert "it is a delta" in refusal(src, tmp_path / "out", from_="safetensors")[1]
