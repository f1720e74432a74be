"""Sizes of a model from what its checkpoint says of itself, as a ``config.json`` would give them.

Meta's files have ``params.json`` beside them. Megatron-LM stores its arguments in the common state, and Megatron-Bridge
the model's configuration in ``run_config.yaml`` beside the weights (megatron-core 0.16.1,
``transformer/transformer_config.py``, for the names).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.values import Opaque
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.formats.meta.params import read_model_sizes
from ckpt_tools.stores.source import Source

RUN_CONFIG_FILE = "run_config.yaml"
MAX_YAML_BYTES = 4 << 20

_SHARED_KEYS = (
    *("hidden_size", "vocab_size", "num_attention_heads", "num_experts", "mamba_num_heads", "mamba_head_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
)
_CONFIG_KEYS = {
    **{key: key for key in _SHARED_KEYS},
    "num_layers": "num_hidden_layers",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "num_moe_experts": "num_experts",
    "mamba_num_groups": "n_groups",
    "mamba_state_dim": "ssm_state_size",
}
"""The key of ``config.json`` for each of Megatron's names."""


def derive_config(source: Source, manifest: Manifest) -> Mapping[str, Any] | None:
    """The sizes as a ``config.json`` would give them; None if the checkpoint does not tell any.

    Raises:
        MalformedError: ``run_config.yaml`` is not YAML.
    """
    if manifest.format == "meta":
        return read_model_sizes(source) or None
    settings = _read_arguments(manifest) or _read_run_config(source)
    config = {key: settings[name] for name, key in _CONFIG_KEYS.items() if type(settings.get(name)) is int}
    if "num_attention_heads" in config:
        # Megatron-LM's num_query_groups is 1 where attention is not grouped.
        if settings.get("group_query_attention") is False:
            config["num_key_value_heads"] = config["num_attention_heads"]
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    for name, means_tied in (
        ("untie_embeddings_and_output_weights", False),
        ("share_embeddings_and_output_weights", True),
    ):
        if type(settings.get(name)) is bool:
            config["tie_word_embeddings"] = settings[name] is means_tied
    return config or None


_FC1 = re.compile(r".*\.linear_fc1\.weight\d*")


def refuse_rank_interleaving(source: Source, manifest: Manifest) -> None:
    """Raises UnsupportedError for a DCP of Megatron that has gate and up of each tensor parallel rank in turn.

    Megatron-FSDP splits the fused weight of SwiGLU alone (megatron-core 0.16.1, fsdp_dtensor_checkpoint.py).
    """
    if manifest.format != "dcp":
        return
    settings = _read_arguments(manifest) or _read_run_config(source)
    num_tensor_ranks = settings.get("tensor_model_parallel_size", 1)
    name = next((key.fqn for key in manifest.tensors if _FC1.fullmatch(key.fqn)), None)
    if (
        name is not None
        and num_tensor_ranks != 1
        and True in (settings.get("gated_linear_unit"), settings.get("quick_geglu"))
    ):
        raise UnsupportedError(
            f"its rows are gate and up of {num_tensor_ranks} tensor parallel ranks in turn, which recipes do not read; "
            "save it with --ckpt-format torch_dist",
            key=name,
        )


def _read_arguments(manifest: Manifest) -> Mapping[str, Any]:
    megatron_entries = manifest.extra.get("megatron", {})
    common_states = megatron_entries.get("common") if isinstance(megatron_entries, Mapping) else None
    state = common_states[0] if isinstance(common_states, tuple) and common_states else manifest.extra
    args = state.get("args") if isinstance(state, Mapping) else None
    return args.attributes if isinstance(args, Opaque) and "num_attention_heads" in args.attributes else {}


def _read_run_config(source: Source) -> Mapping[str, Any]:
    """The section of the model, whose tags are not followed."""
    path = min((path for path in source.files if path.rpartition("/")[2] == RUN_CONFIG_FILE), key=len, default=None)
    if path is None or source.size(path) > MAX_YAML_BYTES:
        return {}
    import yaml

    try:
        document = yaml.load(source.read(path, 0, source.size(path)), yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise MalformedError("it is not YAML", path=path) from error
    model = document.get("model") if isinstance(document, dict) else None
    model = model if isinstance(model, dict) else {}
    words = {"true": True, "false": False}
    return {
        name: (int(text) if text.isdecimal() else words.get(text.lower(), text)) if isinstance(text, str) else text
        for name, text in model.items()
    }
