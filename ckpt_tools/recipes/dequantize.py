"""From a quantized model to one of floating-point weights, as ``quantization_config`` in its ``config.json`` says.

Pure: each quantized weight becomes a tensor that is computed when it is read, of itself and its scales (``scales``).
The rules are those of the code that loads such a model: transformers 5.23 (``integrations/finegrained_fp8.py``,
``mxfp4.py``, ``bitsandbytes.py``), compressed-tensors 0.20 (``compressors``) and ModelOpt
(``qtensor/nvfp4_tensor.py``). A tensor whose meaning is not known whole is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ckpt_tools.core.boxes import Shape
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
from ckpt_tools.core.wording import format_count
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.recipes.scales import Scaled, Third, Values

_FP8 = {DType.FLOAT8_E4M3FN: Values.E4M3, DType.FLOAT8_E5M2: Values.E5M2}
_SCALES = frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16})
_EXPONENTS = frozenset({DType.UINT8, DType.FLOAT8_E8M0FNU})

_ACTIVATIONS = re.compile(
    r"(?:input|output)_(?:global_)?(?:scale|zero_point)|(?:\w+_)?activation_scale|[kvq]_(?:scale|zero_point)|qscale_act"
    r"|weight_format|scale_input|scaled_fp8"
)
"""Names of what a quantized model holds about activations and caches, which a plain one has no use for; of
bitsandbytes' number of the layout of its weights, which is 0 in files; and of ComfyUI's mark of files with scales."""

_COMPANION = re.compile(r"scale|zero|qz|absmax|scb|g_idx|perm|quant|codebook|packed|blocks|shape", re.IGNORECASE)
"""Parts of the names of tensors that belong to quantized weights."""


@dataclass
class _Module:
    """The tensors of a module by the last part of their names. ``used`` are those that a weight is computed from."""

    prefix: str
    tensors: Mapping[str, TensorEntry]
    used: set[str] = field(default_factory=set)

    def take(self, *names: str, dtypes: frozenset[DType] = _SCALES) -> TensorEntry | None:
        """The first of ``names`` that there is. Raises UnsupportedError if its dtype is not one of ``dtypes``."""
        name = next((name for name in names if name in self.tensors), None)
        if name is None:
            return None
        self.used.add(name)
        entry = self.tensors[name]
        if entry.dtype not in dtypes:
            raise self.refused(name, f"it is {entry.dtype.value}")
        return entry

    def refused(self, name: str, why: str) -> UnsupportedError:
        full = self.prefix + name
        return UnsupportedError(
            f"{full} cannot be dequantized: {why}; convert without {format_option('dequantize', True)}"
        )


_PLAIN = "plain fp8"
"""Stands for a method where no config names one."""

_MORE_THAN_SCALES = ("transform_config", "sparsity_config")
"""Keys of compressed-tensors for rotated weights, and for weights without their zeros."""

_Made: TypeAlias = tuple[str, Scaled]
"""A weight's name in its module, and how it is computed."""

_Rule: TypeAlias = Callable[[_Module, str, Mapping[str, Any]], _Made | None]
"""Makes the weight of the quantized tensor of a name in a module, by ``quantization_config``; None if it is not of this
kind."""


