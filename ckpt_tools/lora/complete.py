"""What ``adapter_config.json`` names in a base model, by PEFT's own rules (0.21: ``check_target_module_exists``,
``_set_trainable``), and an adapter does not hold. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ckpt_tools.core.manifest import TensorEntry
from ckpt_tools.core.names import unnumbered
from ckpt_tools.lora.adapter import Adapter
from ckpt_tools.lora.config import AdapterConfig
from ckpt_tools.lora.names import bare_module
from ckpt_tools.lora.patterns import Ends, is_quick

_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
_TEXT_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")


def lacking(
    config: AdapterConfig, adapter: Adapter, weights: Mapping[str, TensorEntry], model: Mapping[str, Any]
) -> dict[str, str]:
    """The modules and tensors of the base model that the settings name and ``adapter`` does not hold, each with the
    setting. ``model`` is the content of the base model's ``config.json``."""
    depth = _depth(model)
    names = [name for name in weights if not _predicts_further_tokens(name, depth)]
    adapted = {bare_module(module) for module in adapter.parts}
    found: dict[str, str] = {}
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight") and weights[name].shape[1:]]
    for module in targets(config, modules, adapted):
        if module not in adapted:
            found[module] = "target_modules"
        elif config.bias == "lora_only" and f"{module}.bias" in weights and f"{module}.bias" not in adapter.saved:
            found[f"{module}.bias"] = "bias"
    for name in names:
        module, _, _ = name.rpartition(".")
        if config.is_parameter(name) and module not in adapted:
            found[name] = "target_parameters"
        elif config.bias == "all" and name.endswith("bias") and name not in adapter.saved:
            found[name] = "bias"
        elif name not in adapter.saved and _is_saved(module, config.modules_to_save):
            found[name] = "modules_to_save"
    if not found and not any(_is_saved(name, config.modules_to_save) for name in adapter.saved):
        # A head that the base model lacks: PEFT adds several names of heads for some tasks, of which the model has one.
        found |= dict.fromkeys(islice(config.modules_to_save.names, 1), "modules_to_save")
    return found


def targets(config: AdapterConfig, modules: list[str], adapted: set[str]) -> Iterator[str]:
    """Those of ``modules`` that ``target_modules`` names. What only the model's code tells (all linear layers), or a
    pattern that may not end, are the modules of the layers that have an adapter elsewhere."""
    if is_resolved(config, modules):
        yield from (module for module in modules if _is_target(module, config))
        return
    classes = set(map(unnumbered, adapted))
    beside = [module for module in modules if unnumbered(module) in classes]
    excluded = config.exclude_modules
    is_known = not isinstance(excluded, str) or is_quick([excluded], beside)
    yield from (module for module in beside if not (is_known and _is_excluded(module, config)))


def is_resolved(config: AdapterConfig, modules: list[str]) -> bool:
    """Whether ``target_modules`` alone tells which modules it names."""
    patterns = [each for each in (config.target_modules, config.exclude_modules) if isinstance(each, str)]
    return config.target_modules != "all-linear" and is_quick(patterns, modules)


def _is_target(module: str, config: AdapterConfig) -> bool:
    return (
        config.target_modules is not None
        and not _is_excluded(module, config)
        and _is_named(module, config.target_modules)
        and (isinstance(config.target_modules, str) or _is_in_layer(module, config))
    )


def _is_excluded(module: str, config: AdapterConfig) -> bool:
    return _is_named(module, config.exclude_modules) or config.modules_to_save.holds(module)


def _is_named(module: str, names: str | Ends) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return names.ends(module)


def _is_in_layer(module: str, config: AdapterConfig) -> bool:
    if config.layers is None:
        return True
    patterns = [re.compile(rf"(?:^|.*?\.){re.escape(name)}\.(\d+)\.") for name in config.layers_pattern] or [_LAYER]
    found = next((match for pattern in patterns if (match := pattern.match(module)) is not None), None)
    return found is not None and int(found[1]) in config.layers


def _is_saved(module: str, names: Ends) -> bool:
    """PEFT compares ends of names without regard to dots; what is in such a module is saved too."""
    return names.holds(module, after_dot=False)


def _depth(model: Mapping[str, Any]) -> int | None:
    text = model.get("text_config")
    found = model.get("num_hidden_layers", text.get("num_hidden_layers") if isinstance(text, Mapping) else None)
    return found if type(found) is int else None


def _predicts_further_tokens(name: str, depth: int | None) -> bool:
    """Layers for predicting several tokens, which files on the hub have and models of transformers do not."""
    layer = _TEXT_LAYER.match(name)
    return "mtp" in name.split(".") or (depth is not None and layer is not None and int(layer[1]) >= depth)
