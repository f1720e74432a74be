"""Quantized weights, and the scales and zero points without which their elements have no meaning. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import WEIGHT, Manifest, StateKey
from ckpt_tools.core.option_names import option
from ckpt_tools.errors import UsageError

_BYTES = (DType.INT8, DType.UINT8)
_PACKED = ("qweight", "qzeros", "weight_packed")
"""Names by GPTQ, AWQ and compressed-tensors: several elements in an integer of any width. MLX has a ``weight`` of
uint32, whose ``biases`` are zero points."""

SCALE_NAMES = re.compile(
    r"(?:weight|input|output|activation|k|v|q)_(?:global_)?scale(?:_inv|_2)?|scale_(?:weight|input)|SCB|(?:nested_)?absmax"
)
"""Scales that may lie in another module than the weights: those of a cache of keys and values lie a level above."""


CONFIG_KEY = "quantization_config"
"""The key of ``config.json`` that says how a model is quantized."""

TEXT_CONFIG = "text_config"
"""The key of the language model's own part of it."""


def is_small(dtype: DType) -> bool:
    """True for integers of 8 bits and floats of at most as many, whose elements may need a scale."""
    return dtype in _BYTES or (dtype.is_floating and dtype not in CASTABLE)


def scales(manifest: Manifest) -> set[StateKey]:
    """Floating-point tensors that quantized weights need: in the same module, or known by name. A bias is none."""
    weights = _weights(manifest)
    quantized = [fqn for fqn, dtype in weights.items() if is_quantized(fqn, dtype)]
    if not quantized:
        return set()
    modules = {fqn.rpartition(".")[0] for fqn in quantized} | set(quantized)
    return {StateKey(fqn) for fqn in weights.keys() - set(quantized) if _is_scale(fqn, modules)}


def companions(manifest: Manifest) -> dict[str, str]:
    """Tensors without which a quantized weight has no meaning, each with the name of the weight."""
    weights = _weights(manifest)
    quantized = [fqn for fqn, dtype in weights.items() if is_quantized(fqn, dtype)]
    members = _members(weights) if quantized else {}
    found: dict[str, str] = {}
    for fqn in sorted(quantized, key=lambda name: name.endswith("qzeros")):
        if fqn not in found:
            found |= {each: fqn for each in _needed(fqn, members) if each != fqn}
    return found


def holds_quantized(manifest: Manifest) -> bool:
    """True if there is a quantized weight with what it needs."""
    packed = (fqn.rpartition(".")[2] in _PACKED for fqn in _weights(manifest))
    return any(packed) or bool(companions(manifest))


def name_beside(companion: str, weight: str, renamed: str) -> str | None:
    """The name of a companion of ``weight`` if that is ``renamed``; None if it would be parted from it."""
    module, _, name = weight.rpartition(".")
    new_module, _, new_name = renamed.rpartition(".")
    if name == new_name:
        return f"{new_module}{companion[len(module) :]}" if module else f"{new_module}.{companion}".removeprefix(".")
    return f"{renamed}{companion[len(weight) :]}" if companion.startswith(weight) else None


def check_renamed(manifest: Manifest, names: Mapping[str, str]) -> None:
    """Raises UsageError if ``names``, the new ones by the old, part a quantized weight from a tensor that it needs."""
    for companion, weight in companions(manifest).items():
        new, beside = names.get(weight, weight), names.get(companion, companion)
        if beside != name_beside(companion, weight, new):
            raise UsageError(
                f"{weight} is quantized and becomes {new}, and {companion}, which it needs, would become {beside}; "
                "rename the module of both"
            )


def check_together(manifest: Manifest, is_chosen: Callable[[str], bool]) -> None:
    """Raises UsageError if a quantized weight is chosen, and a tensor that it needs is not."""
    weights = _weights(manifest)
    members = _members(weights)
    for fqn, dtype in weights.items():
        if is_chosen(fqn) and is_quantized(fqn, dtype):
            lost = next((name for name in _needed(fqn, members) if not is_chosen(name)), None)
            if lost is not None:
                raise UsageError(
                    f"{fqn} is quantized and needs {lost}, which {option('include')} and {option('exclude')} leave "
                    "out; select both, or neither"
                )


def _needed(fqn: str, members: Mapping[str, list[str]]) -> Iterator[str]:
    """Tensors without which the quantized weight has no meaning, by the names that quantizers give them."""
    module, _, name = fqn.rpartition(".")
    siblings = members[module]
    if name.endswith("_blocks"):
        yield from (each for each in siblings if each == f"{fqn.removesuffix('_blocks')}_scales")
    elif name == "weight" or name in _PACKED:
        yield from (each for each in siblings if not each.endswith("bias"))
    else:
        yield from (each for each in siblings if each.startswith(f"{fqn}_scale"))
    yield from members.get(fqn, ())
    yield from members.get(f"{fqn}.quant_state", ())


def _members(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by their modules."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def _weights(manifest: Manifest) -> dict[str, DType]:
    return {key.fqn: entry.dtype for key, entry in manifest.tensors.items() if key.slot == WEIGHT}


def _is_scale(fqn: str, modules: set[str]) -> bool:
    module, _, name = fqn.rpartition(".")
    if name.endswith("bias"):
        return False
    return module in modules or SCALE_NAMES.fullmatch(name) is not None


def is_quantized(fqn: str, dtype: DType) -> bool:
    name = fqn.rpartition(".")[2]
    is_packed = (not dtype.is_floating and name in _PACKED) or (dtype is DType.UINT32 and name == "weight")
    return is_packed or is_small(dtype)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """``quantization_config`` of a ``config.json``; None if there is none."""
    for part in (config, config.get(TEXT_CONFIG)):
        found = part.get(CONFIG_KEY) if isinstance(part, Mapping) else None
        if isinstance(found, Mapping):
            return found
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a model that is not quantized any more."""
    found = {key: value for key, value in config.items() if key != CONFIG_KEY}
    text = config.get(TEXT_CONFIG)
    if isinstance(text, Mapping):
        found[TEXT_CONFIG] = {key: value for key, value in text.items() if key != CONFIG_KEY}
    return found
