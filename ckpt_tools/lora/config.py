"""``adapter_config.json`` of PEFT: the settings that decide what an adapter adds to a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.lora.patterns import NO_SUFFIXES, NameSuffixes, PatternValues, is_plain_name
from ckpt_tools.messages.wording import join_names

EMBEDDING_LAYERS = ("embed_tokens", "lm_head")
"""``EMBEDDING_LAYER_NAMES`` of PEFT: if one is among ``target_modules``, ``save_pretrained`` writes embeddings too."""

MAX_PATTERNS = 500

MAX_NUMBER = 1e30
"""A larger rank or ``alpha`` is that of no adapter."""

_HANDLED_KEYS = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "bias",
    "lora_bias",
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "init_lora_weights",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
}

_TRAINING_KEYS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
"""Keys that do not change what is merged: they are for training."""

_UNSUPPORTED_KEYS = {
    "use_dora": "DoRA",
    "alora_invocation_tokens": "activated LoRA, which cannot be merged",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "layer_replication": "layers that share the weights of the base model",
    "megatron_config": "layers of Megatron",
    "monteclora_config": "MonteCLoRA",
    "trainable_token_indices": "trainable tokens",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}
"""Keys whose values change what is merged, by the methods that they switch on."""

_BASE_CHANGING_INITS = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Beginnings of ``init_lora_weights`` with which the base model's own weights are changed before training."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Settings of an adapter of LoRA. ``bias`` says which biases were trained: none, all or lora_only."""

    rank: int = 8
    alpha: float = 8
    is_rank_stabilized: bool = False
    rank_pattern: PatternValues = field(default_factory=lambda: PatternValues({}))
    alpha_pattern: PatternValues = field(default_factory=lambda: PatternValues({}))
    fan_in_fan_out: bool = False
    bias: str = "none"
    target_modules: str | NameSuffixes | None = None
    exclude_modules: str | NameSuffixes = NO_SUFFIXES
    layer_indices: frozenset[int] | None = None
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: NameSuffixes = NO_SUFFIXES
    target_parameters: NameSuffixes = NO_SUFFIXES
    saves_embeddings: bool = False
    is_language_model: bool = False
    unmergeable_settings: tuple[str, ...] = ()
    """Settings with which an adapter cannot be merged."""

    def is_target_parameter(self, name: str) -> bool:
        """Whether ``target_parameters`` names a tensor of the base model."""
        return self.target_parameters.does_match_name(name)

    def check_pattern_cost(self, keys: Collection[str]) -> None:
        """Raises UnsupportedError if to find all ranks takes too long."""
        for name, patterns in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            if not patterns.is_fast_to_match(keys):
                why = "may take hours to match; write it with fewer repetitions and alternatives"
                raise UnsupportedError(f"{name} of adapter_config.json {why}")

    def get_rank_and_scale(self, key: str) -> tuple[int, float]:
        """Rank and scale of the module or parameter ``key``, by the first pattern that its name ends with."""
        rank, alpha = self.rank_pattern.find_value(key, self.rank), self.alpha_pattern.find_value(key, self.alpha)
        return rank, alpha / sqrt(rank) if self.is_rank_stabilized else alpha / rank


def parse_config(content: Any, path: str) -> AdapterConfig:
    """The settings in the content of the file ``path``.

    Raises:
        MalformedError: a value is not of its type. UnsupportedError: it is not of LoRA.
    """
    if not isinstance(content, dict):
        raise MalformedError("it is not a JSON object", path=path)
    peft_type = content.get("peft_type")
    if peft_type != "LORA":
        raise UnsupportedError(f"the adapter's peft_type is {peft_type!r}; only LORA is supported", path=path)
    stated_layers = content.get("layers_to_transform")
    layers = stated_layers if isinstance(stated_layers, list) else [] if stated_layers is None else [stated_layers]
    if not all(type(each) is int for each in layers):
        raise MalformedError(f"layers_to_transform is {stated_layers!r}, and no numbers of layers", path=path)
    target_modules = (
        None if content.get("target_modules") is None else _parse_names_or_pattern(content, "target_modules", path)
    )
    return AdapterConfig(
        rank=_check_number(content.get("r", 8), "r", path, whole=True),
        alpha=_check_number(content.get("lora_alpha", 8), "lora_alpha", path),
        is_rank_stabilized=bool(content.get("use_rslora")),
        rank_pattern=_parse_patterns(content, "rank_pattern", path, whole=True),
        alpha_pattern=_parse_patterns(content, "alpha_pattern", path),
        fan_in_fan_out=bool(content.get("fan_in_fan_out")),
        bias=str(content.get("bias") or "none"),
        target_modules=target_modules,
        exclude_modules=_parse_names_or_pattern(content, "exclude_modules", path),
        layer_indices=frozenset(layers) or None,  # PEFT takes no layers for all of them
        layers_pattern=_check_pattern_count(
            _parse_names(content, "layers_pattern", path, may_be_one=True), "layers_pattern", path
        ),
        modules_to_save=NameSuffixes.of(_parse_names(content, "modules_to_save", path)),
        target_parameters=NameSuffixes.of(_parse_names(content, "target_parameters", path)),
        saves_embeddings=isinstance(target_modules, str)
        or (target_modules is not None and not target_modules.names.keys().isdisjoint(EMBEDDING_LAYERS)),
        is_language_model=content.get("task_type") in ("CAUSAL_LM", "SEQ_2_SEQ_LM"),
        unmergeable_settings=tuple(_find_unmergeable_settings(content)),
    )


