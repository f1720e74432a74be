"""What training tools lay beside a checkpoint is read or noted, never lost in silence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.values import GlobalRef, Opaque
from ckpt_tools.errors import MalformedError
from ckpt_tools.reading.own_sizes import derive_config
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.stores.urls import open_source


def read(folder: Path) -> Manifest:
    return open_checkpoint(folder, ReadOptions()).manifest


@pytest.fixture
def beside(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    torch.save({"w": torch.zeros(3)}, folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"w": "pytorch_model.bin"}})
    )
    return folder


def test_a_scheduler_and_counts_are_read(beside):
    torch.save({"last_epoch": 4, "_last_lr": [0.1]}, beside / "scheduler.pt")
    (beside / "trainer_state.json").write_text('{"global_step": 7, "epoch": 0.5, "log_history": []}')
    manifest = read(beside)
    assert dict(manifest.extra) == {
        "lr_scheduler": {"last_epoch": 4, "_last_lr": [0.1]},
        "global_step": 7,
        "epoch": 0.5,
    }
    assert manifest.step == 7


@pytest.mark.parametrize("name", ["rng_state_0.pth", "random_states_1.pkl", "optimizer_1.bin"])
def test_what_is_not_read_is_noted(name, beside, tmp_path):
    (beside / name).write_bytes(b"anything")
    report = ckpt_tools.plan(beside, tmp_path / "out", to="dcp")
    assert [note.what for note in report.notes] == [name]


def test_files_of_another_checkpoint_are_not_called_the_trainers(beside):
    other = beside / "other"
    other.mkdir()
    (other / "optimizer.bin").write_bytes(b"anything")
    (note,) = read(beside).notes
    assert (note.what, note.why) == ("other/optimizer.bin", "not part of this checkpoint")


def test_who_asks_for_weights_alone_loses_nothing(beside, tmp_path):
    (beside / "scaler.pt").write_bytes(b"anything")
    ckpt_tools.consolidate(beside, tmp_path / "m.safetensors", strict=True)
    with pytest.raises(ckpt_tools.CkptError, match=r"scaler\.pt"):
        ckpt_tools.convert(beside, tmp_path / "out", to="dcp", strict=True)


def test_a_damaged_companion_does_not_keep_the_model_from_being_read(beside):
    (beside / "scheduler.bin").write_bytes(b"no torch file")
    (note,) = read(beside).notes
    assert note.what == "scheduler.bin"
    assert "cannot be read" in note.why


def manifest(args: dict[str, Any]) -> Manifest:
    value = Opaque(GlobalRef("argparse", "Namespace"), state=args)
    return Manifest("megatron", {}, extra={"megatron": {"common": ({"args": value},), "objects": ()}})


ARGS = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "kv_channels": 2, "padded_vocab_size": 128}


def test_arguments_are_named_as_in_config_json(tmp_path):
    args = {**ARGS, "group_query_attention": True, "num_query_groups": 2, "untie_embeddings_and_output_weights": True}
    assert derive_config(open_source(tmp_path, None), manifest(args)) == {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "tie_word_embeddings": False,
    }


BRIDGE = """
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.GPTModelProvider
  activation_func: !name:torch.nn.functional.silu
  num_layers: 2
  num_attention_heads: 4
  num_query_groups: null
  share_embeddings_and_output_weights: true
"""


def test_run_config_is_read_without_making_what_its_tags_name(tmp_path):
    (tmp_path / "run_config.yaml").write_text(BRIDGE)
    assert derive_config(open_source(tmp_path, None), Manifest("megatron", {})) == {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }


@pytest.mark.parametrize("text", ["a: [", "{" * 1500])
def test_text_that_is_not_yaml_is_named(text, tmp_path):
    (tmp_path / "run_config.yaml").write_text(text)
    with pytest.raises(MalformedError, match=r"run_config\.yaml: it is not YAML"):
        derive_config(open_source(tmp_path, None), Manifest("megatron", {}))
