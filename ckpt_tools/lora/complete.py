"""Modules that ``adapter_config.json`` names in a base model, by PEFT's own rules (0.21:
``check_target_module_exists``, ``_set_trainable``), and that an adapter does not hold. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ckpt_tools.core.manifest import TensorEntry
from ckpt_tools.core.names import zero_numbers
from ckpt_tools.lora.adapter import Adapter
from ckpt_tools.lora.config import AdapterConfig
from ckpt_tools.lora.names import get_base_module
from ckpt_tools.lora.patterns import NameSuffixes, is_fast_to_match

_LAYER_NAME = re.compile(r".*?\.[^.]*\.(\d+)\.")
_TEXT_LAYER_NAME = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")


def find_missing_parts(
    config: AdapterConfig, adapter: Adapter, weights: Mapping[str, TensorEntry], model_config: Mapping[str, Any]
) -> dict[str, str]:
    """The modules and tensors of the base model that the settings name and ``adapter`` does not hold, each with the
    setting. ``model_config`` is the content of the base model's ``config.json``."""
    text_config = model_config.get("text_config")
    text_layers = text_config.get("num_hidden_layers") if isinstance(text_config, Mapping) else None
    num_layers = model_config.get("num_hidden_layers", text_layers)
    num_layers = num_layers if type(num_layers) is int else None
    names = [name for name in weights if not _is_multi_token_layer(name, num_layers)]
    adapted = {get_base_module(module) for module in adapter.parts}
    missing: dict[str, str] = {}
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight") and weights[name].shape[1:]]
    for module in find_target_modules(config, modules, adapted):
        if module not in adapted:
            missing[module] = "target_modules"
        elif config.bias == "lora_only" and f"{module}.bias" in weights and f"{module}.bias" not in adapter.saved:
            missing[f"{module}.bias"] = "bias"
    for name in names:
        module, _, _ = name.rpartition(".")
        if config.is_target_parameter(name) and module not in adapted:
            missing[name] = "target_parameters"
        elif config.bias == "all" and name.endswith("bias") and name not in adapter.saved:
            missing[name] = "bias"
        elif name not in adapter.saved and _is_module_saved(module, config.modules_to_save):
            missing[name] = "modules_to_save"
    if not missing and not any(_is_module_saved(name, config.modules_to_save) for name in adapter.saved):
        # A head that the base model lacks: for some tasks PEFT adds several names of heads, and a model has one.
        missing |= dict.fromkeys(islice(config.modules_to_save.names, 1), "modules_to_save")
    return missing


def find_target_modules(config: AdapterConfig, modules: list[str], adapted: set[str]) -> Iterator[str]:
    """The modules of ``modules`` that ``target_modules`` names. If only the model's code tells them (all linear
    layers), or only a pattern that may take too long to match, they are the modules that have an adapter in
    another layer."""
    if does_name_all_targets(config, modules):
        yield from (module for module in modules if _is_target(module, config))
        return
    adapted_classes = set(map(zero_numbers, adapted))
    similar_modules = [module for module in modules if zero_numbers(module) in adapted_classes]
    exclude_modules = config.exclude_modules
    is_exclusion_fast = not isinstance(exclude_modules, str) or is_fast_to_match([exclude_modules], similar_modules)
    yield from (module for module in similar_modules if not (is_exclusion_fast and _is_excluded(module, config)))


def does_name_all_targets(config: AdapterConfig, modules: list[str]) -> bool:
    """Whether ``target_modules`` alone tells which modules it names."""
    patterns = [each for each in (config.target_modules, config.exclude_modules) if isinstance(each, str)]
    return config.target_modules != "all-linear" and is_fast_to_match(patterns, modules)


def _is_target(module: str, config: AdapterConfig) -> bool:
    return (
        config.target_modules is not None
        and not _is_excluded(module, config)
        and _is_name_listed(module, config.target_modules)
        and (isinstance(config.target_modules, str) or _is_in_layer(module, config))
    )


def _is_excluded(module: str, config: AdapterConfig) -> bool:
    return _is_name_listed(module, config.exclude_modules) or config.modules_to_save.does_match_path(module)


def _is_name_listed(module: str, names: str | NameSuffixes) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return names.does_match_name(module)


def _is_in_layer(module: str, config: AdapterConfig) -> bool:
    if config.layer_indices is None:
        return True
    regexes = [re.compile(rf"(?:^|.*?\.){re.escape(name)}\.(\d+)\.") for name in config.layers_pattern] or [_LAYER_NAME]
    first_match = next((match for pattern in regexes if (match := pattern.match(module)) is not None), None)
    return first_match is not None and int(first_match[1]) in config.layer_indices


def _is_module_saved(module: str, names: NameSuffixes) -> bool:
    """Whether ``module`` is, or lies in, a module that ``names`` name. PEFT compares ends of names without regard to
    dots."""
    return names.does_match_path(module, after_dot=False)


def _is_multi_token_layer(name: str, num_layers: int | None) -> bool:
    """Whether ``name`` is of a layer that predicts further tokens. Files on the hub have such layers, and models of
    transformers do not."""
    match = _TEXT_LAYER_NAME.match(name)
    return "mtp" in name.split(".") or (num_layers is not None and match is not None and int(match[1]) >= num_layers)