def check_mergeable(config: AdapterConfig, path: str) -> None:
    """Raises UnsupportedError for settings with which an adapter is more than ``W + scale B A``."""
    if config.unmergeable_settings:
        raise UnsupportedError(f"the adapter cannot be merged: {'; '.join(config.unmergeable_settings)}", path=path)
    if config.bias not in ("none", "all", "lora_only"):
        raise UnsupportedError(f"the adapter cannot be merged: bias is {config.bias!r}", path=path)


def _find_unmergeable_settings(content: Mapping[str, Any]) -> list[str]:
    reasons = [f"{key} is set ({what})" for key, what in _UNSUPPORTED_KEYS.items() if content.get(key)]
    method = content.get("init_lora_weights")
    if isinstance(method, str) and method.lower().startswith(_BASE_CHANGING_INITS):
        reasons.append(f"init_lora_weights is {method!r}, which changed the base model's weights before training")
    unknown_keys = [
        key
        for key, value in content.items()
        if value and key not in _HANDLED_KEYS | _TRAINING_KEYS and key not in _UNSUPPORTED_KEYS
    ]
    return reasons + (
        [f"{join_names(unknown_keys)} of its settings may change the result and is not known"] if unknown_keys else []
    )


def _check_number(value: Any, setting: str, path: str, *, whole: bool = False) -> Any:
    number_types: tuple[type, ...] = (int,) if whole else (int, float)
    if type(value) not in number_types or not -MAX_NUMBER < value < MAX_NUMBER or (whole and value < 1):
        raise MalformedError(f"{setting} is {value!r}, and not a {'rank' if whole else 'number'}", path=path)
    return value


def _parse_patterns(content: Mapping[str, Any], key: str, path: str, *, whole: bool = False) -> PatternValues:
    values_by_pattern = content.get(key) or {}
    if not isinstance(values_by_pattern, dict):
        raise MalformedError(f"{key} is not a JSON object", path=path)
    for pattern, value in values_by_pattern.items():
        _check_number(value, f"{key} of {pattern!r}", path, whole=whole)
    for pattern in _check_pattern_count([each for each in values_by_pattern if not is_plain_name(each)], key, path):
        _check_regex(pattern, key, path)
    return PatternValues(values_by_pattern)


def _check_pattern_count(patterns: Sequence[str], key: str, path: str) -> tuple[str, ...]:
    if len(patterns) > MAX_PATTERNS:
        raise UnsupportedError(f"{key} has {len(patterns):,} patterns; at most {MAX_PATTERNS} are tried", path=path)
    return tuple(patterns)


def _check_regex(pattern: str, key: str, path: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise MalformedError(f"{key}: {pattern!r} is not a regular expression ({error})", path=path) from error


def _parse_names(content: Mapping[str, Any], key: str, path: str, *, may_be_one: bool = False) -> tuple[str, ...]:
    value = content.get(key)
    if value is None or (may_be_one and value == ""):
        return ()
    if may_be_one and isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise MalformedError(f"{key} is not a list of names", path=path)
    return tuple(value)


def _parse_names_or_pattern(content: Mapping[str, Any], key: str, path: str) -> str | NameSuffixes:
    value = content.get(key)
    if not isinstance(value, str):
        return NameSuffixes.of(_parse_names(content, key, path))
    _check_regex(value, key, path)
    return value
