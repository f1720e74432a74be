"""Sizes from the arguments of Megatron-LM and from Megatron-Bridge's ``run_config.yaml``."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.values import GlobalRef, Opaque
from ckpt_tools.errors import MalformedError
from ckpt_tools.reading.own_sizes import own_config
from ckpt_tools.stores.urls import open_source


def manifest(args: dict[str, Any]) -> Manifest:
    value = Opaque(GlobalRef("argparse", "Namespace"), state=args)
    return Manifest("megatron", {}, extra={"megatron": {"common": ({"args": value},), "objects": ()}})


ARGS = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "kv_channels": 2, "padded_vocab_size": 128}


def test_arguments_are_named_as_in_config_json(tmp_path):
    args = {**ARGS, "group_query_attention": True, "num_query_groups": 2, "untie_embeddings_and_output_weights": True}
    assert own_config(open_source(tmp_path, None), manifest(args)) == {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "tie_word_embeddings": False,
    }


def test_attention_that_is_not_grouped_has_as_many_groups_as_heads(tmp_path):
    args = {**ARGS, "group_query_attention": False, "num_query_groups": 1}
    found = own_config(open_source(tmp_path, None), manifest(args))
    assert found is not None
    assert found["num_key_value_heads"] == 4


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
    assert own_config(open_source(tmp_path, None), Manifest("megatron", {})) == {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }


@pytest.mark.parametrize("text", ["a: [", "{" * 5000])
def test_text_that_is_not_yaml_is_named(text, tmp_path):
    (tmp_path / "run_config.yaml").write_text(text)
    with pytest.raises(MalformedError, match=r"run_config\.yaml: it is not YAML"):
        own_config(open_source(tmp_path, None), Manifest("megatron", {}))


def test_nothing_said_is_nothing_known(tmp_path):
    (tmp_path / "run_config.yaml").write_text("model: [1, 2]")
    assert own_config(open_source(tmp_path, None), Manifest("dcp", {})) is None
