"""``params.json``: sizes of a model as Meta's code takes them.

Sources: ``ModelArgs`` and ``FeedForward`` in ``llama/model.py`` of Meta's llama, and ``models/llama3/args.py`` of
llama-models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.meta.names import PARAMS_FILE
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import Source

MAX_BYTES = 1 << 20

CONFIG_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
"""The key of ``config.json`` for each of Meta's names."""

MAX_SIZE = 1 << 31
"""A larger size is that of no model."""


def read_params(source: Source) -> Mapping[str, Any]:
    """The content of ``params.json`` beside the files; empty if there is none.

    Raises:
        MalformedError: it is not a JSON object.
    """
    if PARAMS_FILE not in source.files or source.size(PARAMS_FILE) > MAX_BYTES:
        return {}
    params = parse_json(source.read(PARAMS_FILE, 0, source.size(PARAMS_FILE)), PARAMS_FILE)
    if not isinstance(params, dict):
        raise MalformedError("it is not a JSON object", path=PARAMS_FILE)
    return params


def read_model_sizes(source: Source) -> Mapping[str, Any]:
    """Sizes of ``params.json`` under the names of ``config.json``. Llama 1 and 2 have the vocabulary -1, which the
    tokenizer tells."""
    params = read_params(source)
    known = {key: params.get(name) for name, key in CONFIG_KEYS.items()}
    return {key: size for key, size in known.items() if _is_size(size)}


def build_params_json(config: Mapping[str, Any]) -> bytes | None:
    """``params.json`` of a model with this ``config.json``; None if it lacks a size."""
    sizes = {name: config[key] for name, key in CONFIG_KEYS.items() if type(config.get(key)) in (int, float)}
    if not all(_is_size(size) for name, size in sizes.items() if name != "norm_eps"):
        return None
    if not {"dim", "n_layers", "n_heads", "vocab_size"} <= sizes.keys():
        return None
    width = config.get("intermediate_size")
    ropes = (config.get(key) for key in ("rope_parameters", "rope_scaling"))
    rope = next((each for each in ropes if isinstance(each, Mapping)), {})
    theta = rope.get("rope_theta", config.get("rope_theta"))
    params = {
        **sizes,
        **(_find_feed_forward_args(sizes["dim"], width) if _is_size(width) else {}),
        **({} if theta is None else {"rope_theta": theta}),
        **({"use_scaled_rope": True} if rope.get("rope_type") == "llama3" else {}),
    }
    return (json.dumps(params, indent=2) + "\n").encode()


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value < MAX_SIZE


def _find_feed_forward_args(dim: int, width: int) -> Mapping[str, Any]:
    """Numbers from which Meta's code computes ``width``: 2/3 of 4 times ``dim``, times a factor, rounded up."""
    # width = ceil(int(factor * base) / multiple) * multiple, with base = int(2 * 4 * dim / 3). ``multiple`` is the
    # largest one that divides the width. If that is the width without a factor, there is none.
    multiple = next(each for each in (256, 128, 64, 32, 16, 8, 4, 2, 1) if width % each == 0)
    base = int(2 * (4 * dim) / 3)
    if -(-base // multiple) * multiple == width:
        return {"multiple_of": multiple}
    # The product lies in the middle of the last step: no rounding leads to another multiple.
    return {"multiple_of": multiple, "ffn_dim_multiplier": (width - multiple / 2 + 0.5) / base}
