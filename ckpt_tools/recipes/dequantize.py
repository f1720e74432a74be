"""Dequantizes a model as ``quantization_config`` in its ``config.json`` says. Pure.

Each quantized weight becomes a tensor that is computed when it is read, of itself and its scales (``scales``), by the
rule of its method (``quantization_methods``). A tensor whose use is not known is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.core.dtypes import DType, from_torch
from ckpt_tools.core.manifest import (
    WEIGHT,
    ComputedTensor,
    Kind,
    Manifest,
    StateKey,
    TensorEntry,
    make_computed_file_name,
)
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.quantized import (
    CONFIG_KEY,
    SCALE_NAMES,
    TEXT_CONFIG,
    get_quant_method,
    get_quantization_config,
    is_quantized,
)
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.messages.wording import format_count
from ckpt_tools.recipes.quantization_methods import (
    FP8_FORMATS,
    METHOD_RULES,
    PLAIN_FP8,
    SCALE_DTYPES,
    MethodRule,
    QuantizedTensor,
    dequantize_plain_fp8,
    make_config_error,
)
from ckpt_tools.recipes.scales import ScaledWeight

_ACTIVATION_NAME = re.compile(
    r"(?:input|output)_(?:global_)?(?:scale|zero_point)|(?:\w+_)?activation_scale|[kvq]_(?:scale|zero_point)|qscale_act"
    r"|weight_format|scale_input|scaled_fp8"
)
"""Names of what a quantized model holds about activations and caches, which a plain one has no use for; of
bitsandbytes' number of the layout of its weights, which is 0 in files; and of ComfyUI's mark of files with scales."""

_COMPANION_NAME = re.compile(r"scale|zero|qz|absmax|scb|g_idx|perm|quant|codebook|packed|blocks|shape", re.IGNORECASE)
"""Parts of the names of tensors that belong to quantized weights."""

_MORE_THAN_SCALES = ("transform_config", "sparsity_config")
"""Keys of compressed-tensors for rotated weights, and for weights without their zeros."""


def dequantize(manifest: Manifest, config: Mapping[str, Any] | None) -> TransformResult:
    """The manifest with every quantized weight as one of floating point, in the dtype that ``config``, the content of
    ``config.json``, names for the model: bfloat16 if none. Scales are left out.

    Raises:
        UsageError: ``config`` does not say how the model is quantized, or no tensor is quantized.
        UnsupportedError: a tensor is quantized in a way that is not known.
    """
    config = config or {}
    quantization = get_quantization_config(config)
    method = PLAIN_FP8 if quantization is None else get_quant_method(quantization)
    if quantization is None:
        quantization = {"has_scales": any(SCALE_NAMES.fullmatch(fqn.rpartition(".")[2]) for fqn in manifest.fqns)}
        if not any(entry.dtype in FP8_FORMATS for entry in manifest.tensors.values()):
            raise make_config_error()
    elif method not in METHOD_RULES:
        raise UnsupportedError(
            f"weights quantized by {method or 'an unnamed method'} cannot be dequantized here, only those of "
            f"{', '.join(METHOD_RULES)}; convert without {format_option('dequantize', True)}"
        )
    for unsupported_key in _MORE_THAN_SCALES:
        settings = quantization.get(unsupported_key)
        # compressed-tensors writes a sparsity_config for weights that are not sparse too: its format is dense.
        if not settings or (isinstance(settings, Mapping) and settings.get("format") == "dense"):
            continue
        raise UnsupportedError(
            f"{CONFIG_KEY} has {unsupported_key}: weights are more than values and scales, and cannot be dequantized "
            f"here; convert without {format_option('dequantize', True)}"
        )
    weights: dict[str, tuple[str, ScaledWeight]] = {}
    used_names: set[str] = set()
    rule = METHOD_RULES.get(method, dequantize_plain_fp8)
    for prefix, tensors in _iter_quantized_modules(manifest):
        module = [QuantizedTensor(prefix, tensors, used_names, name, quantization) for name in tensors]
        weights |= _make_weights(module, rule)
    if not weights:
        raise UsageError(f"{format_option('dequantize', True)}: no tensor is quantized")
    # Single scales of activations and caches may lie in any module.
    activations = {name for name in manifest.weights if _ACTIVATION_NAME.fullmatch(name.rpartition(".")[2])}
    manifest, notes = _replace_weights(manifest, weights, used_names | activations, _choose_dtype(config))
    if activations:
        what = format_count(len(activations), "tensor") + " of quantized activations or caches"
        notes = (*notes, Note(Outcome.DROPPED, what, "the output computes without them", len(activations), asked=True))
    if method is PLAIN_FP8 and not quantization["has_scales"]:
        why = "taken as the numbers that they are: no tensor is a scale, and no config.json says how they are quantized"
        notes = (
            *notes,
            Note(Outcome.KEPT, format_count(len(weights), "float8 tensor"), why, len(weights)),
        )
    return manifest, notes


def _iter_quantized_modules(manifest: Manifest) -> Iterator[tuple[str, Mapping[str, TensorEntry]]]:
    """The modules that hold a quantized tensor or a scale: the prefix of their names, and all their tensors."""
    tensors_by_prefix: dict[str, dict[str, TensorEntry]] = {}
    for fqn, entry in manifest.weights.items():
        prefix, dot, name = fqn.rpartition(".")
        tensors_by_prefix.setdefault(prefix + dot, {})[name] = entry
    for prefix, tensors in tensors_by_prefix.items():
        if any(is_quantized(name, entry.dtype) or SCALE_NAMES.fullmatch(name) for name, entry in tensors.items()):
            yield prefix, tensors


def _make_weights(module: Sequence[QuantizedTensor], rule: MethodRule) -> dict[str, tuple[str, ScaledWeight]]:
    """The weights of a module by the names of their quantized tensors: the new name, and how it is computed. Raises
    UnsupportedError if a tensor is left that may belong to a quantized one."""
    weights: dict[str, tuple[str, ScaledWeight]] = {}
    others = [each for each in module if not _ACTIVATION_NAME.fullmatch(each.name)]
    for stored in others:
        if is_quantized(stored.name, stored.entry.dtype) and stored.full_name not in stored.used_names:
            weight = rule(stored)
            if weight is not None:
                stored.used_names.add(stored.full_name)
                weights[stored.full_name] = stored.prefix + weight[0], weight[1]
    for stored in others:
        is_companion = is_quantized(stored.name, stored.entry.dtype) or _COMPANION_NAME.search(stored.name)
        if is_companion and stored.full_name not in stored.used_names:
            raise stored.make_refusal(f"what this {stored.entry.dtype.value} tensor is for is not known")
    return weights


def _choose_dtype(config: Mapping[str, Any]) -> DType:
    for section in (config, config.get(TEXT_CONFIG)):
        for key in ("dtype", "torch_dtype"):
            dtype_name = section.get(key) if isinstance(section, Mapping) else None
            dtype = from_torch(dtype_name) if isinstance(dtype_name, str) else None
            if dtype in SCALE_DTYPES:
                return dtype
    return DType.BFLOAT16


def _replace_weights(
    manifest: Manifest, weight_by_name: Mapping[str, tuple[str, ScaledWeight]], removed_names: set[str], dtype: DType
) -> TransformResult:
    """The manifest with a computed tensor of ``dtype`` for each quantized one in ``weight_by_name``, which has the new
    name and the weight by the old name, and without the tensors ``removed_names``."""
    tensors: dict[StateKey, TensorEntry] = {}
    computed: dict[str, ComputedTensor] = dict(manifest.computed)
    num_by_dtype: dict[DType, int] = {}
    for key, entry in manifest.tensors.items():
        if key.fqn in weight_by_name and key.slot == WEIGHT:
            name, weight = weight_by_name[key.fqn]
            if StateKey(name) in manifest.tensors and name != key.fqn:
                raise UnsupportedError(f"{key.fqn} would become {name}, and there is a tensor of this name")
            file = make_computed_file_name(name)
            computed[file] = weight
            tensors[StateKey(name)] = TensorEntry(weight.shape, dtype, Kind.PARAMETER, weight.make_table(file))
            num_by_dtype[entry.dtype] = num_by_dtype.get(entry.dtype, 0) + 1
        elif key.fqn not in removed_names or entry.kind is Kind.EXTRA:
            tensors[key] = entry
    new_names = {name: new_name for name, (new_name, _) in weight_by_name.items()}
    aliases = {
        alias: new_names.get(owner, owner)
        for alias, owner in manifest.aliases.items()
        if owner in weight_by_name or owner not in removed_names
    }
    groups = tuple(group.rename_params(new_names) for group in manifest.groups)
    notes = tuple(
        Note(
            Outcome.CAST,
            format_count(number, f"{kind.value} tensor"),
            f"dequantized to {dtype.value}",
            number,
            asked=True,
        )
        for kind, number in num_by_dtype.items()
    )
    result = replace(manifest, tensors=tensors, computed=computed, aliases=aliases, groups=groups, is_quantized=False)
    return result, notes