def dequantize(manifest: Manifest, config: Mapping[str, Any] | None) -> TransformResult:
    """The manifest with every quantized weight as one of floating point, in the dtype that ``config``, the content of
    ``config.json``, names for the model: bfloat16 if none. Scales are left out.

    Raises:
        UsageError: ``config`` does not say how the model is quantized, or no tensor is quantized.
        UnsupportedError: a tensor is quantized in a way that is not known.
    """
    config = config or {}
    quantization = get_quantization_config(config)
    method = _PLAIN if quantization is None else get_quant_method(quantization)
    if quantization is None:
        quantization = {"has_scales": any(SCALE_NAMES.fullmatch(fqn.rpartition(".")[2]) for fqn in manifest.fqns)}
        if not any(entry.dtype in _FP8 for entry in manifest.tensors.values()):
            raise _needs_config()
    elif method not in _METHODS:
        raise UnsupportedError(
            f"weights quantized by {method or 'an unnamed method'} cannot be dequantized here, only those of "
            f"{', '.join(_METHODS)}; convert without {format_option('dequantize', True)}"
        )
    more = next((key for key in _MORE_THAN_SCALES if _is_set(quantization.get(key))), None)
    if more is not None:
        raise UnsupportedError(
            f"{CONFIG_KEY} has {more}: weights are more than values and scales, and cannot be dequantized here; "
            f"convert without {format_option('dequantize', True)}"
        )
    made: dict[str, tuple[str, Scaled]] = {}
    gone: set[str] = set()
    for module in _modules(manifest):
        for name, computed in _weights_of(module, _METHODS.get(method, _fp8_alone), quantization):
            made[module.prefix + name[0]] = module.prefix + name[1], computed
        gone |= {module.prefix + name for name in module.used}
    if not made:
        raise UsageError(f"{format_option('dequantize', True)}: no tensor is quantized")
    activations = _of_activations(manifest)
    manifest, notes = _replaced(manifest, made, gone | activations, _dtype_of(config))
    if activations:
        what = format_count(len(activations), "tensor") + " of quantized activations or caches"
        notes = (*notes, Note(Outcome.DROPPED, what, "the output computes without them", len(activations), asked=True))
    if method is _PLAIN and not quantization["has_scales"]:
        why = "taken as the numbers that they are: no tensor is a scale, and no config.json says how they are quantized"
        notes = (*notes, Note(Outcome.KEPT, format_count(len(made), "float8 tensor"), why, len(made)))
    return manifest, notes


def _needs_config(why: str = "") -> UsageError:
    return UsageError(
        f"{why}{format_option('dequantize', True)} needs the {CONFIG_KEY} of the model's config.json; name its "
        f"folder with "
        f"{format_option('config')}"
    )


def _is_set(settings: object) -> bool:
    """False for none, and for sparse weights that are not."""
    return bool(settings) and not (isinstance(settings, Mapping) and settings.get("format") == "dense")


