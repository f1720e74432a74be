"""Quantized weights, and the scales and zero points without which their elements have no meaning. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckpt_tools.core.casts import CASTABLE
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.names import iter_names_with_prefix
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.wording import join_names

_BYTE_DTYPES = (DType.INT8, DType.UINT8)
_INDEX_DTYPES = (DType.INT64, DType.BOOL)
_PACKED_NAMES = ("qweight", "qzeros", "weight_packed", "W_q", "trellis", "codes", "indices")
"""Names by GPTQ, AWQ, compressed-tensors, HQQ, EXL3, AQLM and VPTQ: several elements in an integer of any width."""

_QUANTIZED_INTEGER_NAMES = re.compile(r"(?:.*_)?weights?(?:_packed|_qdata)?|_data|.*_(?:blocks|scales)")
"""Names of integers of any width that are quantized: MLX has a ``weight`` of uint32, whose ``biases`` are zero points,
torchao ``_weight_qdata``, quanto ``weight._data``, gpt-oss ``_blocks``. Another integer of 8 bits may be a mask."""

_COMPANION_NAMES = re.compile(r"(?:nested_)?(?:absmax|quant_map)|quant_state(?:\..+)?|_scale|_shift")
"""Names below that of a quantized weight, as bitsandbytes and quanto give them, whose elements may be of any type."""

_CODEBOOK_MODULES = re.compile(r"(?:res_|outlier_)?centroids")
"""Modules of codebooks below that of a weight, by VPTQ."""

SCALE_NAMES = re.compile(
    r"(?:weight|input|output|activation|k|v|q)_(?:global_)?scale(?:_inv|_2)?|scale_(?:weight|input)|SCB|(?:nested_)?absmax"
)
"""Scales that may lie in another module than the weights: those of a cache of keys and values lie a level above."""


CONFIG_KEY = "quantization_config"
"""The key of ``config.json`` that describes how a model is quantized."""

TEXT_CONFIG = "text_config"
"""The key of the language model's own part of it."""


def is_low_precision(dtype: DType) -> bool:
    """True for integers of 8 bits and floats of at most as many, whose elements may need a scale."""
    return dtype in _BYTE_DTYPES or is_low_precision_float(dtype)


def is_low_precision_float(dtype: DType) -> bool:
    return dtype.is_floating and dtype not in CASTABLE


def find_uncastable_keys(manifest: Manifest) -> set[StateKey]:
    """Keys of quantized weights, and of the floating-point tensors that they need: those in the same module but biases,
    and those known by name."""
    weights = manifest.weight_dtypes
    quantized = set(_find_quantized(weights, is_declared=manifest.is_quantized))
    if not quantized:
        return set()
    modules = {fqn.rpartition(".")[0] for fqn in quantized} | quantized
    return {StateKey(fqn) for fqn in weights if fqn in quantized or _is_scale(fqn, modules)}


def may_be_quantized(manifest: Manifest) -> bool:
    """True if a weight's type is not one of those that weights are cast between, nor that of an index."""
    return not {entry.dtype for entry in manifest.tensors.values()} <= {*CASTABLE, *_INDEX_DTYPES}


def _find_quantized(weights: Mapping[str, DType], *, is_declared: bool = False) -> list[str]:
    """The names of quantized weights. If ``is_declared``, ``config.json`` states that the model is quantized, so that
    no integer is a mask."""
    names_by_module = _group_by_module(weights)
    names_with_companions = {
        module
        for module, names in names_by_module.items()
        if module in weights and any(_COMPANION_NAMES.fullmatch(name.rpartition(".")[2]) for name in names)
    }
    names_with_companions |= {fqn.rpartition(".quant_state.")[0] for fqn in weights if ".quant_state." in fqn}
    scaled_names = set(_iter_scaled_names(weights))
    return [
        fqn
        for fqn, dtype in weights.items()
        if fqn in names_with_companions
        or is_quantized(fqn, dtype, has_scale=fqn in scaled_names)
        or (is_declared and dtype not in CASTABLE and dtype not in _INDEX_DTYPES)
    ]


def map_companions(manifest: Manifest) -> dict[str, str]:
    """Tensors without which a quantized weight has no meaning, each with the name of the weight."""
    weights = manifest.weight_dtypes
    quantized = _find_quantized(weights)
    names_by_module = _group_by_module(weights) if quantized else {}
    weight_by_companion: dict[str, str] = {}
    for fqn in sorted(quantized, key=lambda name: name.endswith("qzeros")):
        if fqn not in weight_by_companion:
            weight_by_companion |= {each: fqn for each in _iter_companions(fqn, names_by_module) if each != fqn}
    return weight_by_companion


def has_quantized_weight(manifest: Manifest) -> bool:
    """Whether a weight is quantized: by a name of packed elements, or by tensors beside it that it needs."""
    has_packed_name = any(
        fqn.rpartition(".")[2] in _PACKED_NAMES and not dtype.is_floating
        for fqn, dtype in manifest.weight_dtypes.items()
    )
    return has_packed_name or bool(map_companions(manifest))


