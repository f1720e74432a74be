"""Quantized weights by method: how the tensors of a module become one weight that is computed when it is read. Pure.

The rules are those of the code that loads such a model: transformers 5.23 (``integrations/finegrained_fp8.py``,
``mxfp4.py``, ``bitsandbytes.py``), compressed-tensors 0.20 (``compressors``) and ModelOpt
(``qtensor/nvfp4_tensor.py``). A tensor of another form is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import TensorEntry
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.quantized import CONFIG_KEY
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.recipes.scales import ScaledWeight, ThirdOperand, ValueFormat

FP8_FORMATS = {DType.FLOAT8_E4M3FN: ValueFormat.E4M3, DType.FLOAT8_E5M2: ValueFormat.E5M2}
SCALE_DTYPES = frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16})
_EXPONENT_DTYPES = frozenset({DType.UINT8, DType.FLOAT8_E8M0FNU})

_SCHEME_KEYS = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric")


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """The quantized tensor ``name`` of the module ``prefix``, beside the other ``tensors`` of the module by the last
    part of their names, in a model with the ``quantization_config`` ``settings``. ``used_names`` are the full names of
    tensors that a weight is computed from, noted for all modules."""

    prefix: str
    tensors: Mapping[str, TensorEntry]
    used_names: set[str]
    name: str
    settings: Mapping[str, Any]

    @property
    def entry(self) -> TensorEntry:
        return self.tensors[self.name]

    @property
    def full_name(self) -> str:
        return self.prefix + self.name

    def take_tensor(self, *names: str, dtypes: frozenset[DType] = SCALE_DTYPES) -> TensorEntry | None:
        """The tensor of the first of ``names`` that the module has, noted as used; None if it has none. Raises
        UnsupportedError if its dtype is not one of ``dtypes``."""
        name = next((name for name in names if name in self.tensors), None)
        if name is None:
            return None
        self.used_names.add(self.prefix + name)
        entry = self.tensors[name]
        if entry.dtype not in dtypes:
            raise self.make_refusal(f"it is {entry.dtype.value}", name)
        return entry

    def take_scale(self, *names: str, dtypes: frozenset[DType] = SCALE_DTYPES) -> TensorEntry | None:
        """The scales, as ``take_tensor``: of ``weight`` under one of ``names``, of another tensor under its own."""
        return self.take_tensor(*(names if self.name == "weight" else (f"{self.name}_scale_inv",)), dtypes=dtypes)

    def make_refusal(self, why: str, name: str = "") -> UnsupportedError:
        """The refusal of the tensor, or of the one that is ``name``."""
        return UnsupportedError(
            f"{self.prefix}{name or self.name} cannot be dequantized: {why}; convert without "
            f"{format_option('dequantize', True)}"
        )

    def make_weight(
        self,
        value_format: ValueFormat,
        scale: TensorEntry,
        *,
        block_size: Shape | None,
        dtype: DType = DType.FLOAT32,
        third_operand: ThirdOperand = ThirdOperand.NONE,
        third_entry: TensorEntry | None = None,
        factor: float = 1.0,
        columns: int | None = None,
    ) -> ScaledWeight:
        """The tensor times ``scale``, whose blocks have the shape ``block_size`` where that fits, and else the shape
        that divides the weight evenly. ``columns`` are the values in a row, if they do not fill its elements."""
        entry = self.entry
        if not entry.shape:
            raise self.make_refusal("it is a single number")
        values_per_element = entry.dtype.item_bytes * 8 // value_format.bits
        shape = (*entry.shape[:-1], entry.shape[-1] * values_per_element if columns is None else columns)
        blocks = _find_block_shape(shape, scale.shape, block_size)
        if blocks is None:
            raise self.make_refusal(f"its values {list(shape)} and its scales {list(scale.shape)} do not fit")
        operands = (entry, scale) if third_entry is None else (entry, scale, third_entry)
        return ScaledWeight(shape, dtype, operands, value_format, blocks, third_operand, factor)

    def find_scheme(self, kind: str, bits: int) -> Mapping[str, Any]:
        """The settings of weights of this type and width in the config. Raises UnsupportedError unless its groups have
        one such set of settings."""
        scheme = self.find_scheme_or_none(kind, bits)
        if scheme is None:
            raise self.make_refusal(f"{CONFIG_KEY} has no group, or several, with weights of {bits} bits ({kind})")
        return scheme

    def find_scheme_or_none(self, kind: str, bits: int) -> Mapping[str, Any] | None:
        groups = self.settings.get("config_groups")
        schemes: list[Mapping[str, Any]] = []
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping) and weights.get("type", "int") == kind and weights.get("num_bits") == bits:
                scheme = {key: weights.get(key) for key in _SCHEME_KEYS if weights.get(key) is not None}
                if scheme not in schemes:
                    schemes.append(scheme)
        return schemes[0] if len(schemes) == 1 else None


PLAIN_FP8 = "plain fp8"
"""Stands for a method where no config names one."""

_NamedWeight: TypeAlias = tuple[str, ScaledWeight]
"""A weight's name in its module, and how it is computed."""

