"""``--dequantize`` beside the code of compressed-tensors: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.quantized import dequantized, same_bits

pytestmark = pytest.mark.extended

GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8, one scale": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8, rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8, blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
    ),
    "fp8, groups": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
    "int8, one scale": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "int8, rows": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8, groups": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16}),
    "int8, rows with zero points": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "packed, 4 bits": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "packed, 4 bits, rows": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "packed, 8 bits": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16}),
}

ROWS, COLUMNS = 64, 96


def scales_of(weights: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Scales in the shape of the strategy."""
    by_strategy = {
        "tensor": (1,),
        "channel": (ROWS, 1),
        "block": (-(-ROWS // 32), -(-COLUMNS // 32)),
        "group": (ROWS, COLUMNS // weights.get("group_size", 1)),
        "tensor_group": (ROWS, COLUMNS // 16),
    }
    shape = by_strategy[weights["strategy"]]
    generator = torch.Generator().manual_seed(3)
    if weights.get("scale_dtype") == "torch.uint8":
        return 2.0 ** torch.randint(-20, 20, shape, generator=generator).to(dtype)
    return (torch.rand(shape, generator=generator) * 0.1 + 1e-3).to(dtype)


def compressed(form: str, weights: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A module's tensors as compressed-tensors compresses them, and the scheme."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    state = {
        "weight": torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4)).to(dtype),
        "weight_scale": scales_of(weights, dtype),
        "weight_zero_point": torch.zeros(1, dtype=torch.int8),
    }
    if form == "nvfp4-pack-quantized":
        state["weight_global_scale"] = torch.full(shape, 37.5)
    if weights.get("symmetric") is False:
        state["weight_zero_point"] = torch.arange(ROWS, dtype=torch.int8)[:, None] - 20
    else:
        del state["weight_zero_point"]
    return BaseCompressor.get_value_from_registry(form).compress(state, scheme), scheme


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1,), ()], ids=["", "a number"])
@pytest.mark.parametrize("group", GROUPS)
def test_compressed_tensors_decompresses_to_the_same_bits(group, shape, dtype, tmp_path):
    from compressed_tensors.compressors import BaseCompressor

    form, weights = GROUPS[group]
    state, scheme = compressed(form, dict(weights), dtype, shape)
    wanted = BaseCompressor.get_value_from_registry(form).decompress(state, scheme)["weight"]
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"weights": weights}},
    }
    for name in ("float32", "bfloat16"):
        found = dequantized(tmp_path / name, {f"m.{key}": value for key, value in state.items()}, settings, dtype=name)
        assert found.keys() == {"m.weight"}
        assert same_bits(found["m.weight"], wanted.to(getattr(torch, name)))