def rename_companion(companion: str, weight: str, new_weight: str) -> str | None:
    """The new name of a companion when ``weight`` becomes ``new_weight``; None if that would part the two."""
    module, _, name = weight.rpartition(".")
    new_module, _, new_name = new_weight.rpartition(".")
    if name == new_name:
        return f"{new_module}{companion[len(module) :]}" if module else f"{new_module}.{companion}".removeprefix(".")
    return f"{new_weight}{companion[len(weight) :]}" if companion.startswith(weight) else None


def check_companions_renamed(manifest: Manifest, names: Mapping[str, str]) -> None:
    """Raises UsageError if ``names``, the new ones by the old, part a quantized weight from a tensor that it needs."""
    for companion, weight in map_companions(manifest).items():
        new_weight, new_companion = names.get(weight, weight), names.get(companion, companion)
        if new_companion != rename_companion(companion, weight, new_weight):
            raise UsageError(
                f"{weight} is quantized and becomes {new_weight}, and {companion}, which it needs, would become "
                f"{new_companion}; rename the module of both"
            )


def check_companions_selected(manifest: Manifest, is_selected: Callable[[str], bool]) -> None:
    """Raises UsageError if a quantized weight is chosen, and a tensor that it needs is not."""
    weights = manifest.weight_dtypes
    names_by_module = _group_by_module(weights)
    for fqn in filter(is_selected, _find_quantized(weights)):
        for companion in _iter_companions(fqn, names_by_module):
            if not is_selected(companion):
                given = join_names([format_option(name) for name in ("include", "exclude", "drop")])
                raise UsageError(
                    f"{fqn} is quantized and needs {companion}, which {given} leave out; select both, or neither"
                )


def _iter_companions(fqn: str, names_by_module: Mapping[str, list[str]]) -> Iterator[str]:
    """Tensors without which the quantized weight has no meaning, by the names that quantizers give them."""
    # gpt-oss: NAME_blocks needs NAME_scales. GPTQ, AWQ and others: all of the module but its biases. Otherwise
    # NAME_scale*. And always what lies below the weight's own name: bitsandbytes, quanto.
    module, _, name = fqn.rpartition(".")
    siblings = names_by_module[module]
    if name.endswith("_blocks"):
        scales = f"{fqn.removesuffix('_blocks')}_scales"
        yield from (each for each in iter_names_with_prefix(scales, siblings) if each == scales)
    elif name == "weight" or name in _PACKED_NAMES:
        yield from (each for each in siblings if not each.endswith("bias"))
    else:
        yield from iter_names_with_prefix(f"{fqn}_scale", siblings)
    yield from names_by_module.get(fqn, ())
    yield from names_by_module.get(f"{fqn}.quant_state", ())


def _group_by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Ordered names by their modules."""
    names_by_module: dict[str, list[str]] = {}
    for name in sorted(names):
        names_by_module.setdefault(name.rpartition(".")[0], []).append(name)
    return names_by_module


def _is_scale(fqn: str, modules: set[str]) -> bool:
    module, _, name = fqn.rpartition(".")
    if name.endswith("bias") and name != "weight_bias":
        return False
    parent_module, _, module_name = module.rpartition(".")
    is_known = SCALE_NAMES.fullmatch(name) is not None or (
        parent_module in modules and _CODEBOOK_MODULES.fullmatch(module_name)
    )
    return module in modules or bool(is_known)


def is_quantized(fqn: str, dtype: DType, *, has_scale: bool = False) -> bool:
    """Whether name and type are those of a quantized weight. An integer of 8 bits with a scale is one."""
    name = fqn.rpartition(".")[2]
    if dtype.is_floating or dtype in _INDEX_DTYPES:
        return is_low_precision_float(dtype)
    is_named = name in _PACKED_NAMES or _QUANTIZED_INTEGER_NAMES.fullmatch(name) is not None
    return is_named or (dtype in _BYTE_DTYPES and has_scale)


def _iter_scaled_names(names: Iterable[str]) -> Iterator[str]:
    """Names of weights or modules that a scale among ``names`` belongs to: the part before ``_scale``, or for one of
    ``SCALE_NAMES`` its module."""
    for scale in names:
        module, _, name = scale.rpartition(".")
        yield from (scale[: len(scale) - len(name) + found.start()] for found in re.finditer("_scale", name))
        if SCALE_NAMES.fullmatch(name) is not None:
            yield module


def get_quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """``quantization_config`` of a ``config.json``; None if there is none."""
    for part in (config, config.get(TEXT_CONFIG)):
        quantization = part.get(CONFIG_KEY) if isinstance(part, Mapping) else None
        if isinstance(quantization, Mapping):
            return quantization
    return None


def get_quant_method(quantization: Mapping[str, Any]) -> str:
    """The ``quant_method``, which compressed-tensors may leave out."""
    return str(quantization.get("quant_method", "compressed-tensors" if "config_groups" in quantization else ""))


KNOWN_METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt", "bitsandbytes", "gptq", "awq")
"""Methods whose weights all show it by names and types; others may quantize weights when they are loaded."""


def drop_quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a model that is not quantized any more."""
    new_config = {key: value for key, value in config.items() if key != CONFIG_KEY}
    text = config.get(TEXT_CONFIG)
    if isinstance(text, Mapping):
        new_config[TEXT_CONFIG] = {key: value for key, value in text.items() if key != CONFIG_KEY}
    return new_config