MethodRule: TypeAlias = Callable[[QuantizedTensor], _NamedWeight | None]
"""Makes the weight of a quantized tensor; None if the tensor is not of this kind."""


def _find_block_shape(shape: Shape, scales_shape: Shape, block_size: Shape | None) -> Shape | None:
    """The elements that share a scale, by dim; None if weights and scales of these shapes do not fit. ``block_size``
    are the last two, whose blocks may be cut at the edge; other dims have a scale each, or one in all."""
    if len(scales_shape) > len(shape):
        return None
    scales_shape += (1,) * (len(shape) - len(scales_shape))
    # First with the block size of the config, then with the one that divides evenly. In each dim, one scale is one
    # block of the whole dim; else the number of scales is ceil(extent / block), since blocks may be cut at the edge, or
    # without a block size a divisor of the extent.
    for tried_size in (block_size, None):
        blocks = []
        for dim, (extent, num_scales) in enumerate(zip(shape, scales_shape, strict=True)):
            dim_from_end = dim - len(shape)
            block = tried_size[dim_from_end] if tried_size is not None and dim_from_end >= -len(tried_size) else 0
            if num_scales == 1:
                blocks.append(max(1, extent))
            elif block and -(-extent // block) == num_scales:
                blocks.append(block)
            elif not block and num_scales and extent and extent % num_scales == 0:
                blocks.append(extent // num_scales)
        if len(blocks) == len(shape):
            return tuple(blocks)
    return None


def _parse_block_size(block: Any) -> Shape | None:
    """The rows and columns of a block in the config; None if it is not a list of two sizes."""
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    return tuple(block) if is_pair else None


def _dequantize_fp8(stored: QuantizedTensor) -> _NamedWeight | None:
    """DeepSeek's and transformers' own: blocks of ``weight_block_size``, cut at the edges; 4-bit experts in bytes."""
    dtype = stored.entry.dtype
    if dtype in _EXPONENT_DTYPES:
        return None
    value_format = FP8_FORMATS.get(dtype) or (
        ValueFormat.E2M1 if dtype in (DType.INT8, DType.FLOAT4_E2M1FN_X2) else None
    )
    dtypes = SCALE_DTYPES | _EXPONENT_DTYPES
    scale = stored.take_scale("weight_scale_inv", "scale", "qscale_weight", dtypes=dtypes)
    if value_format is None or scale is None:
        why = f"{dtype.value} without scales" if value_format else dtype.value
        raise stored.make_refusal(f"it is {why}")
    block = stored.settings.get("weight_block_size")
    block_size = _parse_block_size(block)
    if block is not None and block_size is None:
        raise stored.make_refusal(f"weight_block_size is {block!r}")
    if len(scale.shape) < 2 and scale.numel != 1:
        raise stored.make_refusal(f"its scales are of shape {list(scale.shape)}")
    return stored.name, stored.make_weight(value_format, scale, block_size=block_size)


def dequantize_plain_fp8(stored: QuantizedTensor) -> _NamedWeight | None:
    """fp8 without a config: scales under the usual names for the tensor, for each row, or for blocks of 128 x 128 that
    no edge cuts, so that their size is certain; without any scale in the checkpoint the values as they are."""
    entry = stored.entry
    if entry.dtype not in FP8_FORMATS:
        raise make_config_error(f"{stored.full_name} is {entry.dtype.value}, and ")
    scale = stored.take_scale("weight_scale_inv", "weight_scale", "scale_weight")
    if scale is None and stored.settings["has_scales"]:
        raise stored.make_refusal(f"it is {entry.dtype.value} without scales, and other tensors have them")
    if scale is None and entry.shape:
        blocks = tuple(max(1, extent) for extent in entry.shape)
        return stored.name, ScaledWeight(entry.shape, DType.FLOAT32, (entry,), FP8_FORMATS[entry.dtype], blocks)
    if scale is None:
        raise stored.make_refusal("it is a single number")
    rows = entry.shape[:1]
    grid = tuple(extent // 128 for extent in entry.shape if extent % 128 == 0)
    if scale.numel != 1 and scale.shape not in (rows, (*rows, 1), grid if len(grid) == 2 else rows):
        raise make_config_error(f"{stored.full_name} has scales {list(scale.shape)} of blocks of an unknown size, and ")
    return stored.name, stored.make_weight(FP8_FORMATS[entry.dtype], scale, block_size=None)


def _dequantize_mxfp4(stored: QuantizedTensor) -> _NamedWeight | None:
    """gpt-oss: ``[experts, rows, blocks, 16]`` bytes and an exponent for each block of 32 values. transformers holds
    the experts with rows and columns exchanged."""
    stem = stored.name.removesuffix("_blocks")
    if stored.name.endswith("_scales") and f"{stored.name.removesuffix('_scales')}_blocks" in stored.tensors:
        return None
    entry, scale = stored.entry, stored.take_tensor(f"{stem}_scales", dtypes=frozenset({DType.UINT8}))
    is_known = stem in ("gate_up_proj", "down_proj") and stem != stored.name and entry.dtype is DType.UINT8
    if scale is None or not is_known or len(entry.shape) != 4 or entry.shape[:-1] != scale.shape:
        raise stored.make_refusal(f"{entry.dtype.value} of shape {list(entry.shape)} are not experts of gpt-oss")
    experts, rows, groups, num_bytes = entry.shape
    elements = replace(entry, shape=(experts, rows, groups * num_bytes))
    columns = groups * num_bytes * 2
    weight = ScaledWeight(
        (experts, columns, rows),
        DType.FLOAT32,
        (elements, scale),
        ValueFormat.E2M1,
        (1, 1, num_bytes * 2),
        # torch.ldexp, which does not overflow where 2 ** 128 would.
        factor=2.0,
        exponent_bias=128,
        is_transposed=True,
    )
    return stem, weight


def _dequantize_modelopt(stored: QuantizedTensor) -> _NamedWeight | None:
    """ModelOpt: fp8 with a scale for the tensor, for each row or for each block; NVFP4 with scales of scales."""
    entry = stored.entry
    if stored.name == "weight_scale":
        return None
    if stored.name == "weight" and entry.dtype is DType.UINT8:
        scale = stored.take_tensor("weight_scale", dtypes=frozenset({DType.FLOAT8_E4M3FN}))
        global_scale = stored.take_tensor("weight_scale_2", dtypes=frozenset({DType.FLOAT32}))
        has_global_scale = global_scale is not None and global_scale.numel == 1
        if scale is not None and has_global_scale and len(scale.shape) == len(entry.shape):
            return stored.name, stored.make_weight(
                ValueFormat.E2M1,
                scale,
                block_size=(1, 16),
                third_operand=ThirdOperand.MULTIPLY_SCALES,
                third_entry=global_scale,
            )
    elif stored.name == "weight" and entry.dtype in FP8_FORMATS:
        scale = stored.take_tensor("weight_scale", "weight_scale_inv", dtypes=frozenset({DType.FLOAT32}))
        if scale is not None and (len(scale.shape) != 1 or scale.numel in (1, entry.shape[0])):
            return stored.name, stored.make_weight(FP8_FORMATS[entry.dtype], scale, block_size=(128, 128))
    raise stored.make_refusal(f"it is {entry.dtype.value}, and its scales are not those of FP8 or NVFP4")


def _dequantize_compressed_tensors(stored: QuantizedTensor) -> _NamedWeight | None:
    """compressed-tensors: the scheme is told by the tensors of the module, and its numbers must agree with a group of
    the config."""
    entry = stored.entry
    if stored.name in ("weight_scale", "weight_zero_point"):
        return None
    is_packed = stored.name == "weight_packed"
    if is_packed and "weight_global_scale" in stored.tensors:
        return "weight", _dequantize_nvfp4(stored)
    if is_packed and entry.dtype is DType.UINT8:
        scale = stored.take_tensor("weight_scale", dtypes=_EXPONENT_DTYPES)
        scheme = stored.find_scheme("float", 4)
        if scale is not None and scheme.get("group_size") == 32:
            return "weight", stored.make_weight(ValueFormat.E2M1, scale, block_size=(1, 32), dtype=DType.BFLOAT16)
    if is_packed and entry.dtype is DType.INT32:
        return "weight", _dequantize_packed(stored)
    if stored.name == "weight" and entry.dtype in (DType.FLOAT8_E4M3FN, DType.INT8):
        return stored.name, _dequantize_unpacked(stored)
    raise stored.make_refusal(f"it is {entry.dtype.value}, and no format of compressed-tensors that is known")


def _dequantize_nvfp4(stored: QuantizedTensor) -> ScaledWeight:
    """The reciprocal of ModelOpt's scale of scales. torch divides by a number without dims in the dtype of the scales,
    which are bfloat16 by then, and by a tensor of one element in float32."""
    scale = stored.take_tensor("weight_scale", dtypes=frozenset({DType.FLOAT8_E4M3FN}))
    global_scale = stored.take_tensor("weight_global_scale", dtypes=frozenset({DType.FLOAT32}))
    scheme = stored.find_scheme("float", 4)
    if scale is None or global_scale is None or global_scale.numel != 1 or scheme.get("group_size") != 16:
        raise stored.make_refusal("its scales are not those of NVFP4")
    third_operand = ThirdOperand.DIVIDE_SCALES if global_scale.shape else ThirdOperand.DIVIDE_SCALES_ROUNDED
    return stored.make_weight(
        ValueFormat.E2M1,
        scale,
        block_size=(1, 16),
        dtype=DType.BFLOAT16,
        third_operand=third_operand,
        third_entry=global_scale,
    )


def _dequantize_packed(stored: QuantizedTensor) -> ScaledWeight:
    """Integers of 4 or 8 bits, packed into int32. A row that does not fill its last int32 is known by its groups."""
    if "weight_shape" in stored.tensors:
        stored.used_names.add(f"{stored.prefix}weight_shape")
    scale = stored.take_tensor("weight_scale")
    schemes = (stored.find_scheme_or_none("int", bits) for bits in (4, 8))
    scheme = next(filter(None, schemes), None)
    entry = stored.entry
    if scale is None or scheme is None or len(entry.shape) != 2 or len(scale.shape) != 2:
        raise stored.make_refusal("only integers of 4 or 8 bits with scales of rows or groups are known")
    if not scheme.get("symmetric", True) or "weight_zero_point" in stored.tensors:
        raise stored.make_refusal("packed zero points are not read")
    bits, group_size = int(scheme["num_bits"]), scheme.get("group_size")
    columns = entry.shape[1] * 32 // bits
    block_size: Shape | None = None
    if scheme.get("strategy") == "group" and isinstance(group_size, int) and group_size > 0:
        block_size, columns = (1, group_size), scale.shape[1] * group_size
    elif scheme.get("strategy") != "channel" or scale.shape[1] != 1:
        raise stored.make_refusal(f"its scales by {scheme.get('strategy')} are not known")
    elif "weight_shape" in stored.tensors and columns % 32:
        raise stored.make_refusal("its width is not known")
    if -(-columns * bits // 32) != entry.shape[1]:
        raise stored.make_refusal(f"its scales {list(scale.shape)} do not fit its shape {list(entry.shape)}")
    value_format = ValueFormat.INT4 if bits == 4 else ValueFormat.PLUS_128
    return stored.make_weight(value_format, scale, block_size=block_size, dtype=scale.dtype, columns=columns)


def _dequantize_unpacked(stored: QuantizedTensor) -> ScaledWeight:
    """fp8 or int8 as they are, with scales for the tensor, rows, groups or blocks."""
    entry = stored.entry
    kind, value_format = ("int", ValueFormat.INT8) if entry.dtype is DType.INT8 else ("float", ValueFormat.E4M3)
    scheme = stored.find_scheme(kind, 8)
    scale = stored.take_tensor("weight_scale", dtypes=SCALE_DTYPES | {DType.UINT8})
    zero_points = stored.take_tensor("weight_zero_point", dtypes=frozenset({DType.INT8}))
    if scale is None or (scale.numel != 1 and len(scale.shape) != len(entry.shape)):
        raise stored.make_refusal("its scales are missing, or of other dims")
    if len(entry.shape) < 2:
        raise stored.make_refusal(f"its shape {list(entry.shape)} is not that of a matrix")
    if zero_points is not None and zero_points.shape != scale.shape:
        raise stored.make_refusal(
            f"its zero points {list(zero_points.shape)} and scales {list(scale.shape)} do not fit"
        )
    group_size, strategy = scheme.get("group_size"), str(scheme.get("strategy"))
    block_size_by_strategy: dict[str, Shape | None] = {
        "block": _parse_block_size(scheme.get("block_structure")),
        "group": (1, group_size) if isinstance(group_size, int) and group_size > 0 else None,
        "channel": (1, 0),
        "tensor": (0, 0),
    }
    block_size = block_size_by_strategy.get(strategy)
    dtype = DType.BFLOAT16 if scale.dtype is DType.UINT8 else scale.dtype
    weight = stored.make_weight(
        value_format,
        scale,
        block_size=block_size,
        dtype=dtype,
        third_operand=ThirdOperand.NONE if zero_points is None else ThirdOperand.ZERO_POINTS,
        third_entry=zero_points,
    )
    if block_size is None or any(
        block not in (wish or extent, extent)
        for block, wish, extent in zip(weight.block_shape[-2:], block_size, weight.shape[-2:], strict=True)
    ):
        raise stored.make_refusal(f"its scales {list(scale.shape)} are not those of {strategy}")
    return weight


def _dequantize_bitsandbytes(stored: QuantizedTensor) -> _NamedWeight | None:
    """LLM.int8: a scale for each row, which is the row's largest magnitude; the largest integer is 127."""
    entry = stored.entry
    scale = stored.take_tensor("SCB", dtypes=frozenset({DType.FLOAT32}))
    if stored.name != "weight" or entry.dtype is not DType.INT8 or scale is None or scale.shape != entry.shape[:1]:
        raise stored.make_refusal(f"it is {entry.dtype.value}, and only int8 with SCB is known")
    return stored.name, stored.make_weight(ValueFormat.INT8, scale, block_size=(1, 0), factor=_ONE_OVER_127)


_ONE_OVER_127 = 7.874015718698502e-3
"""bitsandbytes' own constant (``int8_vectorwise_dequant``), which is not quite 1/127."""

METHOD_RULES: Mapping[str, MethodRule] = {
    "fp8": _dequantize_fp8,
    "mxfp4": _dequantize_mxfp4,
    "compressed-tensors": _dequantize_compressed_tensors,
    "modelopt": _dequantize_modelopt,
    "bitsandbytes": _dequantize_bitsandbytes,
}


def make_config_error(reason: str = "") -> UsageError:
    return UsageError(
        f"{reason}{format_option('dequantize', True)} needs the {CONFIG_KEY} of the model's config.json; name its "
        f"folder with {format_option('config')}"
    )