def _modules(manifest: Manifest) -> Iterator[_Module]:
    """The modules that hold a quantized tensor or a scale, with all their tensors."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for key, entry in manifest.tensors.items():
        if key.slot == WEIGHT and entry.kind is not Kind.EXTRA:
            prefix, dot, name = key.fqn.rpartition(".")
            found.setdefault(prefix + dot, {})[name] = entry
    for prefix, tensors in found.items():
        if any(is_quantized(name, entry.dtype) or SCALE_NAMES.fullmatch(name) for name, entry in tensors.items()):
            yield _Module(prefix, tensors)


def _weights_of(
    module: _Module, rule: _Rule, quantization: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, str], Scaled]]:
    """Each weight of a module: its name before and after, and how it is computed. Raises UnsupportedError if a tensor
    is left that may belong to a quantized one."""
    for name, entry in module.tensors.items():
        if is_quantized(name, entry.dtype) and name not in module.used and not _ACTIVATIONS.fullmatch(name):
            made = rule(module, name, quantization)
            if made is not None:
                module.used.add(name)
                yield (name, made[0]), made[1]
    for name, entry in module.tensors.items():
        is_known = name in module.used or _ACTIVATIONS.fullmatch(name)
        if not is_known and (is_quantized(name, entry.dtype) or _COMPANION.search(name)):
            raise module.refused(name, f"what this {entry.dtype.value} tensor is for is not known")


def _of_activations(manifest: Manifest) -> set[str]:
    """Names of single scales of activations and caches, which may lie in any module."""
    return {
        key.fqn
        for key, entry in manifest.tensors.items()
        if key.slot == WEIGHT and entry.kind is not Kind.EXTRA and _ACTIVATIONS.fullmatch(key.fqn.rpartition(".")[2])
    }


def _dtype_of(config: Mapping[str, Any]) -> DType:
    for part in (config, config.get(TEXT_CONFIG)):
        for key in ("dtype", "torch_dtype"):
            named = part.get(key) if isinstance(part, Mapping) else None
            found = from_torch(named) if isinstance(named, str) else None
            if found in _SCALES:
                return found
    return DType.BFLOAT16


def _replaced(
    manifest: Manifest, made: Mapping[str, tuple[str, Scaled]], gone: set[str], dtype: DType
) -> TransformResult:
    """The manifest with the weights ``made`` of quantized ones by their names, and without the tensors that are
    ``gone``."""
    tensors: dict[StateKey, TensorEntry] = {}
    computed: dict[str, ComputedTensor] = dict(manifest.computed)
    kinds: dict[DType, int] = {}
    for key, entry in manifest.tensors.items():
        if key.fqn in made and key.slot == WEIGHT:
            name, how = made[key.fqn]
            if StateKey(name) in manifest.tensors and name != key.fqn:
                raise UnsupportedError(f"{key.fqn} would become {name}, and there is a tensor of this name")
            file = make_computed_file_name(name)
            computed[file] = how
            tensors[StateKey(name)] = TensorEntry(how.shape, dtype, Kind.PARAMETER, how.make_table(file))
            kinds[entry.dtype] = kinds.get(entry.dtype, 0) + 1
        elif key.fqn not in gone or entry.kind is Kind.EXTRA:
            tensors[key] = entry
    aliases = {
        alias: made[owner][0] if owner in made else owner
        for alias, owner in manifest.aliases.items()
        if owner in made or owner not in gone
    }
    groups = tuple(
        replace(group, params=tuple(made[name][0] if name in made else name for name in group.params))
        for group in manifest.groups
    )
    notes = tuple(
        Note(
            Outcome.CAST,
            format_count(number, f"{kind.value} tensor"),
            f"dequantized to {dtype.value}",
            number,
            asked=True,
        )
        for kind, number in kinds.items()
    )
    plain = replace(manifest, tensors=tensors, computed=computed, aliases=aliases, groups=groups, is_quantized=False)
    return plain, notes


def _scaled(
    module: _Module,
    name: str,
    values: Values,
    scale: TensorEntry,
    *,
    wanted: Shape | None,
    dtype: DType = DType.FLOAT32,
    third: Third = Third.NONE,
    other: TensorEntry | None = None,
    factor: float = 1.0,
    columns: int | None = None,
) -> Scaled:
    """The weight ``name`` of a module times ``scale``, whose blocks have the shape ``wanted`` where that fits, and else
    the shape that divides the weight evenly. ``columns`` are the values in a row, if they do not fill its elements."""
    entry = module.tensors[name]
    if not entry.shape:
        raise module.refused(name, "it is a single number")
    per_element = entry.dtype.item_bytes * 8 // values.bits
    shape = (*entry.shape[:-1], entry.shape[-1] * per_element if columns is None else columns)
    blocks = _blocks(shape, scale.shape, wanted)
    if blocks is None:
        raise module.refused(name, f"its values {list(shape)} and its scales {list(scale.shape)} do not fit")
    operands = (entry, scale) if other is None else (entry, scale, other)
    return Scaled(shape, dtype, operands, values, blocks, third, factor)


def _blocks(shape: Shape, grid: Shape, wanted: Shape | None) -> Shape | None:
    """The elements that share a scale, by dim; None if weights and scales of these shapes do not fit. ``wanted`` are
    the last two, whose blocks may be cut at the edge; other dims have a scale each, or one in all."""
    if len(grid) > len(shape):
        return None
    grid += (1,) * (len(shape) - len(grid))
    for last in (wanted, None):
        blocks = []
        for dim, (extent, number) in enumerate(zip(shape, grid, strict=True)):
            at = dim - len(shape)
            block = last[at] if last is not None and at >= -len(last) else 0
            if number == 1:
                blocks.append(max(1, extent))
            elif block and -(-extent // block) == number:
                blocks.append(block)
            elif not block and number and extent and extent % number == 0:
                blocks.append(extent // number)
        if len(blocks) == len(shape):
            return tuple(blocks)
    return None


def _is_one(entry: TensorEntry) -> bool:
    return entry.numel == 1


def _pair(block: Any) -> Shape | None:
    """The rows and columns of a block in the config; None if it is not a list of two sizes."""
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    return tuple(block) if is_pair else None


def _fp8(module: _Module, name: str, quantization: Mapping[str, Any]) -> _Made | None:
    """DeepSeek's and transformers' own: blocks of ``weight_block_size``, cut at the edges; 4-bit experts in bytes."""
    dtype = module.tensors[name].dtype
    if dtype in _EXPONENTS:
        return None
    values = _FP8.get(dtype) or (Values.E2M1 if dtype in (DType.INT8, DType.FLOAT4_E2M1FN_X2) else None)
    names = ("weight_scale_inv", "scale", "qscale_weight") if name == "weight" else (f"{name}_scale_inv",)
    scale = module.take(*names, dtypes=_SCALES | _EXPONENTS)
    if values is None or scale is None:
        why = f"{dtype.value} without scales" if values else dtype.value
        raise module.refused(name, f"it is {why}")
    block = quantization.get("weight_block_size")
    wanted = _pair(block)
    if block is not None and wanted is None:
        raise module.refused(name, f"weight_block_size is {block!r}")
    if len(scale.shape) < 2 and not _is_one(scale):
        raise module.refused(name, f"its scales are of shape {list(scale.shape)}")
    return name, _scaled(module, name, values, scale, wanted=wanted)


def _fp8_alone(module: _Module, name: str, quantization: Mapping[str, Any]) -> _Made | None:
    """fp8 without a config: scales under the usual names for the tensor, for each row, or for blocks of 128 x 128 that
    no edge cuts, so that their size is certain; without any scale in the checkpoint the values as they are."""
    entry = module.tensors[name]
    if entry.dtype not in _FP8:
        raise _needs_config(f"{module.prefix}{name} is {entry.dtype.value}, and ")
    names = ("weight_scale_inv", "weight_scale", "scale_weight") if name == "weight" else (f"{name}_scale_inv",)
    scale = module.take(*names)
    if scale is None and quantization["has_scales"]:
        raise module.refused(name, f"it is {entry.dtype.value} without scales, and other tensors have them")
    if scale is None and entry.shape:
        blocks = tuple(max(1, extent) for extent in entry.shape)
        return name, Scaled(entry.shape, DType.FLOAT32, (entry,), _FP8[entry.dtype], blocks)
    if scale is None:
        raise module.refused(name, "it is a single number")
    rows = entry.shape[:1]
    grid = tuple(extent // 128 for extent in entry.shape if extent % 128 == 0)
    if not _is_one(scale) and scale.shape not in (rows, (*rows, 1), grid if len(grid) == 2 else rows):
        raise _needs_config(f"{module.prefix}{name} has scales {list(scale.shape)} of blocks of an unknown size, and ")
    return name, _scaled(module, name, _FP8[entry.dtype], scale, wanted=None)


def _mxfp4(module: _Module, name: str, quantization: Mapping[str, Any]) -> _Made | None:
    """gpt-oss: ``[experts, rows, blocks, 16]`` bytes and an exponent for each block of 32 values. transformers holds
    the experts with rows and columns exchanged."""
    stem = name.removesuffix("_blocks")
    if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in module.tensors:
        return None
    entry, scale = module.tensors[name], module.take(f"{stem}_scales", dtypes=frozenset({DType.UINT8}))
    is_known = stem in ("gate_up_proj", "down_proj") and stem != name and entry.dtype is DType.UINT8
    if scale is None or not is_known or len(entry.shape) != 4 or entry.shape[:-1] != scale.shape:
        raise module.refused(name, f"{entry.dtype.value} of shape {list(entry.shape)} are not experts of gpt-oss")
    experts, rows, groups, num_bytes = entry.shape
    stored = _flattened(entry)
    columns = groups * num_bytes * 2
    found = Scaled(
        (experts, columns, rows),
        DType.FLOAT32,
        (stored, scale),
        Values.E2M1,
        (1, 1, num_bytes * 2),
        # torch.ldexp, which does not overflow where 2 ** 128 would.
        factor=2.0,
        bias=128,
        is_transposed=True,
    )
    return stem, found


def _flattened(entry: TensorEntry) -> TensorEntry:
    """The last two dims as one."""
    *lead, groups, size = entry.shape
    return replace(entry, shape=(*lead, groups * size))


def _modelopt(module: _Module, name: str, quantization: Mapping[str, Any]) -> _Made | None:
    """ModelOpt: fp8 with a scale for the tensor, for each row or for each block; NVFP4 with scales of scales."""
    entry = module.tensors[name]
    if name == "weight_scale":
        return None
    if name == "weight" and entry.dtype is DType.UINT8:
        scale = module.take("weight_scale", dtypes=frozenset({DType.FLOAT8_E4M3FN}))
        other = module.take("weight_scale_2", dtypes=frozenset({DType.FLOAT32}))
        if scale is not None and other is not None and _is_one(other) and len(scale.shape) == len(entry.shape):
            return name, _scaled(module, name, Values.E2M1, scale, wanted=(1, 16), third=Third.TIMES, other=other)
    elif name == "weight" and entry.dtype in _FP8:
        scale = module.take("weight_scale", "weight_scale_inv", dtypes=frozenset({DType.FLOAT32}))
        if scale is not None and (len(scale.shape) != 1 or scale.numel in (1, entry.shape[0])):
            return name, _scaled(module, name, _FP8[entry.dtype], scale, wanted=(128, 128))
    raise module.refused(name, f"it is {entry.dtype.value}, and its scales are not those of FP8 or NVFP4")


def _compressed_tensors(module: _Module, name: str, quantization: Mapping[str, Any]) -> _Made | None:
    """compressed-tensors: the scheme is told by the tensors of the module, and its numbers must agree with a group of
    the config."""
    entry = module.tensors[name]
    if name in ("weight_scale", "weight_zero_point"):
        return None
    packed = name == "weight_packed"
    if packed and "weight_global_scale" in module.tensors:
        return "weight", _nvfp4(module, name, quantization)
    if packed and entry.dtype is DType.UINT8:
        scale = module.take("weight_scale", dtypes=_EXPONENTS)
        weights = _scheme(module, name, quantization, "float", 4)
        if scale is not None and weights.get("group_size") == 32:
            return "weight", _scaled(module, name, Values.E2M1, scale, wanted=(1, 32), dtype=DType.BFLOAT16)
    if packed and entry.dtype is DType.INT32:
        return "weight", _packed(module, name, quantization)
    if name == "weight" and entry.dtype in (DType.FLOAT8_E4M3FN, DType.INT8):
        return name, _naive(module, name, quantization)
    raise module.refused(name, f"it is {entry.dtype.value}, and no format of compressed-tensors that is known")


def _nvfp4(module: _Module, name: str, quantization: Mapping[str, Any]) -> Scaled:
    """The reciprocal of ModelOpt's scale of scales. torch divides by a number without dims in the dtype of the scales,
    which are bfloat16 by then, and by a tensor of one element in float32."""
    scale = module.take("weight_scale", dtypes=frozenset({DType.FLOAT8_E4M3FN}))
    other = module.take("weight_global_scale", dtypes=frozenset({DType.FLOAT32}))
    weights = _scheme(module, name, quantization, "float", 4)
    if scale is None or other is None or not _is_one(other) or weights.get("group_size") != 16:
        raise module.refused(name, "its scales are not those of NVFP4")
    third = Third.OVER if other.shape else Third.OVER_ROUNDED
    return _scaled(module, name, Values.E2M1, scale, wanted=(1, 16), dtype=DType.BFLOAT16, third=third, other=other)


def _packed(module: _Module, name: str, quantization: Mapping[str, Any]) -> Scaled:
    """Integers of 4 or 8 bits, packed into int32. A row that does not fill its last int32 is known by its groups."""
    module.used |= {"weight_shape"} & module.tensors.keys()
    scale = module.take("weight_scale")
    weights = next(
        (found for bits in (4, 8) if (found := _scheme_or_none(quantization, "int", bits)) is not None), None
    )
    entry = module.tensors[name]
    if scale is None or weights is None or len(entry.shape) != 2 or len(scale.shape) != 2:
        raise module.refused(name, "only integers of 4 or 8 bits with scales of rows or groups are known")
    if not weights.get("symmetric", True) or "weight_zero_point" in module.tensors:
        raise module.refused(name, "packed zero points are not read")
    bits, group = int(weights["num_bits"]), weights.get("group_size")
    columns = entry.shape[1] * 32 // bits
    wanted: Shape | None = None
    if weights.get("strategy") == "group" and isinstance(group, int) and group > 0:
        wanted, columns = (1, group), scale.shape[1] * group
    elif weights.get("strategy") != "channel" or scale.shape[1] != 1:
        raise module.refused(name, f"its scales by {weights.get('strategy')} are not known")
    elif "weight_shape" in module.tensors and columns % 32:
        raise module.refused(name, "its width is not known")
    if -(-columns * bits // 32) != entry.shape[1]:
        raise module.refused(name, f"its scales {list(scale.shape)} do not fit its shape {list(entry.shape)}")
    values = Values.INT4 if bits == 4 else Values.PLUS_128
    return _scaled(module, name, values, scale, wanted=wanted, dtype=scale.dtype, columns=columns)


def _naive(module: _Module, name: str, quantization: Mapping[str, Any]) -> Scaled:
    """fp8 or int8 as they are, with scales for the tensor, rows, groups or blocks."""
    entry = module.tensors[name]
    kind, values = ("int", Values.INT8) if entry.dtype is DType.INT8 else ("float", Values.E4M3)
    weights = _scheme(module, name, quantization, kind, 8)
    scale = module.take("weight_scale", dtypes=_SCALES | {DType.UINT8})
    zero = module.take("weight_zero_point", dtypes=frozenset({DType.INT8}))
    if scale is None or (not _is_one(scale) and len(scale.shape) != len(entry.shape)):
        raise module.refused(name, "its scales are missing, or of other dims")
    if len(entry.shape) < 2:
        raise module.refused(name, f"its shape {list(entry.shape)} is not that of a matrix")
    if zero is not None and zero.shape != scale.shape:
        raise module.refused(name, f"its zero points {list(zero.shape)} and scales {list(scale.shape)} do not fit")
    group, strategy = weights.get("group_size"), str(weights.get("strategy"))
    by_strategy: dict[str, Shape | None] = {
        "block": _pair(weights.get("block_structure")),
        "group": (1, group) if isinstance(group, int) and group > 0 else None,
        "channel": (1, 0),
        "tensor": (0, 0),
    }
    wanted = by_strategy.get(strategy)
    dtype = DType.BFLOAT16 if scale.dtype is DType.UINT8 else scale.dtype
    found = _scaled(
        module,
        name,
        values,
        scale,
        wanted=wanted,
        dtype=dtype,
        third=Third.NONE if zero is None else Third.MINUS,
        other=zero,
    )
    if wanted is None or any(
        block not in (wish or extent, extent)
        for block, wish, extent in zip(found.blocks[-2:], wanted, found.shape[-2:], strict=True)
    ):
        raise module.refused(name, f"its scales {list(scale.shape)} are not those of {strategy}")
    return found


def _scheme(module: _Module, name: str, quantization: Mapping[str, Any], kind: str, bits: int) -> Mapping[str, Any]:
    """The one kind of weights in the config's groups of this type and width. Raises UnsupportedError."""
    found = _scheme_or_none(quantization, kind, bits)
    if found is None:
        raise module.refused(name, f"{CONFIG_KEY} has no group, or several, with weights of {bits} bits ({kind})")
    return found


