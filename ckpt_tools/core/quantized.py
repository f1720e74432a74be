"""Quantized weights, and the scales and zero points without which their elements have no meaning. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import WEIGHT, Manifest, StateKey
from ckpt_tools.core.names import beginning_with
from ckpt_tools.core.option_names import option
from ckpt_tools.errors import UsageError

_BYTES = (DType.INT8, DType.UINT8)
_COUNTING = (DType.INT64, DType.BOOL)
_PACKED = ("qweight", "qzeros", "weight_packed", "W_q", "trellis", "codes", "indices")
"""Names by GPTQ, AWQ, compressed-tensors, HQQ, EXL3, AQLM and VPTQ: several elements in an integer of any width."""

_INTEGERS = re.compile(r"(?:.*_)?weights?(?:_packed|_qdata)?|_data|.*_(?:blocks|scales)")
"""Names of integers of any width that are quantized: MLX has a ``weight`` of uint32, whose ``biases`` are zero points,
torchao ``_weight_qdata``, quanto ``weight._data``, gpt-oss ``_blocks``. Another integer of 8 bits may be a mask."""

_BELOW = re.compile(r"(?:nested_)?(?:absmax|quant_map)|quant_state(?:\..+)?|_scale|_shift")
"""Names below that of a quantized weight, as bitsandbytes and quanto give them, whose elements may be of any type."""

_BELOW_MODULE = re.compile(r"(?:res_|outlier_)?centroids")
"""Modules of codebooks below that of a weight, by VPTQ."""

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
    return dtype in _BYTES or is_small_float(dtype)


def is_small_float(dtype: DType) -> bool:
    return dtype.is_floating and dtype not in CASTABLE


def uncast(manifest: Manifest) -> set[StateKey]:
    """Quantized weights, and the floating-point tensors that they need: in the same module, or known by name. A bias is
    none."""
    weights = _weights(manifest)
    quantized = set(_quantized(weights, is_said=manifest.is_quantized))
    if not quantized:
        return set()
    modules = {fqn.rpartition(".")[0] for fqn in quantized} | quantized
    return {StateKey(fqn) for fqn in weights if fqn in quantized or _is_scale(fqn, modules)}


def may_be_quantized(manifest: Manifest) -> bool:
    """True if a weight's type is not one of those that weights are cast between, nor that of an index."""
    return not {entry.dtype for entry in manifest.tensors.values()} <= {*CASTABLE, *_COUNTING}


def _quantized(weights: Mapping[str, DType], *, is_said: bool = False) -> list[str]:
    """The names of quantized weights; ``is_said`` says that the model is quantized, so that no integer is a mask."""
    members = _members(weights)
    owners = {module for module in members if module in weights and any(map(_is_below, members[module]))}
    owners |= {fqn.rpartition(".quant_state.")[0] for fqn in weights if ".quant_state." in fqn}
    scaled = set(_names_with_scales(weights))
    return [
        fqn
        for fqn, dtype in weights.items()
        if fqn in owners
        or is_quantized(fqn, dtype, has_scale=fqn in scaled)
        or (is_said and dtype not in CASTABLE and dtype not in _COUNTING)
    ]


def _is_below(fqn: str) -> bool:
    return _BELOW.fullmatch(fqn.rpartition(".")[2]) is not None


def companions(manifest: Manifest) -> dict[str, str]:
    """Tensors without which a quantized weight has no meaning, each with the name of the weight."""
    weights = _weights(manifest)
    quantized = _quantized(weights)
    members = _members(weights) if quantized else {}
    found: dict[str, str] = {}
    for fqn in sorted(quantized, key=lambda name: name.endswith("qzeros")):
        if fqn not in found:
            found |= {each: fqn for each in _needed(fqn, members) if each != fqn}
    return found


def holds_quantized(manifest: Manifest) -> bool:
    """True if there is a quantized weight with what it needs."""
    packed = (fqn.rpartition(".")[2] in _PACKED and not dtype.is_floating for fqn, dtype in _weights(manifest).items())
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
    for fqn in _quantized(weights):
        if is_chosen(fqn):
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
        scales = f"{fqn.removesuffix('_blocks')}_scales"
        yield from (each for each in beginning_with(scales, siblings) if each == scales)
    elif name == "weight" or name in _PACKED:
        yield from (each for each in siblings if not each.endswith("bias"))
    else:
        yield from beginning_with(f"{fqn}_scale", siblings)
    yield from members.get(fqn, ())
    yield from members.get(f"{fqn}.quant_state", ())


def _members(names: Iterable[str]) -> dict[str, list[str]]:
    """Ordered names by their modules."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def _weights(manifest: Manifest) -> dict[str, DType]:
    return {key.fqn: entry.dtype for key, entry in manifest.tensors.items() if key.slot == WEIGHT}


def _is_scale(fqn: str, modules: set[str]) -> bool:
    module, _, name = fqn.rpartition(".")
    if name.endswith("bias") and name != "weight_bias":
        return False
    above, _, last = module.rpartition(".")
    is_known = SCALE_NAMES.fullmatch(name) is not None or (above in modules and _BELOW_MODULE.fullmatch(last))
    return module in modules or bool(is_known)


def is_quantized(fqn: str, dtype: DType, *, has_scale: bool = False) -> bool:
    """Whether name and type are those of a quantized weight; integers of 8 bits that have a scale are."""
    name = fqn.rpartition(".")[2]
    if dtype.is_floating or dtype in _COUNTING:
        return is_small_float(dtype)
    is_named = name in _PACKED or _INTEGERS.fullmatch(name) is not None
    return is_named or (dtype in _BYTES and has_scale)


def _names_with_scales(names: Iterable[str]) -> Iterator[str]:
    """Names of weights or modules that a scale among ``names`` belongs to: the part before ``_scale``, or for one of
    ``SCALE_NAMES`` its module."""
    for scale in names:
        module, _, name = scale.rpartition(".")
        yield from (scale[: len(scale) - len(name) + found.start()] for found in re.finditer("_scale", name))
        if SCALE_NAMES.fullmatch(name) is not None:
            yield module


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """``quantization_config`` of a ``config.json``; None if there is none."""
    for part in (config, config.get(TEXT_CONFIG)):
        found = part.get(CONFIG_KEY) if isinstance(part, Mapping) else None
        if isinstance(found, Mapping):
            return found
    return None


def method_of(quantization: Mapping[str, Any]) -> str:
    """The ``quant_method``, which compressed-tensors may leave out."""
    return str(quantization.get("quant_method", "compressed-tensors" if "config_groups" in quantization else ""))


KNOWN_METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt", "bitsandbytes", "gptq", "awq")
"""Methods all of whose weights are known by names and types; others may quantize weights when they are loaded."""


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a model that is not quantized any more."""
    found = {key: value for key, value in config.items() if key != CONFIG_KEY}
    text = config.get(TEXT_CONFIG)
    if isinstance(text, Mapping):
        found[TEXT_CONFIG] = {key: value for key, value in text.items() if key != CONFIG_KEY}
    return found
