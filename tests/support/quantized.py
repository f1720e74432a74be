"""Folders of quantized models, and what ``--dequantize`` makes of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt_tools

Tensors = Mapping[str, torch.Tensor]


def write_model(folder: Path, tensors: Tensors, quantization: Mapping[str, Any] | None, **config: Any) -> Path:
    """A folder with the tensors, and a ``config.json`` with this ``quantization_config``."""
    folder.mkdir(parents=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **config}
    if quantization is not None:
        content["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder's one file."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def dequantized(
    folder: Path, tensors: Tensors, quantization: Mapping[str, Any], **options: Any
) -> dict[str, torch.Tensor]:
    """What ``convert`` with ``dequantize`` makes of the tensors; ``verify`` agrees, and ``config.json`` is plain."""
    source = write_model(folder / "quantized", tensors, quantization)
    ckpt_tools.convert(source, folder / "plain", to="safetensors", dequantize=True, **options)
    chosen = {name: value for name, value in options.items() if name == "dtype"}
    assert ckpt_tools.verify(source, folder / "plain", dequantize=True, **chosen).equal
    assert "quantization_config" not in json.loads((folder / "plain" / "config.json").read_text())
    return tensors_in(folder / "plain")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of elements, with one pattern for every NaN: no two kernels of torch agree about those."""
    plain = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return plain.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def bytes_of(shape: tuple[int, ...], seed: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def floats8(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Elements of 8 bits with every pattern among them, but for NaN and infinity."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)
    return torch.where(found.to(torch.float32).isfinite(), found.view(torch.uint8), 0).view(dtype)


def scales32(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    """Scales of many sizes, some so large or small that products overflow bfloat16 or are subnormal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-130, 122, shape, generator=generator)


def fp8(*block: int) -> dict[str, Any]:
    """``quantization_config`` of transformers' own quantizer."""
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block) or None}


def fp8_model(folder: Path) -> Path:
    """A tiny Qwen3 in blocks of fp8, which transformers' own code made."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    settings = fp8(32, 32)
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=SimpleNamespace(**settings, scale_fmt="float")))
    quantized: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        quantized |= quantizer.convert({name: tensor}) if name.endswith("proj.weight") else {name: tensor}
    save_file(quantized, folder / "model.safetensors", metadata={"format": "pt"})
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, "quantization_config": settings}))
    return folder
