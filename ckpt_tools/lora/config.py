"""``adapter_config.json`` of PEFT: the settings that decide what an adapter adds to a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from ckpt_tools.core.wording import listed
from ckpt_tools.errors import MalformedError, UnsupportedError
from ckpt_tools.lora.patterns import NO_ENDS, Ends, Patterns, is_plain

EMBEDDING_LAYERS = ("embed_tokens", "lm_head")
"""``EMBEDDING_LAYER_NAMES`` of PEFT: if one is among ``target_modules``, ``save_pretrained`` writes embeddings too."""

MAX_PATTERNS = 500

MAX_NUMBER = 1e30
"""A larger rank or ``alpha`` is that of no adapter."""

_HANDLED = {
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

_NEUTRAL = {
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

_REFUSED = {
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

_CHANGES_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Beginnings of ``init_lora_weights`` with which the base model's own weights are changed before training."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Settings of an adapter of LoRA. ``bias`` says which biases were trained: none, all or lora_only."""

    rank: int = 8
    alpha: float = 8
    is_rank_stabilized: bool = False
    rank_pattern: Patterns = field(default_factory=lambda: Patterns({}))
    alpha_pattern: Patterns = field(default_factory=lambda: Patterns({}))
    fan_in_fan_out: bool = False
    bias: str = "none"
    target_modules: str | Ends | None = None
    exclude_modules: str | Ends = NO_ENDS
    layers: frozenset[int] | None = None
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: Ends = NO_ENDS
    target_parameters: Ends = NO_ENDS
    saves_embeddings: bool = False
    is_language_model: bool = False
    methods: tuple[str, ...] = ()
    """Settings with which an adapter cannot be merged."""

    def is_parameter(self, name: str) -> bool:
        """Whether ``target_parameters`` names a tensor of the base model."""
        return self.target_parameters.ends(name)

    def check_quick(self, keys: Collection[str]) -> None:
        """Raises UnsupportedError if to find all ranks takes too long."""
        for name in ("rank_pattern", "alpha_pattern"):
            if not getattr(self, name).is_quick(keys):
                why = "may take hours to match; write it with fewer repetitions and alternatives"
                raise UnsupportedError(f"{name} of adapter_config.json {why}")

    def ranked(self, key: str) -> tuple[int, float]:
        """Rank and scale of the module or parameter ``key``, by the first pattern that its name ends with."""
        rank, alpha = self.rank_pattern.value(key, self.rank), self.alpha_pattern.value(key, self.alpha)
        return rank, alpha / sqrt(rank) if self.is_rank_stabilized else alpha / rank


def parse_config(content: Any, path: str) -> AdapterConfig:
    """The settings in the content of the file ``path``.

    Raises:
        MalformedError: a value is not of its type. UnsupportedError: it is not of LoRA.
    """
    if not isinstance(content, dict):
        raise MalformedError("it is not a JSON object", path=path)
    kind = content.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"the adapter's peft_type is {kind!r}; only LORA is supported", path=path)
    targets = None if content.get("target_modules") is None else _names_or_pattern(content, "target_modules", path)
    return AdapterConfig(
        rank=_checked(content.get("r", 8), "r", path, whole=True),
        alpha=_checked(content.get("lora_alpha", 8), "lora_alpha", path),
        is_rank_stabilized=bool(content.get("use_rslora")),
        rank_pattern=_pattern(content, "rank_pattern", path, whole=True),
        alpha_pattern=_pattern(content, "alpha_pattern", path),
        fan_in_fan_out=bool(content.get("fan_in_fan_out")),
        bias=str(content.get("bias") or "none"),
        target_modules=targets,
        exclude_modules=_names_or_pattern(content, "exclude_modules", path),
        layers=_layers(content.get("layers_to_transform"), path),
        layers_pattern=_few(_names(content, "layers_pattern", path, may_be_one=True), "layers_pattern", path),
        modules_to_save=Ends.of(_names(content, "modules_to_save", path)),
        target_parameters=Ends.of(_names(content, "target_parameters", path)),
        saves_embeddings=isinstance(targets, str)
        or (targets is not None and not targets.names.keys().isdisjoint(EMBEDDING_LAYERS)),
        is_language_model=content.get("task_type") in ("CAUSAL_LM", "SEQ_2_SEQ_LM"),
        methods=tuple(_methods(content)),
    )


def check_mergeable(config: AdapterConfig, path: str) -> None:
    """Raises UnsupportedError for settings with which an adapter is more than ``W + scale B A``."""
    if config.methods:
        raise UnsupportedError(f"the adapter cannot be merged: {'; '.join(config.methods)}", path=path)
    if config.bias not in ("none", "all", "lora_only"):
        raise UnsupportedError(f"the adapter cannot be merged: bias is {config.bias!r}", path=path)


def _methods(content: Mapping[str, Any]) -> list[str]:
    found = [f"{key} is set ({what})" for key, what in _REFUSED.items() if content.get(key)]
    init = content.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        found.append(f"init_lora_weights is {init!r}, which changed the base model's weights before training")
    unknown = [
        key for key, value in content.items() if value and key not in _HANDLED | _NEUTRAL and key not in _REFUSED
    ]
    return found + ([f"{listed(unknown)} of its settings may change the result and is not known"] if unknown else [])


def _checked(value: Any, what: str, path: str, *, whole: bool = False) -> Any:
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    if type(value) not in kinds or not -MAX_NUMBER < value < MAX_NUMBER or (whole and value < 1):
        raise MalformedError(f"{what} is {value!r}, and not a {'rank' if whole else 'number'}", path=path)
    return value


def _pattern(content: Mapping[str, Any], key: str, path: str, *, whole: bool = False) -> Patterns:
    found = content.get(key) or {}
    if not isinstance(found, dict):
        raise MalformedError(f"{key} is not a JSON object", path=path)
    for pattern, value in found.items():
        _checked(value, f"{key} of {pattern!r}", path, whole=whole)
    for pattern in _few([each for each in found if not is_plain(each)], key, path):
        _check_pattern(pattern, key, path)
    return Patterns(found)


def _few(patterns: Sequence[str], key: str, path: str) -> tuple[str, ...]:
    if len(patterns) > MAX_PATTERNS:
        raise UnsupportedError(f"{key} has {len(patterns):,} patterns; at most {MAX_PATTERNS} are tried", path=path)
    return tuple(patterns)


def _check_pattern(pattern: str, key: str, path: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise MalformedError(f"{key}: {pattern!r} is not a regular expression ({error})", path=path) from error


def _names(content: Mapping[str, Any], key: str, path: str, *, may_be_one: bool = False) -> tuple[str, ...]:
    found = content.get(key)
    if found is None or (may_be_one and found == ""):
        return ()
    if may_be_one and isinstance(found, str):
        return (found,)
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise MalformedError(f"{key} is not a list of names", path=path)
    return tuple(found)


def _names_or_pattern(content: Mapping[str, Any], key: str, path: str) -> str | Ends:
    found = content.get(key)
    if not isinstance(found, str):
        return Ends.of(_names(content, key, path))
    _check_pattern(found, key, path)
    return found


def _layers(found: Any, path: str) -> frozenset[int] | None:
    """PEFT takes no layers for all of them."""
    several = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(each) is int for each in several):
        raise MalformedError(f"layers_to_transform is {found!r}, and no numbers of layers", path=path)
    return frozenset(several) or None