_SCHEME_KEYS = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric")


def _scheme_or_none(quantization: Mapping[str, Any], kind: str, bits: int) -> Mapping[str, Any] | None:
    groups = quantization.get("config_groups")
    found: list[Mapping[str, Any]] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("type", "int") == kind and weights.get("num_bits") == bits:
            known = {key: weights.get(key) for key in _SCHEME_KEYS if weights.get(key) is not None}
            if known not in found:
                found.append(known)
    return found[0] if len(found) == 1 else None


def _bitsandbytes(module: _Module, name: str, quantization: Mapping[str, Any]) -> _Made | None:
    """LLM.int8: a scale for each row, which is the row's largest magnitude; the largest integer is 127."""
    entry = module.tensors[name]
    scale = module.take("SCB", dtypes=frozenset({DType.FLOAT32}))
    if name != "weight" or entry.dtype is not DType.INT8 or scale is None or scale.shape != entry.shape[:1]:
        raise module.refused(name, f"it is {entry.dtype.value}, and only int8 with SCB is known")
    return name, _scaled(module, name, Values.INT8, scale, wanted=(1, 0), factor=_OF_127)


_OF_127 = 7.874015718698502e-3
"""bitsandbytes' own constant (``int8_vectorwise_dequant``), which is not quite 1/127."""

_METHODS: Mapping[str, _Rule] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
}
